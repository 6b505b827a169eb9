"""Whether a query may run: the check of its text, the check of Spark's plan, and the limits of both."""
