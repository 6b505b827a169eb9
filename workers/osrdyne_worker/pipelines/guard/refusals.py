"""The error of a refused query.

Raised by `sql_guard`, `plan_guard` and `limits`; the SQL pipeline answers it as `error`.
"""

from __future__ import annotations

from osrdyne.errors import OsrdyneError


class QueryRefusedError(OsrdyneError):
    """The query is refused. The message has the reason; `position` is line and column, from 1, if known.

    `code` is the HTTP-like code (400: invalid query, 403: not allowed), `error_code` a word for programs.
    """

    def __init__(
        self, message: str, *, error_code: str, code: int = 403, position: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, error_code=error_code)
        self.code = code
        self.error_code = error_code
        self.position = position

    def details(self) -> dict[str, object]:
        """The position for the reply; empty if unknown."""
        if self.position is None:
            return {}
        line, column = self.position
        return {"line": line, "column": column}


class QueryNotReadError(QueryRefusedError):
    """`sql_guard` cannot parse the query. If Spark's parser can, its plan decides; otherwise this is the answer."""
