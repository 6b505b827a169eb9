"""Commands about the daemon and its machine: run it, try it, check it and its configuration."""
