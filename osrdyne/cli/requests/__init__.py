"""Commands about single requests: send one, explain one, and manage poison requests."""
