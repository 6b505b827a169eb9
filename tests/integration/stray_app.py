"""A worker whose session reports two tasks that belong to no request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from osrdyne_worker import App, Context

T = TypeVar("T")


class StraySessions:
    """A session factory without a session."""

    def build(self, context: Context) -> Any:
        return "a session"

    def run_in_group(self, session: Any, group_id: str, function: Callable[[], T]) -> T:
        return function()

    def cancel(self, session: Any, group_id: str) -> None:
        """Nothing to cancel."""

    def progress(self, session: Any, group_id: str) -> Mapping[str, int]:
        return {}

    def is_alive(self, session: Any) -> bool:
        return True

    def request_session(self, session: Any) -> Any:
        return session

    def refusal(self, error: Exception) -> None:
        return None

    def rows(self, value: Any, *, limit: int) -> None:
        return None

    def stray_tasks(self, session: Any) -> Mapping[str, int]:
        return {"a group": 2}

    def close(self, session: Any) -> None:
        """Nothing to close."""


app = App(sessions=StraySessions())
