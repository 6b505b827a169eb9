"""The last lines of log files, for a reader who has nothing but the report of a failed test."""

from collections.abc import Iterator
from pathlib import Path

FILES, LINES, HALF_LINE = 12, 120, 500
"""At most so many files, so many lines of each, and so many characters from both ends of a line: a traceback is in one
line, and its end tells most."""


def log_tails(directory: Path) -> Iterator[tuple[str, str]]:
    """Name and last lines of each log below the directory; of the latest ones, if there are many."""
    found = [path for path in directory.rglob("*.log") if path.is_file() and path.stat().st_size]
    for path in sorted(sorted(found, key=lambda path: path.stat().st_mtime)[-FILES:]):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        yield str(path.relative_to(directory)), "\n".join(map(_shortened, lines[-LINES:]))


def _shortened(line: str) -> str:
    return line if len(line) <= 2 * HALF_LINE else f"{line[:HALF_LINE]} … {line[-HALF_LINE:]}"
