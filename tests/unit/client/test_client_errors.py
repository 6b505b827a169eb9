"""Replies and the errors they stand for; entries of the poison inventory."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import osrdyne.client
from osrdyne.api.endpoints.poison import Entry
from osrdyne.client import ARROW_TYPE, PoisonEntry, Reply, RequestError, StartFailedError, UnknownStatusError, errors
from osrdyne.client.errors import error_from_reply
from osrdyne.errors import InvalidMessageError, OsrdyneError
from osrdyne.protocol.poison import PoisonRecord, WorkerDeath
from osrdyne.protocol.statuses import CODES, Status

KINDS = {
    Status.ERROR: "RequestFailed",
    Status.EXPIRED: "RequestExpired",
    Status.REJECTED: "RequestRejected",
    Status.MAXLEN: "RequestQueueFull",
    Status.POISON: "RequestPoisoned",
    Status.CANCELLED: "RequestCancelled",
    Status.CAPACITY: "NoCapacity",
    Status.INVALID: "InvalidRequest",
    Status.TOO_LARGE: "RequestTooLarge",
    Status.GONE: "QueueGone",
    Status.QUEUE_FULL: "RequestQueueFull",
}


def error_of(reply: Reply) -> RequestError:
    error = error_from_reply(reply, key="k", path="/p")
    assert error is not None
    return error


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_every_status_has_an_error_of_its_own(status: Status) -> None:
    error = error_of(Reply(status))
    kind = KINDS.get(status, status.name.title().replace("_", ""))
    assert type(error) is getattr(osrdyne.client, f"{kind}Error")
    assert (error.status, error.code) == (status, CODES[status])
    assert isinstance(error, OsrdyneError)


def test_error_carries_the_facts_of_the_answer() -> None:
    headers = {"x-status": bytearray(b"error"), "x-code": 418, "x-worker-id": "w", "mine": 1}
    body = json.dumps({"error": {"code": "no-such-view", "message": "None.", "path": "/sql", "hint": "y"}}).encode()
    reply = Reply.from_wire(headers=headers, body=body, content_type=None)
    assert (reply.status, reply.code, reply.worker_id, reply.headers) == ("error", 418, "w", {"mine": 1})
    of_handler = error_of(reply)
    assert "(no-such-view)" in str(of_handler)
    assert (of_handler.error.path, dict(of_handler.error.details)) == ("/sql", {"hint": "y"})
    error = error_of(Reply("of-tomorrow", code=529, detail="Full.", worker_id="w", retry_after=2.5))
    assert isinstance(error, UnknownStatusError)
    assert (error.code, error.detail, error.worker_id, error.retry_after) == (529, "Full.", "w", 2.5)
    assert error.fields == {"key": "k", "path": "/p"}
    assert "'of-tomorrow'" in str(error)
    assert str(error).endswith("Full.")
    assert error_from_reply(Reply(), key="k", path="/p") is None
    for body in (b"", b"\xff", b"[]", b'{"error": 1}', b"[" * 100_000):  # without an error in it
        error = error_of(Reply("error", body=body, detail="first\nsecond"))
        assert str(error).endswith(": first")
        assert error.error.message == ""
    in_body = Reply("start-failed", body=b'{"error": {"message": "m", "log_lines": ["a", "b"]}}')
    for reply in (in_body, Reply("start-failed", detail="It died.\na\nb")):
        error = error_of(reply)
        assert isinstance(error, StartFailedError)
        assert error.log_lines == ("a", "b")


def test_reply_of_another_type_shows_what_it_is() -> None:
    with pytest.raises(InvalidMessageError, match="text/plain"):
        Reply(body=b"hello", content_type="text/plain").json()
    for content_type, named in ((None, "accept=ARROW_TYPE"), (ARROW_TYPE, "Arrow")):
        with pytest.raises(InvalidMessageError, match=named):
            Reply(body=b"{}", content_type=content_type).arrow()
    assert Reply().json() is None


@pytest.mark.parametrize("name", sorted(errors.RENAMED))
def test_earlier_names_of_errors_work_with_a_warning(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=errors.RENAMED[name]):
        assert getattr(errors, name) is getattr(errors, errors.RENAMED[name])


NUMBERS = st.floats(0, 1e12)
DEATHS = st.lists(st.builds(WorkerDeath, at=NUMBERS), min_size=1, max_size=2).map(tuple)
HEADERS = st.dictionaries(st.text(), st.integers() | st.text(), max_size=3)


@given(st.builds(PoisonRecord, deaths=DEATHS, first_at=NUMBERS, last_at=NUMBERS, headers=HEADERS))
def test_client_reads_the_record_of_the_daemon(sent: PoisonRecord) -> None:
    document = Entry.model_validate(sent).model_dump(mode="json")
    document["of_a_later_version"] = document["deaths"][0]["of_a_later_version"] = 1
    entry = PoisonEntry.from_document(document)
    names = [one.name for one in fields(PoisonRecord)]
    assert [getattr(entry, name) for name in names] == [getattr(sent, name) for name in names]
    assert (entry.unexplained, entry.body_encoding) == (document["unexplained"], document["body_encoding"])
    assert entry.document is document
