"""Conditions with samples as JSON lines in, results as JSON out: one line of `osrdyne routes eval --batch`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from osrdyne.ingress.conditions.compiler import compile_condition
from osrdyne.ingress.conditions.samples import Sample, json_encoding
from osrdyne.ingress.conditions.values import Undefined
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem

_OPTIONAL = ("properties", "system")


def evaluate_line(line: str) -> dict[str, object]:
    """`{"condition", "properties", "system", "body"}` to `{"result"}`, or to the first `{"error", "column"}`.

    All but the condition may be missing. A body that is a string is the text of the body; anything else is written as
    JSON. Its type and encoding are `contentType` and `contentEncoding` in `system`.
    """
    try:
        document = _read(line)
        result = compile_condition(document["condition"]).evaluate(_sample(document))
    except InvalidDocumentError as error:
        first = error.problems[0]
        return {"error": first.message, "column": first.column}
    return {"result": shown(result)}


def shown(result: bool | Undefined) -> bool | str:
    return result.value if isinstance(result, Undefined) else result


def sample_of(properties: Mapping[str, object], system: Mapping[str, object], body: bytes | str | None) -> Sample:
    """A sample request; a text is encoded as the system property `contentEncoding` names."""
    names = {name: None if value is None else str(value) for name, value in system.items()}
    if not isinstance(body, str):
        return Sample(properties, names, body or b"")
    encoding = next((value for name, value in names.items() if name.lower() == "contentencoding" and value), "")
    # A body in another encoding than those of JSON is no document for conditions, whatever its bytes are.
    return Sample(properties, names, body.encode(json_encoding(encoding) or "utf-8", "replace"))


def _read(line: str) -> dict[str, Any]:
    """Raises `InvalidDocumentError`."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidDocumentError([Problem("the line is not JSON", getattr(error, "colno", 1))]) from None
    if not isinstance(document, dict) or "condition" not in document:
        raise InvalidDocumentError([Problem("the line must be an object with a `condition`", 1)])
    if not isinstance(document["condition"], str):
        raise InvalidDocumentError([Problem("`condition` must be a string", 1)])
    for name in _OPTIONAL:
        if not isinstance(document.get(name), dict | None):
            raise InvalidDocumentError([Problem(f"`{name}` must be an object", 1)])
    return document


def _sample(document: Mapping[str, Any]) -> Sample:
    body = document.get("body")
    text = body if body is None or isinstance(body, str) else json.dumps(body)
    return sample_of(document.get("properties") or {}, document.get("system") or {}, text)
