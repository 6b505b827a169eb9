"""The command line: thin. Every command reads arguments, asks one other part, and prints."""
