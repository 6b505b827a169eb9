"""Bodies of requests and replies, and what an App accepts as a handler."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import BaseModel, ConfigDict, Field

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.messages import JSON_TYPE, Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Answer, App, Call, Context, RequestError
from osrdyne_worker.app.codec import answer_to_response, decoder_for, error_response, is_large
from osrdyne_worker.requests.replies import fitting, reply_message


class Query(BaseModel):
    query: str
    limit: int = Field(10, gt=0)


@dataclass
class Point:
    x: int
    y: int = 0


def decode(request_type: Any, body: bytes) -> Any:
    app = App()

    def handler(call: Call, request: Any) -> None: ...

    handler.__annotations__["request"] = request_type
    app.handler("/p")(handler)
    decoder = decoder_for(app.registered_handlers()["/p"])
    assert decoder is not None
    return decoder(body)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    query: str | None = None
    begin: int = Field(0, alias="from")


@pytest.mark.parametrize(
    ("request_type", "body", "value"),
    [
        (Query, b'{"query": "q"}', Query(query="q")),
        (Point, b'{"x": 1}', Point(1)),
        (dict[str, int], b"", {}),
        (list[int], b"[1, 2]", [1, 2]),
        (bytes, b"\xff", b"\xff"),
        (str, "é".encode(), "é"),
        (Any, b"17", 17),
    ],
    ids=str,
)
def test_body_becomes_the_request_type(request_type, body, value):
    assert decode(request_type, body) == value


@pytest.mark.parametrize(
    ("request_type", "body", "code", "named"),
    [
        (Query, b"{", "invalid_json", "JSON"),
        (Query, b'{"query": "q", "limit": 0}', "invalid_request", "limit"),
        (Point, b'{"x": "hunter2", "y": "b"}', "invalid_request", "(1 more)"),
        (Strict, b'{"sql": "q"}', "invalid_request", "query, from"),
        (list[Strict], b'[{}, {"sql": "q"}]', "invalid_request", "[1].sql"),
        (str, b"a\xff", "invalid_text", "byte 1"),
    ],
)
def test_wrong_body_is_refused_without_its_values(request_type, body, code, named):
    with pytest.raises(RequestError) as caught:
        decode(request_type, body)
    assert (caught.value.code, caught.value.error_code) == (400, code)
    assert named in caught.value.message
    assert "hunter2" not in json.dumps([caught.value.message, caught.value.details])


@pytest.mark.parametrize(
    ("value", "body", "content_type"),
    [
        (None, b"", None),
        (b"\x00", b"\x00", "application/octet-stream"),
        ("é", "é".encode(), "text/plain; charset=utf-8"),
        ({"d": date(2024, 1, 2)}, b'{"d":"2024-01-02"}', JSON_TYPE),
        (Query(query="q"), b'{"query":"q","limit":10}', JSON_TYPE),
        (Point(1, 2), b'{"x":1,"y":2}', JSON_TYPE),
        ([float("nan")], b'["NaN"]', JSON_TYPE),
        (Answer([1], content_type="x/y", code=201), b"[1]", "x/y"),
    ],
    ids=str,
)
def test_answer_becomes_a_response(value, body, content_type):
    response = answer_to_response(value)
    assert (response.body, response.content_type, response.progress) == (body, content_type, False)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 100_000,
        [{"id": id_, "name": "sensor"} for id_ in range(20_000)],
        {"rows": [1.5] * 20_000, "more": False},
        Query(query="q" * 100_000),
        {"numbers": (number for number in range(3))},
        CYCLE,
    ],
    ids=["text", "many rows", "column", "large model", "generator", "cycle"],
)
def test_answer_that_takes_long_to_encode_is_large(value):
    assert is_large(value)
    assert not any(map(is_large, (None, b"x" * 100_000, {"count": 3}, Query(query="q"), Point(1, 2))))


def test_error_response_has_the_documented_body():
    response = error_response(RequestError("no", 403, "refused", {"hint": "h"}), path="/p")
    assert json.loads(response.body) == {"error": {"code": "refused", "message": "no", "path": "/p", "hint": "h"}}
    assert (response.status, response.code, response.detail) == ("error", 403, "no")
    message = reply_message(Request("k", b"", reply_to="r"), response, worker_id="w", reference_statuses=True)
    assert (message.headers["x-status"], message.headers["x-osrdyne-status"]) == (bytearray(b"core_error"), "error")
    for value, named in (({"a": object()}, "object"), ({"x": pd.Period("2024-01")}, r"pandas.*Period")):
        with pytest.raises(RequestError, match=named) as caught:
            answer_to_response(value)
        assert (caught.value.code, caught.value.error_code) == (500, "invalid_answer")
    progress = fitting(answer_to_response(b"xx", progress=True), Request("k", b""), 1)
    assert (progress.code, progress.progress) == (413, True), "too large, and still progress"


@pytest.mark.parametrize(("reply_to", "persistent"), [("amq.rabbitmq.reply-to.g1h2", False), ("replies", True)])
def test_reply_is_persistent_where_it_can_be_stored(reply_to, persistent):
    request = Request("k", b"", reply_to=reply_to, correlation_id="c")
    message = reply_message(request, answer_to_response(b"x"), worker_id="w")
    assert (message.persistent, message.correlation_id) == (persistent, "c")
    assert message.headers["x-worker-id"] == "w"


def test_wrong_registrations_are_refused_and_a_context_hides_its_secrets():
    for handler in (lambda: None, lambda a, b, c: None, lambda *, call: None):
        app = App()
        app.handler("/p")(handler)
        with pytest.raises(ConfigurationError, match=r"\(call, request\)"):
            app.registered_handlers()
        with pytest.raises(ConfigurationError, match="/p"):
            app.handler("/p")
    for hook in (app.on_start, app.on_stop, app.default_handler):
        hook(lambda given: None)
        with pytest.raises(ConfigurationError):
            hook(lambda given: None)
    context = Context(Key("k"), worker_config={"app": {"password": "hunter2"}}, config={"password": "hunter2"})
    assert "hunter2" not in repr(context)


class Incomplete(BaseModel):
    field: Nowhere  # type: ignore[name-defined]  # noqa: F821


class Opaque: ...


@pytest.mark.parametrize("annotation", ["Nowhere", "json.Missing", "not an expression", Incomplete, Opaque], ids=str)
def test_request_type_that_cannot_be_found_or_validated_is_refused(annotation):
    name = annotation if annotation == "Nowhere" else getattr(annotation, "__name__", "'/p'")
    with pytest.raises(ConfigurationError, match=name):
        decode(annotation, b"{}")


@pytest.mark.parametrize(
    ("value", "json_value"),
    [
        (np.bool_(True), True),
        (np.float64("inf"), "Infinity"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.datetime64("2024-01-01T00:00:00.123456789"), "2024-01-01T00:00:00.123456"),
        (np.datetime64("NaT"), None),
        (pd.NA, None),
        (pd.Series(["a", pd.NA], dtype="string"), ["a", None]),
        (pd.Series(pd.to_datetime(["2024-01-01", None], utc=True)), ["2024-01-01T00:00:00Z", None]),
        (pd.Categorical(["a", "b"]), ["a", "b"]),
    ],
)
def test_values_of_numpy_and_pandas_are_answered_as_in_tables(value, json_value):
    assert json.loads(answer_to_response({"x": [value]}).body) == {"x": [json_value]}
