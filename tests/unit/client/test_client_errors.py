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
    Status.ERROR: "RequestFailedError",
    Status.EXPIRED: "RequestExpiredError",
    Status.REJECTED: "RequestRejectedError",
    Status.MAXLEN: "RequestQueueFullError",
    Status.DELIVERY_LIMIT: "DeliveryLimitError",
    Status.POISON: "RequestPoisonedError",
    Status.CANCELLED: "RequestCancelledError",
    Status.START_FAILED: "StartFailedError",
    Status.CAPACITY: "NoCapacityError",
    Status.NOT_RUNNING: "NotRunningError",
    Status.INVALID: "InvalidRequestError",
    Status.NO_ROUTE: "NoRouteError",
    Status.UNAUTHORIZED: "UnauthorizedError",
    Status.FORBIDDEN: "ForbiddenError",
    Status.TOO_LARGE: "RequestTooLargeError",
    Status.GONE: "QueueGoneError",
    Status.QUEUE_FULL: "RequestQueueFullError",
    Status.CIRCUIT_OPEN: "CircuitOpenError",
    Status.QUOTA_EXCEEDED: "QuotaExceededError",
    Status.RATE_LIMITED: "RateLimitedError",
}


def error_of(reply: Reply) -> RequestError:
    error = error_from_reply(reply, key="k", path="/p")
    assert error is not None
    return error


def failed(status: str, **error: object) -> Reply:
    return Reply(status, body=json.dumps({"error": error}).encode())


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_every_status_has_an_error_of_its_own(status: Status) -> None:
    error = error_of(Reply(status))
    assert type(error) is getattr(osrdyne.client, KINDS[status])
    assert (error.status, error.code) == (status, CODES[status])
    assert isinstance(error, OsrdyneError)


def test_error_carries_the_facts_of_the_answer() -> None:
    reply = Reply("capacity", code=529, detail="Full.", worker_id="w", retry_after=2.5)
    error = error_of(reply)
    assert (error.code, error.detail, error.worker_id, error.retry_after) == (529, "Full.", "w", 2.5)
    assert error.fields == {"key": "k", "path": "/p"}
    assert str(error).endswith("Full.")
    of_handler = error_of(failed("error", code="no-such-view", message="None.", path="/sql", hint="y"))
    assert "(no-such-view)" in str(of_handler)
    assert (of_handler.error.path, dict(of_handler.error.details)) == ("/sql", {"hint": "y"})
    assert error_from_reply(Reply(), key="k", path="/p") is None


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b'{"error": 1}', b"[" * 100_000], ids=range(5))
def test_body_without_an_error_in_it_is_not_a_fault(body: bytes) -> None:
    error = error_of(Reply("error", body=body, detail="first\nsecond"))
    assert str(error).endswith(": first")
    assert error.error.message == ""


def test_log_lines_of_a_failed_start_come_from_the_body_or_the_detail() -> None:
    in_body = error_of(failed("start-failed", message="m", log_lines=["a", "b"]))
    in_detail = error_of(Reply("start-failed", detail="It died.\na\nb"))
    assert isinstance(in_body, StartFailedError)
    assert isinstance(in_detail, StartFailedError)
    assert in_body.log_lines == in_detail.log_lines == ("a", "b")


def test_status_of_a_later_version_is_named() -> None:
    error = error_of(Reply("of-tomorrow", detail="Slow down.", retry_after=3.0))
    assert isinstance(error, UnknownStatusError)
    assert "'of-tomorrow'" in str(error)
    assert (error.retry_after, error.code) == (3.0, None)


def test_reply_from_the_wire_reads_byte_arrays_and_text() -> None:
    headers = {"x-status": bytearray(b"error"), "x-code": 418, "x-worker-id": "w", "mine": 1}
    reply = Reply.from_wire(headers=headers, body=b"1", content_type=None)
    assert (reply.status, reply.code, reply.worker_id, reply.headers) == ("error", 418, "w", {"mine": 1})


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
    assert {one.name: getattr(entry, one.name) for one in fields(PoisonRecord)} == {
        one.name: getattr(sent, one.name) for one in fields(PoisonRecord)
    }
    assert (entry.unexplained, entry.body_encoding) == (document["unexplained"], document["body_encoding"])
    assert entry.document is document
