"""The errors of a document or a condition, all at once, each with its place.

Raised by the parsers of this package, shown by the command line and the API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from osrdyne.errors import ConfigurationError

MAX_PROBLEMS = 100  # of one document, in an answer and on a terminal


@dataclass(frozen=True, slots=True)
class Problem:
    """One error or warning, with its place.

    `path`: in the document, such as `routes.alerts.route`; empty for a condition that is not part of one. `column`:
    from 1; None if it concerns the whole value. `line`: of the document, from 1; None where `path` names the place.
    `file`: as the user named it.
    """

    message: str
    column: int | None = None
    path: str = ""
    line: int | None = None
    file: str = ""

    def __post_init__(self) -> None:
        # A message may quote the document, and a lone surrogate cannot be encoded for a terminal or a response.
        object.__setattr__(self, "message", _printable(self.message))
        object.__setattr__(self, "path", _printable(self.path))

    def __str__(self) -> str:
        line = "" if self.line is None else f"line {self.line}"
        column = "" if self.column is None else f"column {self.column}"
        place = ", ".join(filter(None, [self.file, self.path, line, column]))
        return f"{place}: {self.message}" if place else self.message


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class InvalidDocumentError(ConfigurationError):
    """A document is refused as a whole. `problems`: its errors; of very many, the first ones and how many more."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        if (more := len(problems) - MAX_PROBLEMS) > 1:
            problems = [*problems[:MAX_PROBLEMS], Problem(f"{more:,} more errors are not shown")]
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def in_file(self, file: str) -> InvalidDocumentError:
        """The same errors, each with the name of the document's file."""
        return InvalidDocumentError([replace(problem, file=file) for problem in self.problems])
