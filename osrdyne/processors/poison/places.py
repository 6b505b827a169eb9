"""The order of poison entries, which of them a question means, and how an answer is cut into pages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from osrdyne.errors import PoisonNotFoundError
from osrdyne.pool.views import PoisonQuery, PoisonView

MAX_PAGE_BYTES = 32 * 1024 * 1024
"""Bodies in one page; a single larger one is a page of its own."""


class Place(NamedTuple):
    """The place of an entry among the others: when it came, in milliseconds since the epoch, and its id."""

    at_ms: int
    id: str

    def __str__(self) -> str:
        return f"{self.at_ms}-{self.id}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises `PoisonNotFoundError`."""
        moment, _, name = text.rpartition("-")
        try:
            return cls(int(moment), name)
        except ValueError:
            raise PoisonNotFoundError("That is no place in the poison inventory: begin without `after`.") from None


def place_of(view: PoisonView) -> Place:
    return Place(0 if view.last_at is None else round(view.last_at * 1000), view.id)


def matches(view: PoisonView, query: PoisonQuery, *, now: float) -> bool:
    """Whether the query means this entry. One that came at an unknown time is older than anything."""
    age = float("inf") if view.last_at is None else now - view.last_at
    return (
        (query.keys is None or view.key in query.keys)
        and (query.path is None or view.path == query.path)
        and (query.older_than is None or age > query.older_than)
        and (query.newer_than is None or age < query.newer_than)
    )


def page_of(views: Sequence[PoisonView], *, after: Place | None, limit: int, with_bodies: bool) -> list[PoisonView]:
    """The entries of the next page, at least one if there is any; `views` are in order."""
    page: list[PoisonView] = []
    size_bytes = 0
    for view in views:
        if after is not None and place_of(view) <= after:
            continue
        size_bytes += view.size_bytes if with_bodies else 0
        if len(page) == limit or (page and size_bytes > MAX_PAGE_BYTES):
            break
        page.append(view)
    return page


def resolve(name: str, views: Sequence[PoisonView]) -> PoisonView:
    """The entry of this id, or the only one whose id begins like that. Raises `PoisonNotFoundError`."""
    found = [view for view in views if view.id == name] or [view for view in views if name and view.id.startswith(name)]
    if not found:
        raise PoisonNotFoundError(f"There is no entry {name} in the poison inventory.")
    if len(found) > 1:
        raise PoisonNotFoundError(f"More than one entry of the poison inventory begins with {name}.")
    return found[0]
