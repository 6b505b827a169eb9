"""Regular expressions of RE2, which match every expression in time linear in the text (decision 0022)."""

from __future__ import annotations

from typing import Any

import re2

MAX_EXPRESSION_MEMORY = 1 << 20
"""Bytes that RE2 may use for one expression; a larger expression is refused."""


def compile_linear(text: str) -> Any:
    """Compile an expression with RE2, because any caller may choose the text. Raises ValueError."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_EXPRESSION_MEMORY
    try:
        return re2.compile(text, options)
    except UnicodeEncodeError:
        raise ValueError("it is not valid Unicode") from None
    except re2.error as error:
        reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error.args[0])
        raise ValueError(f"{reason} (the syntax is that of RE2)") from None
