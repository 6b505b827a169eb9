"""A latest-value cell: one writer, many readers who care about what is true now, not about how it came to be."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class WatchCell(Generic[T]):
    """Holds a value; readers wait for the next change. Values in between may be missed, the last one never is."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed = asyncio.Event()

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        """Replace the value and wake every waiting reader, if it differs from the present one."""
        if value == self._value:
            return
        self._value = value
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> T:
        """Wait for the next change and return the value then."""
        await self._changed.wait()
        return self._value
