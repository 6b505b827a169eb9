"""The AsyncAPI document and the protocol pages name everything that the code sends and understands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from worker_environments import worker_environment

from osrdyne.protocol import activity, data_versions, deadlines, environment, messages, retries, streams
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command
from osrdyne.protocol.names import KEY_ARGUMENT, PoolNames
from osrdyne.protocol.statuses import CODES, Status

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "protocol"
DOCUMENT: dict[str, Any] = yaml.safe_load((DOCS / "asyncapi.yaml").read_text(encoding="utf-8"))
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
MESSAGES = DOCUMENT["components"]["messages"]

HEADERS = {
    value
    for module in (activity, data_versions, deadlines, messages, retries, streams)
    for name, value in vars(module).items()
    if name.endswith("_HEADER")
}
NAMES = {name: getattr(PoolNames("P"), name) for name, kind in vars(PoolNames).items() if isinstance(kind, property)}
EXCHANGES = {value for name, value in NAMES.items() if name.endswith("_exchange")}
QUEUES = {value for name, value in NAMES.items() if name.endswith("_queue")}


def test_document_has_every_status_event_and_command() -> None:
    assert MESSAGES["response"]["headers"]["properties"]["x-status"]["enum"] == list(Status)
    assert MESSAGES["report"]["headers"]["properties"]["x-event"]["enum"] == list(Event)
    assert MESSAGES["control"]["payload"]["properties"]["command"]["enum"] == list(Command)


def test_document_has_every_header() -> None:
    described = {name for message in MESSAGES.values() for name in message.get("headers", {}).get("properties", {})}
    assert len(HEADERS) > 10
    assert described >= HEADERS


def test_document_has_every_exchange_under_its_own_name() -> None:
    addresses = {(channel["address"] or "").replace("{pool}", "P") for channel in DOCUMENT["channels"].values()}
    assert len(EXCHANGES) > 5
    assert addresses >= EXCHANGES
    for channel in DOCUMENT["channels"].values():
        exchange = channel.get("bindings", {}).get("amqp", {}).get("exchange")
        assert exchange is None or exchange["name"] == channel["address"]


def test_page_has_every_status_with_its_code() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` †? ?\| (\d{3}) \|", PAGE, re.MULTILINE))
    assert rows == {str(status): str(code) for status, code in CODES.items()}


def test_page_names_all_that_is_on_the_broker() -> None:
    assert [name for name in sorted(EXCHANGES | QUEUES) if f"`{name}`" not in PAGE] == []
    assert f"`{KEY_ARGUMENT}`" in PAGE


def test_page_names_every_header_event_and_command() -> None:
    assert [name for name in sorted(HEADERS | set(Event) | set(Command)) if f"`{name}`" not in PAGE] == []


def test_page_names_every_variable_of_a_worker() -> None:
    documented = set(re.findall(r"WORKER_[A-Z_]+", Path(environment.__file__).read_text(encoding="utf-8")))
    assert set(worker_environment().to_variables()) <= documented
    assert [name for name in sorted(documented) if f"`{name}`" not in PAGE] == []
