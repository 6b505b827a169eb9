"""The command line. A command parses its arguments, calls one other package, and prints the result."""
