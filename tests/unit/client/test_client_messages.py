"""From the arguments of a call to the message; replies and the errors they stand for; the poison inventory."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import osrdyne.client
from osrdyne.api.endpoints.poison import Entry
from osrdyne.client import ARROW_TYPE, PoisonEntry, Reply, RequestError, StartFailedError, UnknownStatusError, errors
from osrdyne.client.errors import error_from_reply
from osrdyne.client.request import (
    CallTimes,
    OutgoingRequest,
    RequestOptions,
    Sender,
    WantedAnswer,
    build_request,
    encode_body,
)
from osrdyne.errors import ConfigurationError, InvalidKeyError, InvalidMessageError, OsrdyneError
from osrdyne.protocol.deadlines import deadline_ms
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
def test_every_status_has_an_error_of_its_own(status):
    error = error_of(Reply(status))
    kind = KINDS.get(status, status.name.title().replace("_", ""))
    assert type(error) is getattr(osrdyne.client, f"{kind}Error")
    assert (error.status, error.code) == (status, CODES[status])
    assert isinstance(error, OsrdyneError)


def test_error_carries_the_facts_of_the_answer():
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


def test_reply_of_another_type_shows_what_it_is():
    with pytest.raises(InvalidMessageError, match="text/plain"):
        Reply(body=b"hello", content_type="text/plain").json()
    for content_type, named in ((None, "accept=ARROW_TYPE"), (ARROW_TYPE, "Arrow")):
        with pytest.raises(InvalidMessageError, match=named):
            Reply(body=b"{}", content_type=content_type).arrow()
    assert Reply().json() is None


@pytest.mark.parametrize(("name", "now"), errors.RENAMED.items())
def test_earlier_names_of_errors_work_with_a_warning(name, now):
    with pytest.warns(DeprecationWarning, match=now):
        assert getattr(errors, name) is getattr(errors, now)


NUMBERS = st.floats(0, 1e12)
DEATHS = st.lists(st.builds(WorkerDeath, at=NUMBERS), min_size=1, max_size=2).map(tuple)
HEADERS = st.dictionaries(st.text(), st.integers() | st.text(), max_size=3)


@given(st.builds(PoisonRecord, deaths=DEATHS, first_at=NUMBERS, last_at=NUMBERS, headers=HEADERS))
def test_client_reads_the_record_of_the_daemon(sent):
    document = Entry.model_validate(sent).model_dump(mode="json")
    document["of_a_later_version"] = document["deaths"][0]["of_a_later_version"] = 1
    entry = PoisonEntry.from_document(document)
    names = [one.name for one in fields(PoisonRecord)]
    assert [getattr(entry, name) for name in names] == [getattr(sent, name) for name in names]
    assert (entry.unexplained, entry.body_encoding) == (document["unexplained"], document["body_encoding"])
    assert entry.document is document


def build(key: Any = "k", path: Any = "/p", options: Any = None, **given: Any) -> OutgoingRequest:
    """A request; each keyword goes to the part that has a field of this name."""

    def part(kind: type[Any], **defaults: object) -> Any:
        return kind(**{**defaults, **{one.name: given.pop(one.name) for one in fields(kind) if one.name in given}})

    times, sender = part(CallTimes, now=1_700_000_000.25, timeout=10.0), part(Sender, app_id="me")
    answer = part(WantedAnswer)
    options = RequestOptions(**given, **(options or {}))
    return build_request(
        key, path, None, correlation_id="id", times=times, sender=sender, answer=answer, options=options
    )


@given(now=st.floats(1e9, 4e9), timeout=st.floats(0.001, 1e6))
def test_all_fields_of_the_deadline_agree(now, timeout):
    message = build(now=now, timeout=timeout).message
    deadline = message.headers["x-deadline"]
    assert isinstance(deadline, int)
    expiration, sent = message.expiration, message.timestamp
    assert deadline_ms(headers={}, expiration=expiration, timestamp=sent, first_seen_ms=deadline) == deadline
    assert abs(deadline / 1000 - (now + timeout)) < 0.002


def test_only_what_the_caller_wants_is_in_the_message():
    one_way = build(reply_to=None, has_deadline=False).message
    assert (one_way.reply_to, one_way.expiration) == (None, None)
    assert not {"x-deadline", "x-progress", "authorization"} & one_way.headers.keys()
    assert build(wants_progress=True).message.headers["x-progress"] is True
    assert int(build(timeout=49 * 86_400).message.expiration or 2**32) < 2**32, "fits into one of RabbitMQ"
    assert build(timeout=1e9, has_deadline=False).message.expiration is None
    headers = build(headers={"x-deadline": 1, "x-rpc-path": "/other", "mine": "kept"}).message.headers
    assert (headers["x-deadline"], headers["x-rpc-path"], headers["mine"]) == (1_700_000_010_250, b"/p", "kept")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *(("timeout", value, ValueError) for value in (0, -1, float("inf"), float("nan"), 49 * 86_400 + 1)),
        *(("answer_slack", value, ValueError) for value in (-1, float("inf"), float("nan"))),
        ("timeout", "5s", TypeError),
        ("time_out", 5, TypeError),
        ("key", b"k", TypeError),
        ("key", "x" * 256, InvalidKeyError),
        ("key", "\ud800", InvalidKeyError),
        ("path", b"/p", TypeError),
    ],
)
def test_invalid_argument_is_refused_by_its_name(name, value, kind):
    with pytest.raises(kind, match=name):
        build(**{name: value})


@pytest.mark.parametrize(
    ("body", "encoded"),
    [
        (None, (b"", None)),
        (b"\x00raw", (b"\x00raw", None)),
        (memoryview(b"view"), (b"view", None)),
        ({"é": [1, None]}, ('{"é":[1,null]}'.encode(), "application/json")),
        ("text", (b'"text"', "application/json")),
        (0, (b"0", "application/json")),
    ],
)
def test_body_is_bytes_as_they_are_or_json(body, encoded):
    assert encode_body(body) == encoded
    for inexpressible in ({1, 2}, object(), {"a": b"bytes"}, "\ud800"):
        with pytest.raises(InvalidMessageError, match="JSON"):
            encode_body(inexpressible)


def test_token_is_sent_as_a_bearer_and_shown_nowhere():
    request = build(token="secret", headers={"authorization": "Basic x"})
    assert request.message.headers["authorization"] == "Bearer secret"
    assert "secret" not in f"{request} {request.message!r}"
    own = build(token="of the client", options={"token": "own"})
    assert own.message.headers["authorization"] == "Bearer own"
    for no_token in ("", "two words", "line\n", "ä", "x" * 8193):
        with pytest.raises(ConfigurationError) as error:
            build(token=no_token)
        assert not no_token or no_token not in str(error.value)
