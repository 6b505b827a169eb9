"""Why a query is refused: the one error of both nets.

Pure; raised by `sql_guard` and `plan_guard`, turned into an `error` reply by the SQL pipeline.
"""

from __future__ import annotations

from osrdyne.errors import OsrdyneError


class QueryRefusedError(OsrdyneError):
    """The query is refused; the message says why and, where known, `position` (line and column, from 1) says where.

    `code` is the HTTP-like number (400: it cannot be understood, 403: it may not be run), `error_code` a word for
    programs.
    """

    def __init__(
        self, message: str, *, error_code: str, code: int = 403, position: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, error_code=error_code)
        self.code = code
        self.error_code = error_code
        self.position = position

    def details(self) -> dict[str, object]:
        """The position, for the reply; empty when it is not known."""
        if self.position is None:
            return {}
        line, column = self.position
        return {"line": line, "column": column}


class QueryNotReadError(QueryRefusedError):
    """The first net cannot read the query. Where Spark's parser can, the plan decides; else this is the answer."""
