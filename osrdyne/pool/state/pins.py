"""Pinned keys: those of the configuration, and those a person pinned while the daemon ran.

The latter outlive the daemon in a global parameter of RabbitMQ (ARCHITECTURE, "State that must outlive the leader").
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from osrdyne.errors import InvalidKeyError
from osrdyne.protocol.names import Key, parse_key


class Parameters(Protocol):
    """Named JSON values that RabbitMQ keeps."""

    async def get_global_parameter(self, name: str) -> object | None: ...

    async def put_global_parameter(self, name: str, value: object) -> None: ...


class PinStore:
    """Which keys of one pool are pinned."""

    def __init__(self, parameters: Parameters, *, pool: str, configured: Iterable[str]) -> None:
        self._parameters = parameters
        self.name = f"osrdyne-{pool}-pinned"
        self._configured = [Key(key) for key in configured]
        self._changing = asyncio.Lock()
        self._latest: list[Key] = []

    async def load(self) -> list[Key]:
        """Every pinned key: configured, then kept. At the start of a term: what was kept before is forgotten."""
        self._latest = []
        return list(dict.fromkeys([*self._configured, *await self._kept()]))

    async def is_missing(self) -> bool:
        """Whether pins were kept, and RabbitMQ has none."""
        return bool(self._latest) and await self._parameters.get_global_parameter(self.name) is None

    async def put_again(self) -> None:
        """Keep the same pins again."""
        async with self._changing:
            await self._put(await self._kept())

    async def add(self, key: Key) -> None:
        async with self._changing:
            kept = await self._kept()
            if key not in kept:
                await self._put([*kept, key])

    async def remove(self, key: Key) -> None:
        """Forget a pin. One of the configuration comes back with the next term."""
        async with self._changing:
            kept = await self._kept()
            if key in kept:
                await self._put([other for other in kept if other != key])

    async def _kept(self) -> list[Key]:
        value = await self._parameters.get_global_parameter(self.name)
        if value is None:
            return list(self._latest)  # another client deleted it; this leader knows what it held
        keys = []
        for text in value if isinstance(value, list) else []:
            try:
                keys.append(parse_key(str(text)))
            except InvalidKeyError:
                continue
        self._latest = keys
        return keys

    async def _put(self, keys: list[Key]) -> None:
        await self._parameters.put_global_parameter(self.name, keys)
        self._latest = keys
