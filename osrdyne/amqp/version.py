"""RabbitMQ's version, and the differences between versions that matter to osrdyne. Source: broker:
at-least-once-dead-lettering, consumers-differ-by-version, reattached-consumers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class BrokerVersion:
    """Ordered as versions are, without what follows the three numbers (`-rc.1`, `+build`)."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a version such as "3.10.8"; 0.0.0, which is not supported, for any other text."""
        match = _VERSION.match(text)
        return cls(*(int(part or 0) for part in match.groups())) if match else cls(0, 0, 0)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def is_supported(self) -> bool:
        """From 3.10 on: the first version whose quorum queues have a TTL and dead-letter at least once."""
        return (self.major, self.minor) >= (3, 10)

    @property
    def is_tested(self) -> bool:
        """Up to 4.3; later versions may work."""
        return self.is_supported and (self.major, self.minor) <= (4, 3)

    @property
    def has_consumer_timeout_policy(self) -> bool:
        """Whether a policy can set the consumer timeout; before, only the configuration of the node can."""
        return (self.major, self.minor) >= (3, 12)

    @property
    def cancels_on_consumer_timeout(self) -> bool:
        """Whether a consumer timeout cancels the consumer; before, it closes the whole channel."""
        return (self.major, self.minor) >= (4, 3)

    @property
    def counts_nack(self) -> bool:
        """Whether a return by `basic.nack` counts towards the delivery limit."""
        return (self.major, self.minor) < (4, 3)

    @property
    def takes_any_reply_address(self) -> bool:
        """Whether a reply to any direct reply-to address is accepted; 3.10.8 closes the connection for some."""
        return (self.major, self.minor) >= (4, 3)

    @property
    def reattaches_consumers(self) -> bool:
        """Whether RabbitMQ may attach a consumer whose queue was deleted to the next queue of that name, without a
        notice to its client (broker: reattached-consumers)."""
        return self.major < 4

    @property
    def has_default_delivery_limit(self) -> bool:
        """Whether a quorum queue without a delivery limit drops a message after 20 returns."""
        return self.major >= 4
