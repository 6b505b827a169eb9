"""Commands about the daemon: run it, start a development stack, check its host and its configuration."""
