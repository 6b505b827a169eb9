"""A cache of checked queries, bounded in number and in bytes; the least recently used entry is evicted first.

Thread-safe; used by the SQL pipeline. Two threads may make the value of one key at the same time; one value is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

LARGEST_SHARE = 4
"""A value larger than `max_bytes` divided by this is not kept: it would evict too many others."""


class Remembered(Generic[ValueT]):
    """At most `count` values with at most `max_bytes` in total; `make` returns the size of a value."""

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
        """The value of `key`. If it is not cached, `make` returns the value and its size in bytes, or raises."""
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
