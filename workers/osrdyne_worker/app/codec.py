"""Decode the body of a request into the type that its handler takes, and encode the handler's result. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import PydanticSerializationError, to_json

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.messages import JSON_TYPE, Response, header_text
from osrdyne.protocol.statuses import Status
from osrdyne_worker.app.app import App, RegisteredHandler
from osrdyne_worker.app.call import Answer
from osrdyne_worker.app.errors import RequestError

if TYPE_CHECKING:
    from osrdyne_worker.app.streams import ArrowStream
    from osrdyne_worker.app.tables import Rows

Decoder = Callable[[bytes], Any]

BYTES_TYPE = "application/octet-stream"
TEXT_TYPE = "text/plain; charset=utf-8"
MAX_INVALID_FIELDS = 20
LARGE_ANSWER = 64 * 1024
"""Estimated bytes of an answer from which on a thread encodes it; the event loop is faster with a smaller one."""
SAMPLE = 8
"""Values of a list or mapping from which its size is estimated."""
MAX_SAMPLED = 200
"""Values of an answer from which its size is estimated: more would take longer than to encode it."""
_SCALARS = frozenset({int, float, bool, type(None)})
_TEXTS = (str, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset)
PATH_LIMIT = 200
"""Characters of a path that are repeated in an answer."""


def decoder_for(handler: RegisteredHandler) -> Decoder | None:
    """The decoder for the request bodies of a handler; None if the handler takes no body.

    Raises `ConfigurationError` if pydantic cannot validate the type.
    """
    if not handler.takes_request:
        return None
    if handler.request_type is bytes:
        return _unchanged
    if handler.request_type is str:
        return _decode_text
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(handler.request_type)
        # Raises for a type with an undefined name, which pydantic otherwise reports at the first request.
        adapter.core_schema["type"]
    except Exception as error:  # of pydantic, or of an annotation of the application
        name = getattr(handler.function, "__qualname__", repr(handler.function))
        raise ConfigurationError(
            f"The request type of the handler {name} of {handler.path!r} cannot be validated: {_reason(error)}"
        ) from error
    known = _field_names(handler.request_type)
    return lambda body: _decode_json(adapter, body, known)


def _field_names(request_type: Any) -> list[str]:
    """The names of the fields of a pydantic model, as in JSON; empty for another type, or if a field has several."""
    if not (isinstance(request_type, type) and issubclass(request_type, BaseModel)):
        return []
    names = [field.validation_alias or name for name, field in request_type.model_fields.items()]
    texts = [name for name in names if isinstance(name, str)]
    return texts if len(texts) == len(names) else []


def _reason(error: Exception) -> str:
    """Why pydantic cannot validate a type, in one line."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if isinstance(error, PydanticSchemaGenerationError):
        # The rest of the line is about options of pydantic.
        known = "use a pydantic model, a dataclass, or types such as dict[str, int]"
        return f"{reason.partition('. Set ')[0]}; {known}"
    return reason


def check_handlers(app: App) -> None:
    """Raise `ConfigurationError` for a handler with an invalid signature or request type."""
    for handler in (*app.registered_handlers().values(), app.registered_default_handler()):
        if handler is not None:
            decoder_for(handler)


def _unchanged(body: bytes) -> bytes:
    return body


def _decode_text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not UTF-8 (at byte {error.start}).", error_code="invalid_text") from None


def _decode_json(adapter: TypeAdapter[Any], body: bytes, known: list[str]) -> Any:
    try:
        return adapter.validate_json(body.removeprefix(codecs.BOM_UTF8) or b"{}")
    except ValidationError as error:
        raise _refusal(error, known) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.", error_code="invalid_json") from None


def _refusal(error: ValidationError, known: list[str]) -> RequestError:
    """The invalid fields of a body. Their values are not repeated: they may be secret. `known`: the fields of the
    model."""
    invalid = error.errors(include_url=False, include_context=False, include_input=False)
    if invalid[0]["type"] == "json_invalid":
        return RequestError(f"The body is not JSON: {invalid[0]['msg']}.", error_code="invalid_json")
    fields = [{"field": field_path(entry["loc"]), "message": entry["msg"]} for entry in invalid[:MAX_INVALID_FIELDS]]
    first = fields[0]
    more = f" ({len(invalid) - 1} more)" if len(invalid) > 1 else ""
    where = f"Field {first['field']}" if first["field"] else "The body"
    fault = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(
        invalid[0]["type"], f"is wrong: {first['message']}"
    )
    if invalid[0]["type"] == "extra_forbidden" and len(invalid[0]["loc"]) == 1 and known:
        more += f"; the fields are {', '.join(known)}"
    return RequestError(f"{where} {fault}{more}.", error_code="invalid_request", details={"fields": fields})


