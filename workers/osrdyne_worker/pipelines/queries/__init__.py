"""Forms of a query besides its text: parameters, look-ups of keys, results in pages, results as files."""
