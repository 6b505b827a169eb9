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
    """The keys that have changed since the last `take`, each once, in the order of their first change."""

    def __init__(self, keys: Iterable[K] = ()) -> None:
        self._keys: dict[K, None] = dict.fromkeys(keys)
        self._event = asyncio.Event()
        if self._keys:
            self._event.set()

    def add(self, key: K) -> None:
        self._keys[key] = None
        self._event.set()

    def take(self) -> list[K]:
        """Return the changed keys without waiting."""
        # Taken in one step: a key that changes while its last change is handled is reported again.
        keys, self._keys = self._keys, {}
        self._event.clear()
        return list(keys)

    async def wait(self) -> list[K]:
        """Wait until at least one key has changed, and return all changed keys."""
        await self._event.wait()
        return self.take()


class ChangeFeed(Generic[K]):
    """Notifies subscribers which keys changed. It holds no values; a subscriber reads the present ones."""

    def __init__(self) -> None:
        self._subscriptions: list[Subscription[K]] = []

    def subscribe(self, *, already: Iterable[K] = ()) -> Subscription[K]:
        """Return a subscription that starts with the keys in `already`."""
        subscription = Subscription(already)
        self._subscriptions.append(subscription)
        return subscription

    def notify(self, key: K) -> None:
        for subscription in self._subscriptions:
            subscription.add(key)


class WatchCell(Generic[T]):
    """Holds a value; readers wait for changes. A reader may miss values in between, but never the last one."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed = asyncio.Event()

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        """Replace the value and wake every waiting reader, if the value differs from the present one."""
        if value == self._value:
            return
        self._value = value
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> T:
        """Wait for the next change and return the new value."""
        await self._changed.wait()
        return self._value


class Wakeup:
    """Level-triggered: `wait` returns at once if `set` was called since the last `wait`, else at the next `set` or when
    the time is over.

    Only one task may wait; any number of tasks may call `set`.
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
        """Wait for `set`, at most `timeout` seconds (None: without limit). True if it was set."""
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
