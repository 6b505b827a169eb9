"""Signals between tasks: which keys changed, the latest value of something, one wake-up for a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Generic, TypeVar

from osrdyne.aio.clock import Clock

K = TypeVar("K")
T = TypeVar("T")


class Subscription(Generic[K]):
    """The keys changed since this subscriber last asked, in the order of their first change; later ones coalesce."""

    def __init__(self, keys: Iterable[K] = ()) -> None:
        self._keys: dict[K, None] = dict.fromkeys(keys)
        self._event = asyncio.Event()
        if self._keys:
            self._event.set()

    def add(self, key: K) -> None:
        self._keys[key] = None
        self._event.set()

    def take(self) -> list[K]:
        """The keys changed so far, at once; none when none did."""
        # Taken in one step: a key that changes while its last change is handled is reported again.
        keys, self._keys = self._keys, {}
        self._event.clear()
        return list(keys)

    async def wait(self) -> list[K]:
        """Wait until at least one key has changed, and take them all."""
        await self._event.wait()
        return self.take()


class ChangeFeed(Generic[K]):
    """Tells subscribers which keys changed; holds no values, so a subscriber always reads the present ones."""

    def __init__(self) -> None:
        self._subscriptions: list[Subscription[K]] = []

    def subscribe(self, *, already: Iterable[K] = ()) -> Subscription[K]:
        """A new subscription that starts with the keys in `already`."""
        subscription = Subscription(already)
        self._subscriptions.append(subscription)
        return subscription

    def notify(self, key: K) -> None:
        for subscription in self._subscriptions:
            subscription.add(key)


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


class Wakeup:
    """Level, not edge: `wait` returns once something was set since the last `wait`, or when the time is over.

    One task waits, any number may set.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None:
            _resolve(self._waiter)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`, at most `timeout` seconds (None: without limit). True when it was set."""
        if not self._is_set:
            if timeout is None or timeout > 0:
                await self._wait_at_most(timeout)
            else:
                await asyncio.sleep(0)
        was_set, self._is_set = self._is_set, False
        return was_set

    async def _wait_at_most(self, timeout: float | None) -> None:
        assert self._waiter is None, "another task waits already"
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        timer = None if timeout is None else self._clock.call_later(timeout, partial(_resolve, waiter))
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
