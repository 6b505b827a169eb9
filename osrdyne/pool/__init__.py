"""The pool manager: which groups should be up, and the two loops that make it so."""
