"""A place for snapshots in memory."""

from __future__ import annotations


class MemorySnapshots:
    """Keeps the latest snapshot; `error`, when set, is what both methods raise."""

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
