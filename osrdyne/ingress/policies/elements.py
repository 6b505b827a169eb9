"""The elements of a policy: their names in a document, the format of their values, and their meaning.

`python -m osrdyne.ingress.policies.elements` writes the table of the reference page; a test compares both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from osrdyne.config.types import duration_xml, parse_duration, parse_size
from osrdyne.ingress.policies.poison_drop import FORMS, parse_poison_drop
from osrdyne.ingress.policies.policy import Authorization, Discoverability, Overflow, TransportProtection

BEGIN = "<!-- elements: written by `python -m osrdyne.ingress.policies.elements` -->"
END = "<!-- end of elements -->"


@dataclass(frozen=True, slots=True)
class Element:
    """One element. `parse` raises `ValueError` with the expected format. `show` returns a JSON value that `parse`
    accepts, and `show_xml` the text of the element in XML. `is_computed`: a proposal may only repeat it. `is_endpoint`:
    in XML it is an endpoint reference."""

    name: str
    field: str
    default: str
    bounds: str
    meaning: str
    parse: Callable[[Any], Any]
    show: Callable[[Any], Any] = lambda value: value
    show_xml: Callable[[Any], str] = str
    is_computed: bool = False
    is_endpoint: bool = False


def _choice(kind: type[StrEnum]) -> Callable[[Any], Any]:
    def parse(value: Any) -> StrEnum:
        if value not in list(kind):
            raise ValueError(f"one of {', '.join(kind)} is expected")
        return kind(value)

    return parse


def _size(value: Any) -> Any:
    size: Any = parse_size(value)
    if size < 0:
        raise ValueError("a size must not be negative")
    return size


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a whole number of at least 1 is expected")
    return value


def _instant(value: Any) -> datetime:
    try:
        found = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError("a date and time in UTC is expected, as 2026-01-31T12:00:00Z") from None
    # The element is defined in UTC, so a time without an offset is UTC.
    found = found.replace(tzinfo=UTC) if found.tzinfo is None else found
    if found.utcoffset():
        raise ValueError("it must be expressed in UTC, as 2026-01-31T12:00:00Z")
    return found


def _show_instant(value: datetime) -> str:
    return value.isoformat().replace("+00:00", "Z")


def _address(value: Any) -> str | None:
    if value is None:  # as the effective policy shows the inventory alone
        return None
    if not isinstance(value, str):
        raise ValueError(f"expected {FORMS}")
    parse_poison_drop(value)
    return value


ELEMENTS = (
    Element(
        "Authorization", "authorization", "`NotRequired`",
        "`Required`, `RequiredToSend`, `RequiredToReceive`, `NotRequired`",
        "Whether senders need the grant `send`, and the principal of the workers the grant `listen`.",
        _choice(Authorization),
    ),
    Element(
        "Discoverability", "discoverability", "`Managers`",
        "`Managers`, `ManagersListeners`, `ManagersListenersSenders`, `Public`",
        "Who sees the queue in the registry.",
        _choice(Discoverability),
    ),
    Element(
        "ExpirationInstant", "expiration_instant", "now + 24 h", "now + 30 s to now + 21 d, in UTC",
        "When the created queue of the key is removed. Without effect in a document.",
        _instant, _show_instant, _show_instant,
    ),
    Element(
        "MaxMessageSize", "max_message_size", "60 KiB", "8 KiB to `requests.max_message_bytes`",
        "Bytes of body and headers of one request; a larger one is answered `too-large`.",
        _size,
    ),
    Element(
        "TransportProtection", "transport_protection", "`AllPaths`", "`AllPaths`, `None`",
        "Whether HTTP requests about the key must be protected by TLS.",
        _choice(TransportProtection),
    ),
    Element(
        "EnqueueTimeout", "enqueue_timeout", "10 s", "0 s to 60 s",
        "How long a request waits for room in a full queue before Overflow applies.",
        parse_duration, show_xml=duration_xml,
    ),
    Element(
        "MaxConcurrentReaders", "max_concurrent_readers", "2147483648", "1 to 2147483648",
        "How many workers may read the queue at the same time.",
        _count,
    ),
    Element(
        "MaxDequeueRetries", "max_dequeue_retries", "`requests.delivery_limit`", "1 to 2147483648",
        "Failed deliveries after which a request is poison.",
        _count,
    ),
    Element(
        "MaxMessageAge", "max_message_age", "10 min", "0 s to 7 d",
        "Upper limit of the time-to-live of a request. With 0 every request is answered `expired`.",
        parse_duration, show_xml=duration_xml,
    ),
    Element(
        "MaxQueueLength", "max_queue_length", "2147483648", "1 to 2147483648",
        "How many requests of the key may wait. Requests that a worker has taken do not count.",
        _count,
    ),
    Element(
        "MaxQueueCapacity", "max_queue_capacity", "MaxQueueLength × MaxMessageSize",
        "computed; at most `requests.max_length_bytes`",
        "Bytes that can wait. It cannot be set; the renewal of a created queue may repeat it.",
        _size, is_computed=True,
    ),
    Element(
        "Overflow", "overflow", "`RejectIncomingMessage`",
        "`RejectIncomingMessage`, `DiscardIncomingMessage`, `DiscardExistingMessage`",
        "What happens to a request that finds no room in time.",
        _choice(Overflow),
    ),
    Element(
        "PoisonMessageDrop", "poison_message_drop", "the poison inventory alone",
        "`amqp:/queues/NAME`, `amqp:/exchanges/NAME`, `amqp:/exchanges/NAME/ROUTING-KEY`, or a URL",
        "Where a copy of a poison request is sent, once, beside the inventory.",
        _address, is_endpoint=True,
    ),
)  # fmt: skip
BY_NAME = {element.name: element for element in ELEMENTS}
BY_FIELD = {element.field: element for element in ELEMENTS}


def elements_table() -> str:
    rows = [f"| `{one.name}` | {one.default} | {one.bounds} | {one.meaning} |" for one in ELEMENTS]
    return "\n".join(("| element | default | values | meaning |", "|---|---|---|---|", *rows))


def update(page: str) -> str:
    """The page with the present table between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{elements_table()}\n\n{END}{tail}"


def main() -> None:
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference/policies.md")
    page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
