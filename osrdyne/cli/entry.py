"""The command `osrdyne`: imports the command line, during which Ctrl-C must not print a traceback either."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        from osrdyne.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()
