"""A `SnapshotStorage` in memory."""

from __future__ import annotations


class MemorySnapshots:
    """Stores the latest snapshot. `error`: both methods raise it."""

    name = "memory"

    def __init__(self, content: bytes | None = None) -> None:
        self.content = content
        self.error: Exception | None = None

    async def read(self) -> bytes | None:
        if self.error is not None:
            raise self.error
        return self.content

    async def write(self, content: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.content = content
