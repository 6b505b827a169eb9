"""Pinned keys: those of the configuration, and those that an operator pinned at run time.

The latter are kept in a global parameter of RabbitMQ, so that they outlive the daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from osrdyne.errors import InvalidKeyError
from osrdyne.protocol.names import Key, parse_key


class Parameters(Protocol):
    """Named JSON values stored in RabbitMQ."""

    async def get_global_parameter(self, name: str) -> object | None: ...

    async def put_global_parameter(self, name: str, value: object) -> None: ...


class PinStore:
    """The pinned keys of one pool."""

    def __init__(self, parameters: Parameters, *, pool: str, configured: Iterable[str]) -> None:
        self._parameters = parameters
        self.name = f"osrdyne-{pool}-pinned"
        self._configured = [Key(key) for key in configured]
        self._changing = asyncio.Lock()
        self._latest: list[Key] = []

    async def load(self) -> list[Key]:
        """Load every pinned key at the start of a term: those of the configuration, then those kept in RabbitMQ."""
        self._latest = []
        return list(dict.fromkeys([*self._configured, *await self._kept()]))

    async def is_missing(self) -> bool:
        """Whether pins were stored and RabbitMQ has none."""
        return bool(self._latest) and await self._parameters.get_global_parameter(self.name) is None

    async def store_again(self) -> None:
        """Store the same pins again."""
        async with self._changing:
            await self._put(await self._kept())

    async def add(self, key: Key) -> None:
        async with self._changing:
            kept = await self._kept()
            if key not in kept:
                await self._put([*kept, key])

    async def remove(self, key: Key) -> None:
        """Remove a pin. A pin of the configuration comes back with the next term."""
        async with self._changing:
            kept = await self._kept()
            if key in kept:
                await self._put([other for other in kept if other != key])

    async def _kept(self) -> list[Key]:
        value = await self._parameters.get_global_parameter(self.name)
        if value is None:
            return list(self._latest)  # another client has deleted the parameter: its latest value applies
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
