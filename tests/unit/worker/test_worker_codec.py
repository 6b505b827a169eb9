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


def app_of(request_type: Any) -> App:
    app = App()

    def handler(call: Call, request: Any) -> None: ...

    handler.__annotations__["request"] = request_type
    app.handler("/p")(handler)
    return app


def decode(request_type: Any, body: bytes) -> Any:
    decoder = decoder_for(app_of(request_type).registered_handlers()["/p"])
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
def test_body_becomes_the_request_type(request_type: Any, body: bytes, value: Any) -> None:
    assert decode(request_type, body) == value


@pytest.mark.parametrize(
    ("request_type", "body", "code", "named"),
    [
        (Query, b"{", "invalid_json", "JSON"),
        (Query, b"[" * 100_000, "invalid_json", "JSON"),
        (Query, b"", "invalid_request", "query"),
        (Query, b'{"query": "q", "limit": 0}', "invalid_request", "limit"),
        (Point, b'{"x": "hunter2", "y": "b"}', "invalid_request", "(1 more)"),
        (Strict, b'{"sql": "q"}', "invalid_request", "query, from"),
        (list[Strict], b'[{}, {"sql": "q"}]', "invalid_request", "[1].sql"),
        (str, b"a\xff", "invalid_text", "byte 1"),
    ],
)
def test_wrong_body_is_refused_without_its_values(request_type: Any, body: bytes, code: str, named: str) -> None:
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
def test_answer_becomes_a_response(value: Any, body: bytes, content_type: str | None) -> None:
    response = answer_to_response(value)
    assert (response.body, response.content_type, response.progress) == (body, content_type, False)


class Wide(BaseModel, extra="allow"):
    rows: list[int] = []


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


SMALL_ANSWERS: dict[str, Any] = {
    "none": None,
    "bytes": b"x" * 100_000,
    "dict": {"count": 3},
    "model": Query(query="q"),
    "dataclass": Point(1, 2),
}
LARGE_ANSWERS: dict[str, Any] = {
    "text": "x" * 100_000,
    "many rows": [{"id": id_, "name": "sensor"} for id_ in range(20_000)],
    "column": {"rows": [1.5] * 20_000, "more": False},
    "large model": Query(query="q" * 100_000),
    "list of a model": Wide(rows=[1] * 20_000),
    "generator": {"numbers": (number for number in range(3))},
    "cycle": CYCLE,
}


@pytest.mark.parametrize("name", SMALL_ANSWERS | LARGE_ANSWERS)
def test_answer_is_large_if_it_takes_long_to_encode(name: str) -> None:
    assert is_large((SMALL_ANSWERS | LARGE_ANSWERS)[name]) is (name in LARGE_ANSWERS)


def test_error_response_has_the_documented_body() -> None:
    response = error_response(RequestError("no", 403, "refused", {"hint": "h"}), path="/p")
    assert json.loads(response.body) == {"error": {"code": "refused", "message": "no", "path": "/p", "hint": "h"}}
    assert (response.status, response.code, response.detail) == ("error", 403, "no")
    message = reply_message(Request("k", b"", reply_to="r"), response, worker_id="w", reference_statuses=True)
    assert (message.headers["x-status"], message.headers["x-osrdyne-status"]) == (bytearray(b"core_error"), "error")
    with pytest.raises(RequestError) as caught:
        answer_to_response({"a": object()})
    assert (caught.value.code, caught.value.error_code) == (500, "invalid_answer")


def test_too_large_progress_stays_progress() -> None:
    response = fitting(answer_to_response(b"xx", progress=True), Request("k", b""), 1)
    assert (response.code, response.progress) == (413, True)


@pytest.mark.parametrize(("reply_to", "persistent"), [("amq.rabbitmq.reply-to.g1h2", False), ("replies", True)])
def test_reply_is_persistent_where_it_can_be_stored(reply_to: str, persistent: bool) -> None:
    request = Request("k", b"", reply_to=reply_to, correlation_id="c")
    message = reply_message(request, answer_to_response(b"x"), worker_id="w")
    assert (message.persistent, message.correlation_id) == (persistent, "c")
    assert message.headers["x-worker-id"] == "w"


def test_second_handler_or_hook_is_refused() -> None:
    app = App()
    for register in (app.handler("/p"), app.on_start, app.on_stop, app.default_handler):
        register(lambda given: None)
    with pytest.raises(ConfigurationError, match="/p"):
        app.handler("/p")
    for hook in (app.on_start, app.on_stop, app.default_handler):
        with pytest.raises(ConfigurationError):
            hook(lambda given: None)


@pytest.mark.parametrize("handler", [lambda: None, lambda a, b, c: None, lambda *, call: None])
def test_handler_with_other_parameters_is_refused(handler: Any) -> None:
    app = App()
    app.handler("/p")(handler)
    with pytest.raises(ConfigurationError, match=r"\(call, request\)"):
        app.registered_handlers()


class Incomplete(BaseModel):
    field: Nowhere  # type: ignore[name-defined]  # noqa: F821


class Opaque: ...


@pytest.mark.parametrize("annotation", ["Nowhere", "json.Missing", "not an expression", Incomplete, Opaque], ids=str)
def test_request_type_that_cannot_be_found_or_validated_is_refused(annotation: Any) -> None:
    name = annotation if annotation == "Nowhere" else getattr(annotation, "__name__", "'/p'")
    with pytest.raises(ConfigurationError, match=name):
        decode(annotation, b"{}")


def test_repr_of_a_context_hides_what_may_be_secret() -> None:
    context = Context(key="k", worker_config={"app": {"password": "hunter2"}}, config={"password": "hunter2"})  # type: ignore[arg-type]
    assert "hunter2" not in repr(context)


@pytest.mark.parametrize(
    ("value", "json_value"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.float64("inf"), "Infinity"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.datetime64("2024-01-01T00:00:00.123456789"), "2024-01-01T00:00:00.123456"),
        (np.datetime64("NaT"), None),
        (pd.NA, None),
        (pd.Series([1.5, None]), [1.5, "NaN"]),
        (pd.Series(["a", pd.NA], dtype="string"), ["a", None]),
        (pd.Series(pd.to_datetime(["2024-01-01", None], utc=True)), ["2024-01-01T00:00:00Z", None]),
        (pd.Categorical(["a", "b"]), ["a", "b"]),
    ],
)
def test_values_of_numpy_and_pandas_are_answered_as_in_tables(value: Any, json_value: object) -> None:
    assert json.loads(answer_to_response({"x": [value]}).body) == {"x": [json_value]}


def test_value_without_a_form_in_json_is_named() -> None:
    with pytest.raises(RequestError, match=r"pandas.*Period"):
        answer_to_response({"x": pd.Period("2024-01")})
