"""Which keys changed: a feed with any number of subscribers, each with its own set of keys not looked at yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Generic, TypeVar

K = TypeVar("K")


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
