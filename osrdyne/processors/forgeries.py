"""Forged messages and reply addresses: dropped, counted, and logged at a bounded rate.

Replies go through RabbitMQ's default exchange to any queue, without a permission for it; such a delivery names the
exchange ``. Publishing to a named exchange requires write permission there. So a message is genuine only if it came
through the pool's own exchange for it. Measured on 3.10.8 and 4.3.6: a message that took the alternate exchange keeps
the name of the exchange that it was published to; a dead letter names the dead letter exchange, with every strategy.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from osrdyne.amqp import Delivery
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.protocol.messages import Request, header_text
from osrdyne.protocol.names import ReplyAddresses

LOG_INTERVAL = 60.0  # Seconds between two log lines about forged messages of one queue.
MAX_KEYS = 10_000  # Keys that are remembered as logged; beyond it the oldest is forgotten and may be logged again.
SHOWN_CHARACTERS = 200


class Forgeries:
    """Detects forged messages for all processors of one leader's term."""

    def __init__(self, context: TermContext) -> None:
        self._addresses = ReplyAddresses(context.names, context.settings.requests.reply_to_prefixes)
        self._clock, self._metrics = context.clock, context.metrics
        self._logged_at: dict[str, float] = {}
        self._unlogged: dict[str, int] = {}
        self._logged_keys: OrderedDict[str, None] = OrderedDict()
        self._log: Logger = get_logger("forgeries", pool=context.names.pool)

    def is_forged(self, delivery: Delivery, exchange: str, *, queue: str) -> bool:
        """Whether a message of `queue` did not come through `exchange`. If so, it is counted and logged, and the caller
        acknowledges it."""
        # RabbitMQ writes the exchange into the delivery; no publisher can set it.
        if delivery.exchange == exchange:
            return False
        self.count(queue, exchange=delivery.exchange, size_bytes=len(delivery.body))
        return True

    def is_forged_orphan(self, delivery: Delivery) -> bool:
        """As `is_forged`, for orphans: they keep the name of the exchange that a client published to. It may be an
        operator's own exchange that is bound to the pool's; the default exchange cannot be bound."""
        if delivery.exchange != "":
            return False
        self.count("orphans", exchange="", size_bytes=len(delivery.body))
        return True

    def count(self, queue: str, *, messages: int = 1, **facts: object) -> None:
        """Count forged messages that were dropped."""
        self._metrics.forged_messages.labels(queue=queue).inc(messages)
        # Counted between two log lines: a flood of forged messages must not flood the log.
        self._unlogged[queue] = self._unlogged.get(queue, 0) + messages
        now = self._clock.monotonic()
        if now - self._logged_at.get(queue, -math.inf) >= LOG_INTERVAL:
            self._logged_at[queue] = now
            self._log.warning("forged message dropped", queue=queue, messages=self._unlogged.pop(queue), **facts)

    def refuses_reply_to(self, request: Request, *, component: str) -> bool:
        """Whether no answer may go to the request's reply address. If so, it is counted, and logged once for its key;
        the caller acknowledges the request without running or answering it."""
        reason = self._addresses.refuse(request.reply_to)
        if reason is None:
            return False
        self.count_reply_to(component, key=request.key, reason=reason, reply_to=request.reply_to)
        return True

    def count_reply_to(
        self, component: str, *, key: str, reason: str, reply_to: str | None = None, requests: int = 1
    ) -> None:
        """Count requests that were dropped because of their reply address."""
        self._metrics.forged_reply_to.labels(component=component).inc(requests)
        if key in self._logged_keys:
            return
        # The key is a client's text: without a limit of the dict a client could fill the memory of the leader.
        self._logged_keys[key] = None
        if len(self._logged_keys) > MAX_KEYS:
            self._logged_keys.popitem(last=False)
        shown = {} if reply_to is None else {"reply_to": header_text(reply_to, limit=SHOWN_CHARACTERS)}
        self._log.warning(
            "request dropped, its reply address is not allowed",
            key=header_text(key, limit=SHOWN_CHARACTERS),
            component=component,
            reason=reason,
            **shown,
        )
