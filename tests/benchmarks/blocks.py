"""Calls, so many at once, and how long each took. Part of the floor, too: it imports nothing of osrdyne."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """Milliseconds of every call, and the seconds of all together."""

    latencies: list[float]
    seconds: float

    def __add__(self, other: Block) -> Block:
        return Block(self.latencies + other.latencies, self.seconds + other.seconds)

    @property
    def calls_per_second(self) -> float:
        return len(self.latencies) / self.seconds


async def seconds(work: Awaitable[object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def run_block(call: Callable[[], Awaitable[object]], *, calls: int, in_flight: int) -> Block:
    """Make `calls` calls with `in_flight` under way all the time."""
    left = iter(range(calls))
    latencies: list[float] = []

    async def keep_calling() -> None:
        latencies.extend([await seconds(call()) * 1000 for _ in left])

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(keep_calling())
    return Block(latencies, time.perf_counter() - began)
