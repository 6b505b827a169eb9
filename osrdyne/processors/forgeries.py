"""Messages and reply addresses that the controller does not believe: dropped, counted, and logged at a bounded rate.

Anyone who gets a reply sent somewhere writes through RabbitMQ's default exchange, and a delivery then says that its
exchange is ``. A named exchange asks for the permission to write there. So a message counts only when it came through
the pool's own exchange for it. What RabbitMQ was measured to say (3.10.8 and 4.3.6): a message that took the alternate
exchange keeps the exchange that it was published to; a dead letter says the dead letter exchange, with every strategy.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from osrdyne.aio.clock import Clock
from osrdyne.amqp import Delivery
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.protocol.messages import Request, header_text
from osrdyne.protocol.reply_addresses import ReplyAddresses

LOG_INTERVAL = 60.0
"""Seconds between two log lines about forged messages of one queue."""
MAX_KEYS = 10_000
"""Keys that are remembered as logged; beyond that the oldest is forgotten, and may be logged again."""
SHOWN_CHARACTERS = 200


class Forgeries:
    """Counts and logs what was dropped, for all processors of one term."""

    def __init__(self, addresses: ReplyAddresses, *, metrics: Metrics, clock: Clock) -> None:
        self._addresses = addresses
        self._metrics = metrics
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}
        self._logged_keys: OrderedDict[str, None] = OrderedDict()
        self._log: Logger = get_logger("forgeries", pool=addresses.names.pool)

    def is_forged(self, delivery: Delivery, exchange: str, *, queue: str) -> bool:
        """Whether a message of `queue` came another way than through `exchange`. Then it is counted and logged, and
        the caller acknowledges it."""
        if delivery.exchange == exchange:
            return False
        self.count(queue, exchange=delivery.exchange, size_bytes=len(delivery.body))
        return True

    def is_forged_orphan(self, delivery: Delivery) -> bool:
        """As `is_forged`, for orphans: they keep the name of the exchange that a client published to, which may be one
        of an operator's own that is bound to ours. Only the default exchange cannot be."""
        if delivery.exchange != "":
            return False
        self.count("orphans", exchange="", size_bytes=len(delivery.body))
        return True

    def count(self, queue: str, *, messages: int = 1, **facts: object) -> None:
        """Note forged messages that were dropped."""
        self._metrics.forged_messages.labels(queue=queue).inc(messages)
        self._unlogged[queue] = self._unlogged.get(queue, 0) + messages
        now = self._clock.monotonic()
        if now - self._logged_at.get(queue, -math.inf) >= LOG_INTERVAL:
            self._logged_at[queue] = now
            self._log.warning("forged message dropped", queue=queue, messages=self._unlogged.pop(queue), **facts)

    def refuses_reply_to(self, request: Request, *, component: str) -> bool:
        """Whether no answer may go to the request's reply address. Then it is counted, and logged once for its key;
        the caller neither runs nor answers the request, and acknowledges it."""
        reason = self._addresses.refuse(request.reply_to)
        if reason is None:
            return False
        self.count_reply_to(component, key=request.key, reason=reason, reply_to=request.reply_to)
        return True

    def count_reply_to(
        self, component: str, *, key: str, reason: str, reply_to: str | None = None, requests: int = 1
    ) -> None:
        """Note requests that were dropped for their reply address."""
        self._metrics.forged_reply_to.labels(component=component).inc(requests)
        if key in self._logged_keys:
            return
        self._logged_keys[key] = None
        if len(self._logged_keys) > MAX_KEYS:
            self._logged_keys.popitem(last=False)
        shown = {} if reply_to is None else {"reply_to": header_text(reply_to, limit=SHOWN_CHARACTERS)}
        self._log.warning(
            "request dropped, it would be answered where no answer may go",
            key=header_text(key, limit=SHOWN_CHARACTERS),
            component=component,
            reason=reason,
            **shown,
        )
