"""The pool manager: which groups should run, and the loops that make it so."""
