"""Global parameters of RabbitMQ in memory, whose answers take a while."""

from __future__ import annotations

import asyncio


class Parameters:
    """Implements `pool.pins.Parameters`."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}

    async def get_global_parameter(self, name: str) -> object | None:
        await asyncio.sleep(0)
        return self.values.get(name)

    async def put_global_parameter(self, name: str, value: object) -> None:
        await asyncio.sleep(0)
        self.values[name] = value
