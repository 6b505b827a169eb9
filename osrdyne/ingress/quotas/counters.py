"""A table of counters by name, at most 96 bytes each for 100,000 of them. Pure.

Python's own dictionary of texts and numbers takes more than twice as much. Names are kept as hashes of 64 bits; the
names of the largest counters are kept as well, to be shown.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

MAX_COUNTERS = 100_000  # Further names share one counter.
MAX_NAMES = 1_000  # Names that are kept as text.
_MAX_NAME = 255  # Characters of a kept name.
_OTHERS = 1  # The hash of the counter that further names share.


@lru_cache(4_096)  # the same names are hashed several times for each message
def name_hash(name: str) -> int:
    """A hash that is the same in every process. 0 (a free place) and 1 (the shared counter) never occur."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return max(2, int.from_bytes(digest, "little"))


class CounterTable:
    """Counters and, for send rates, one moment each: an open hash table with linear probing."""

    def __init__(self) -> None:
        self._clear(256)
        self.names: dict[int, str] = {}
        self._least_named = 0  # No counter with a kept name is smaller: they only grow.

    def _clear(self, capacity: int) -> None:
        self._mask = capacity - 1
        self._hashes = array("Q", bytes(8 * capacity))
        self.counts = array("q", bytes(8 * capacity))
        self.moments = array("d", bytes(8 * capacity))
        self.size = 0

    def find(self, hashed: int) -> int | None:
        """The place of a counter; of the shared one if the table is full; None if the counter does not exist yet."""
        place = self._probe(hashed)
        if self._hashes[place] == hashed:
            return place
        if self.size < MAX_COUNTERS:
            return None
        place = self._probe(_OTHERS)
        return place if self._hashes[place] == _OTHERS else None

    def place(self, hashed: int) -> int:
        """The place of a counter, which is added if it is new. Places change when a counter is added."""
        if (found := self.find(hashed)) is not None:
            return found
        hashed = hashed if self.size < MAX_COUNTERS else _OTHERS
        if 5 * (self.size + 1) > 4 * (self._mask + 1):
            self._rebuild(2 * (self._mask + 1), list(self.items()))
        place = self._probe(hashed)
        self._hashes[place] = hashed
        self.size += 1
        return place

    def add(self, name: str, hashed: int, amount: int) -> int:
        """Count, and return the place. The name of a large counter is kept."""
        place = self.place(hashed)
        before = self.counts[place]
        self.counts[place] = after = before + amount
        # Seldom, because names are compared: when a counter is new, and whenever it has doubled.
        if self._hashes[place] == hashed and before.bit_length() != after.bit_length():
            self._keep_name(name, hashed, after)
        return place

    def _keep_name(self, name: str, hashed: int, count: int) -> None:
        if hashed in self.names:
            return
        if len(self.names) >= MAX_NAMES:
            if count <= self._least_named:
                return
            smallest = min(self.names, key=self.count)
            self._least_named = self.count(smallest)
            if self._least_named >= count:
                return
            del self.names[smallest]
        # A client chooses its application id, which may not be UTF-8; names are stored as JSON and shown.
        self.names[hashed] = name.encode("utf-8", "backslashreplace").decode()[:_MAX_NAME]

    def count(self, hashed: int) -> int:
        """The value of a counter; 0 if it does not exist."""
        place = self.find(hashed)
        return 0 if place is None else self.counts[place]

    def _probe(self, hashed: int) -> int:
        """The place of the hash, or the free place where it belongs."""
        hashes, mask = self._hashes, self._mask
        place = hashed & mask
        while hashes[place] not in (0, hashed):
            place = (place + 1) & mask
        return place

    def items(self) -> Iterator[tuple[int, int, float]]:
        """Hash, count and moment of every counter."""
        for place, hashed in enumerate(self._hashes):
            if hashed:
                yield hashed, self.counts[place], self.moments[place]

    def largest(self, most: int) -> list[tuple[str, int]]:
        """The largest counters whose names are kept."""
        found = sorted(((self.count(hashed), name) for hashed, name in self.names.items()), reverse=True)
        return [(name, count) for count, name in found[:most]]

    def reset(self) -> None:
        """Set every counter to zero, and remove those that were zero before."""
        kept = [(hashed, 0, moment) for hashed, count, moment in self.items() if count]
        self._rebuild(_capacity(len(kept)), kept)
        self._least_named = 0
        self.names = {hashed: name for hashed, name in self.names.items() if self.find(hashed) is not None}

    def _rebuild(self, capacity: int, items: list[tuple[int, int, float]]) -> None:
        self._clear(capacity)
        for hashed, count, moment in items:
            place = self._probe(hashed)
            self._hashes[place], self.counts[place], self.moments[place] = hashed, count, moment
            self.size += 1

    def dump(self) -> tuple[array[int], array[int]]:
        """Hashes and counts, to be stored."""
        hashes, counts = array("Q"), array("q")
        for hashed, count, _ in self.items():
            hashes.append(hashed)
            counts.append(count)
        return hashes, counts

    def load(self, hashes: array[int], counts: array[int], names: dict[int, str]) -> None:
        """Continue with stored counters. Invalid ones are left out."""
        found = {hashed: max(0, count) for hashed, count in zip(hashes, counts, strict=False) if hashed}
        items = list(found.items())[: MAX_COUNTERS + 1]
        self._rebuild(_capacity(len(items)), [(hashed, count, 0.0) for hashed, count in items])
        self.names = {hashed: name for hashed, name in names.items() if hashed in found}
        self._least_named = 0


def _capacity(size: int) -> int:
    capacity = 256
    while 5 * size > 4 * capacity:
        capacity *= 2
    return capacity
