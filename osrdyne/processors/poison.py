"""The poison inventory: requests that reached the delivery limit, kept with what is known of their end.

An entry is the request itself, in `P-poison`, with headers of ours added. Listing takes a snapshot: messages are read
on a channel of their own and all go back, in their order, when it closes.
"""

from __future__ import annotations

from osrdyne.amqp import Channel, Delivery, Message
from osrdyne.pool.view import PoisonView
from osrdyne.protocol.messages import BROKER_HEADERS, PATH_HEADER
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.statuses import decode_text

KEY_HEADER = "x-osrdyne-poison-key"
REASON_HEADER = "x-osrdyne-poison-reason"
DELIVERIES_HEADER = "x-osrdyne-poison-deliveries"
FIRST_AT_HEADER = "x-osrdyne-poison-first-ms"
LAST_AT_HEADER = "x-osrdyne-poison-last-ms"
_OURS = frozenset({KEY_HEADER, REASON_HEADER, DELIVERIES_HEADER, FIRST_AT_HEADER, LAST_AT_HEADER})


def poison_entry(delivery: Delivery, *, deliveries: int, now_ms: int) -> Message:
    """The message that goes into the inventory; it never expires there."""
    timestamp = delivery.properties.timestamp
    headers = {name: value for name, value in delivery.headers.items() if name not in BROKER_HEADERS}
    headers[KEY_HEADER] = delivery.routing_key
    headers[REASON_HEADER] = "delivery_limit"
    headers[DELIVERIES_HEADER] = deliveries
    headers[LAST_AT_HEADER] = now_ms
    if timestamp is not None:
        headers[FIRST_AT_HEADER] = int(timestamp.timestamp() * 1000)
    return delivery.to_message(headers=headers, expiration=None)


def view_entry(position: int, delivery: Delivery) -> PoisonView:
    """An entry as the API shows it."""
    headers = delivery.headers
    return PoisonView(
        position=position,
        key=decode_text(headers.get(KEY_HEADER)) or delivery.routing_key,
        path=decode_text(headers.get(PATH_HEADER)) or "",
        correlation_id=delivery.properties.correlation_id,
        reason=decode_text(headers.get(REASON_HEADER)) or "unknown",
        first_at=_seconds(headers.get(FIRST_AT_HEADER)),
        last_at=_seconds(headers.get(LAST_AT_HEADER)),
        deliveries=_number(headers.get(DELIVERIES_HEADER)),
        size_bytes=len(delivery.body),
        headers={name: value for name, value in headers.items() if name not in _OURS | BROKER_HEADERS},
        body=delivery.body,
    )


async def read_inventory(channel: Channel, names: PoolNames, *, limit: int) -> list[PoisonView]:
    """The first `limit` entries, none consumed: closing `channel`, the caller's work, puts them back."""
    entries: list[PoisonView] = []
    while len(entries) < limit and (delivery := await channel.get(names.poison_queue)) is not None:
        entries.append(view_entry(len(entries) + 1, delivery))
    return entries


def _seconds(milliseconds: object) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, int) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