def field_path(location: tuple[int | str, ...]) -> str:
    """`("tables", 0, "name")` as `tables[0].name`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def answer_to_response(value: Any, *, progress: bool = False) -> Response:
    """The reply for the result of a handler. Raises `RequestError` (500) for a value that JSON cannot represent."""
    answer = value if isinstance(value, Answer) else Answer(value)
    body, content_type = _encode(answer.body)
    return Response(
        status=Status.OK,
        body=body,
        content_type=answer.content_type or content_type,
        code=answer.code,
        progress=progress,
        headers=answer.headers,
    )


def is_large(value: Any) -> bool:
    """Whether `answer_to_response` takes long for the result of a handler, as estimated from some of its values."""
    body = value.body if isinstance(value, Answer) else value
    if body is None or isinstance(body, bytes | bytearray | memoryview):
        return False
    size, seen = 0.0, 0
    # Each value with the number of values that it stands for.
    unseen: list[tuple[Any, float]] = [(body, 1.0)]
    while unseen:
        part, weight = unseen.pop()
        if type(part) in _SCALARS:
            pass  # most values; their container has counted them
        elif isinstance(part, _TEXTS):
            size += weight * len(part)
        elif isinstance(part, _CONTAINERS):
            size += weight * len(part) * 8  # a name or a number, and a comma
            sampled = weight * max(1.0, len(part) / SAMPLE)
            values = part.values() if isinstance(part, dict) else part
            unseen += [(one, sampled) for one in islice(values, SAMPLE)]
        elif isinstance(part, BaseModel):
            unseen += [(part.__dict__, weight), (part.model_extra, weight)]
        elif is_dataclass(part):
            unseen += [(getattr(part, field.name, None), weight) for field in fields(part)]
        elif isinstance(part, Iterable):
            return True  # a generator, for example: its size is unknown
        seen += 1
        if size > LARGE_ANSWER or seen > MAX_SAMPLED:
            return True
    return False


class CollectRows(Protocol):
    """`SessionFactory.rows`."""

    def __call__(self, value: Any, *, limit: int) -> Rows | None: ...


_ROW_METHODS = ("__arrow_c_stream__", "__arrow_c_array__", "toArrow")
"""Methods of tables: pyarrow, pandas and polars have the first, a record batch the second, Spark's DataFrame the third.
"""


def may_hold_rows(value: Any) -> bool:
    """Whether `answer_with_rows` may collect rows, which takes long; False for a value that it leaves unchanged."""
    body = value.body if isinstance(value, Answer) else value
    if body is None or isinstance(body, bytes | str | dict | list):
        return False  # nearly all answers
    return isinstance(body, Iterator) or any(hasattr(type(body), method) for method in _ROW_METHODS)


def answer_with_rows(value: Any, *, limit: int, accept: str | None, collect: CollectRows | None = None) -> Any:
    """The result of a handler, with at most `limit` rows in its body if it holds a table, a frame or record batches.

    May run jobs of the session. Raises `RequestError` (500) for rows that cannot be encoded.
    """
    if not may_hold_rows(value):
        return value
    from osrdyne_worker.app.tables import Rows, rows_of  # pyarrow is needed only here

    answer = value if isinstance(value, Answer) else Answer(value)
    found: Rows | Iterator[Any] | None
    found = collect(answer.body, limit=limit) if collect is not None else None
    if found is None:
        found = rows_of(answer.body, limit=limit)
    if isinstance(found, Rows):
        return found.answer(answer, accept=accept)
    return value if found is None else replace(answer, body=found)


class OpenBatches(Protocol):
    """`SessionFactory.batches`, which a factory need not have."""

    def __call__(self, value: Any) -> Any: ...


def stream_of(
    value: Any, *, limit: int | None, max_bytes: int, open_batches: OpenBatches | None = None
) -> tuple[ArrowStream | None, Any]:
    """The stream of a handler's result if it holds a table or record batches; otherwise None and an equivalent result.

    Raises `RequestError` (500) for rows that cannot be encoded.
    """
    if not may_hold_rows(value):
        return None, value
    from osrdyne_worker.app.streams import open_stream  # pyarrow is needed only here

    return open_stream(value, limit=limit, max_bytes=max_bytes, open_batches=open_batches)


def _encode(body: Any) -> tuple[bytes, str | None]:
    if body is None:
        return b"", None
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), BYTES_TYPE
    if isinstance(body, str):
        return body.encode("utf-8", "replace"), TEXT_TYPE
    try:
        # Not a number and infinities as in tables.
        return to_json(body, inf_nan_mode="strings", fallback=_plain_value), JSON_TYPE
    except (PydanticSerializationError, TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"The answer cannot be encoded as JSON: {error}", code=500, error_code="invalid_answer"
        ) from error


def _plain_value(value: Any) -> Any:
    """A value of numpy or pandas as one of Python. Raises `TypeError` for any other that JSON has no form for."""
    kind = type(value)
    if kind.__name__ in {"NAType", "NaTType"}:
        return None
    if kind.__module__.partition(".")[0] in {"numpy", "pandas"} and hasattr(value, "tolist"):
        of_time: str = getattr(getattr(value, "dtype", None), "kind", "")
        if of_time not in {"m", "M"}:
            return value.tolist()
        if kind.__module__.startswith("numpy"):
            # `tolist` returns nanoseconds as a number.
            return value.astype(f"{of_time}8[us]").tolist()
        return [one if one == one else None for one in value.tolist()]  # NaT is not equal to itself
    raise TypeError(f"JSON has no form for {kind.__module__}.{kind.__qualname__}; convert it in the handler")


def _error_body(document: Mapping[str, object], details: Mapping[str, object]) -> bytes:
    """The JSON of an error, without the details if JSON cannot represent them: the caller still receives the error."""
    try:
        return to_json({"error": {**details, **document}}, inf_nan_mode="null", fallback=str)
    except (ValueError, RecursionError):  # a lone surrogate, or a cycle
        return to_json({"error": document})


def shown_path(path: str) -> str:
    """The path of a request, shortened for answers and logs: a caller may send any length."""
    return header_text(path, limit=PATH_LIMIT)


def error_response(error: RequestError, *, path: str) -> Response:
    """The reply for a refused request: `{"error": {"code", "message", "path", …}}`."""
    message = error.message.encode("utf-8", "replace").decode()
    document = {"code": error.error_code, "message": message, "path": shown_path(path)}
    return Response(
        status=Status.ERROR,
        body=_error_body(document, error.details),
        content_type=JSON_TYPE,
        code=error.code,
        detail=error.message,
    )
