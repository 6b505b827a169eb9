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

    def __str__(self) -> str:
        place = ", ".join(filter(None, [self.path, f"column {self.column}" if self.column is not None else ""]))
        return f"{place}: {self.message}" if place else self.message


class InvalidDocumentError(ConfigurationError):
    """A document was refused as a whole; `problems` are all of its errors."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
