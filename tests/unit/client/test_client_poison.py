"""An entry of the poison inventory is the same record in the daemon and in a client that asked its HTTP API."""

from __future__ import annotations

from dataclasses import fields

import pytest

from osrdyne.api.endpoints.poison import Entry
from osrdyne.client import PoisonEntry
from osrdyne.protocol.poison import PoisonRecord, WorkerDeath


def record(body: bytes | None) -> PoisonRecord:
    return PoisonRecord(
        id="3f",
        key="a",
        path="/sql",
        correlation_id="c",
        reply_to=None,
        message_id=None,
        app_id="client",
        content_type="text/plain",
        reason="delivery_limit",
        deliveries=6,
        deaths=(WorkerDeath("w", "exit code 9", None, 12.5, ("out of memory",), others=2),),
        finding="1 of 6 deliveries ended with the death of the worker that ran it.",
        replays=1,
        first_at=10.0,
        last_at=13.0,
        size_bytes=0 if body is None else len(body),
        headers={"x-path": "/sql", "x-attempts": 3},
        body=body,
    )


@pytest.mark.parametrize("body", [None, b"", b"select 1", "é".encode(), b"\xff\x00"])
def test_client_reads_the_record_of_the_daemon(body: bytes | None) -> None:
    sent = record(body)
    document = Entry.model_validate(sent).model_dump(mode="json")
    document["of_a_later_version"] = document["deaths"][0]["of_a_later_version"] = 1
    entry = PoisonEntry.from_document(document)
    assert {one.name: getattr(entry, one.name) for one in fields(PoisonRecord)} == {
        one.name: getattr(sent, one.name) for one in fields(PoisonRecord)
    }
    assert (entry.unexplained, entry.body_encoding) == (document["unexplained"], document["body_encoding"])
    assert entry.document is document
