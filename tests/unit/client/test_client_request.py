"""From the arguments of a call to the message on the wire."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.client.request import (
    CallTimes,
    OutgoingRequest,
    RequestOptions,
    Sender,
    WantedAnswer,
    build_request,
    encode_body,
)
from osrdyne.errors import ConfigurationError, InvalidKeyError, InvalidMessageError
from osrdyne.protocol.deadlines import deadline_ms


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
def test_all_fields_of_the_deadline_agree(now: float, timeout: float) -> None:
    message = build(now=now, timeout=timeout).message
    deadline = message.headers["x-deadline"]
    assert isinstance(deadline, int)
    expiration, sent = message.expiration, message.timestamp
    assert deadline_ms(headers={}, expiration=expiration, timestamp=sent, first_seen_ms=deadline) == deadline
    assert abs(deadline / 1000 - (now + timeout)) < 0.002


def test_only_what_the_caller_wants_is_in_the_message() -> None:
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
def test_invalid_argument_is_refused_by_its_name(name: str, value: Any, kind: type[Exception]) -> None:
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
def test_body_is_bytes_as_they_are_or_json(body: object, encoded: tuple[bytes, str | None]) -> None:
    assert encode_body(body) == encoded
    for inexpressible in ({1, 2}, object(), {"a": b"bytes"}, "\ud800"):
        with pytest.raises(InvalidMessageError, match="JSON"):
            encode_body(inexpressible)


def test_token_is_sent_as_a_bearer_and_shown_nowhere() -> None:
    request = build(token="secret", headers={"authorization": "Basic x"})
    assert request.message.headers["authorization"] == "Bearer secret"
    assert "secret" not in f"{request} {request.message!r}"
    own = build(token="of the client", options={"token": "own"})
    assert own.message.headers["authorization"] == "Bearer own"
    for no_token in ("", "two words", "line\n", "ä", "x" * 8193):
        with pytest.raises(ConfigurationError) as error:
            build(token=no_token)
        assert not no_token or no_token not in str(error.value)
