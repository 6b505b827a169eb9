"""What is wrong with a document or a condition: every error at once, each with its place.

Made by the parsers of this package, shown by the command line and the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osrdyne.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: what is wrong, where in the document (`routes.alerts.route`), and at which 1-based column of the text.

    `path` is empty for a condition on its own; `column` is None where the whole value is wrong.
    """

    message: str
    column: int | None = None
    path: str = ""

    def __post_init__(self) -> None:
        # A message may quote the document. A lone surrogate in it could not be written to a terminal or a response.
        object.__setattr__(self, "message", _printable(self.message))
        object.__setattr__(self, "path", _printable(self.path))

    def __str__(self) -> str:
        place = ", ".join(filter(None, [self.path, f"column {self.column}" if self.column is not None else ""]))
        return f"{place}: {self.message}" if place else self.message


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class InvalidDocumentError(ConfigurationError):
    """A document was refused as a whole; `problems` are all of its errors."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
