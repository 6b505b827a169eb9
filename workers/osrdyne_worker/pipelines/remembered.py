"""Checked queries that may be asked again, bounded in number and in bytes; the least recently used goes first.

Thread-safe; used by the SQL pipeline. What is made for one query by two threads at once is made twice, and one is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

LARGEST_SHARE = 4
"""What takes more than this part of the room is not kept: it would push out too many others."""


class Remembered(Generic[ValueT]):
    """At most `count` values of at most `max_bytes` together, as they were said to be when they were made."""

    def __init__(self, *, count: int, max_bytes: int) -> None:
        self._count = count
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[ValueT, int]] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], tuple[ValueT, int]]) -> ValueT:
        """The value of `key`; `make` gives it and its bytes when it is not there, and may raise."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value, size = make()
        with self._lock:
            if key not in self._values and size * LARGEST_SHARE <= self._max_bytes:
                self._values[key] = (value, size)
                self._bytes += size
                while self._bytes > self._max_bytes or len(self._values) > self._count:
                    _, (_, freed) = self._values.popitem(last=False)
                    self._bytes -= freed
            return self._values[key][0] if key in self._values else value
