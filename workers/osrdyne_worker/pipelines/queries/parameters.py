"""The parameters of a request to the SQL pipeline: JSON values or `{"type", "value"}`, as values of Spark's types.

Pure. The guard checks the query with the values in place; this module limits how long the query becomes by them.
"""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from osrdyne_worker import RequestError
from osrdyne_worker.spark.parameters import Parameter, Parameters

MAX_PARAMETERS = 1000
_MAX_DIGITS = 38
"""Digits of a decimal in Spark."""


def read_parameters(given: Mapping[str, Any] | Sequence[Any] | None) -> Parameters | None:
    """The values by name or position; None without any. Raises `RequestError` that names the value."""
    if not given:
        return None
    if len(given) > MAX_PARAMETERS:
        raise _invalid("parameters", f"has {len(given)} values; at most {MAX_PARAMETERS} are allowed")
    if isinstance(given, Mapping):
        return {name: _parameter(f"parameters.{name}"[:100], value) for name, value in given.items()}
    return tuple(_parameter(f"parameters[{place}]", value) for place, value in enumerate(given))


def length_of(query: str, parameters: Parameters | None) -> int:
    """The characters of the query with the values in the places of its parameters, or more.

    A long value in many places would become a text that exhausts Spark's parser.
    """
    if parameters is None:
        return len(query)
    if not isinstance(parameters, Mapping):
        return len(query) + sum(_length(parameter) for parameter in parameters)
    colons, text = query.count(":"), query.lower()
    # An upper bound without a parser: too many places refuse a query, too few could exhaust Spark.
    places = {name: min(colons, text.count(name.lower())) for name in parameters}
    return len(query) + sum(places[name] * _length(parameter) for name, parameter in parameters.items())


def _length(parameter: Parameter) -> int:
    """The characters of a value as a literal of Spark SQL, or more."""
    value = parameter.value
    if isinstance(value, bytes):
        return 2 * len(value) + 3
    if isinstance(value, str):
        return len(value) + value.count("'") + value.count("\\") + 20
    return 30


def cache_key(parameters: Parameters | None) -> object:
    """A hashable form of the values, in which values differ that are equal in Python: 1 and 1.0, 0.0 and -0.0."""
    if parameters is None:
        return None
    if isinstance(parameters, Mapping):
        # `repr` differs for values that are equal and have the same hash: a cached plan has the literal in it.
        return tuple(sorted((name, one.kind, repr(one.value)) for name, one in parameters.items()))
    return tuple((one.kind, repr(one.value)) for one in parameters)


def _parameter(where: str, value: Any) -> Parameter:
    match value:
        case None:
            return Parameter("void", None)
        # Before `int`: in Python a bool is an int, and `true` would become 1.
        case bool():
            return Parameter("boolean", value)
        case int():
            return _integer(where, value)
        case float():
            return Parameter("double", value)
        case str():
            return _text(where, value)
        case {"type": str(kind), "value": typed, **others} if not others:
            return read_value(where, kind, typed)
    raise _invalid(
        where, 'must be a string, a number, true, false, null, or {"type": …, "value": …}; lists are not supported'
    )


def _text(where: str, value: str) -> Parameter:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid(where, "is not Unicode text") from None
    return Parameter("string", value)


def _integer(where: str, value: int) -> Parameter:
    if -(2**31) <= value < 2**31:
        return Parameter("int", value)
    if -(2**63) <= value < 2**63:
        return Parameter("bigint", value)
    return _decimal(where, value)


def read_value(where: str, kind: str, value: Any) -> Parameter:
    """The value of a type that JSON writes as text. Raises `RequestError` that names the value by `where`."""
    read = _TYPES.get(kind)
    if read is None:
        raise _invalid(where, f"has the type {kind[:30]!r}; allowed are {', '.join(_TYPES)}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _invalid(where, f"must have a value that is a {kind} as text")
    return read(where, value)


def _decimal(where: str, value: str | int | float) -> Parameter:
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise _invalid(where, "is not a decimal number") from None
    _, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int) or max(len(digits), -exponent) + max(exponent, 0) > _MAX_DIGITS:
        raise _invalid(where, f"must be a number of at most {_MAX_DIGITS} digits")
    return Parameter("decimal", f"{number:f}")


def _double(where: str, value: str | int | float) -> Parameter:
    try:
        return Parameter("double", float(value))
    except (ValueError, OverflowError):
        raise _invalid(where, "is not a floating-point number") from None


def _date(where: str, value: str | int | float) -> Parameter:
    try:
        return Parameter("date", dt.date.fromisoformat(str(value)).isoformat())
    except ValueError:
        raise _invalid(where, "is not a date such as 2024-02-29") from None


def _moment(where: str, value: str | int | float) -> dt.datetime:
    try:
        return dt.datetime.fromisoformat(str(value))
    except ValueError:
        raise _invalid(where, "is not a timestamp such as 2024-02-29T12:00:00Z") from None


def _timestamp(where: str, value: str | int | float) -> Parameter:
    moment = _moment(where, value)
    if moment.tzinfo is None:
        raise _invalid(where, "has no zone; add Z or an offset, or use the type timestamp_ntz")
    try:
        in_utc = moment.astimezone(dt.UTC).replace(tzinfo=None)
    except OverflowError:
        raise _invalid(where, "is not within the years 1 to 9999") from None
    return Parameter("timestamp", f"{in_utc.isoformat()}Z")


def _timestamp_ntz(where: str, value: str | int | float) -> Parameter:
    moment = _moment(where, value)
    if moment.tzinfo is not None:
        raise _invalid(where, "has a zone; leave it out, or use the type timestamp")
    return Parameter("timestamp_ntz", moment.isoformat())


def _binary(where: str, value: str | int | float) -> Parameter:
    try:
        return Parameter("binary", base64.b64decode(str(value), validate=True))
    except ValueError:
        raise _invalid(where, "is not base64") from None


_TYPES: dict[str, Callable[[str, str | int | float], Parameter]] = {
    "binary": _binary,
    "date": _date,
    "decimal": _decimal,
    "double": _double,
    "timestamp": _timestamp,
    "timestamp_ntz": _timestamp_ntz,
}


def _invalid(where: str, reason: str) -> RequestError:
    return RequestError(f"{where} {reason}.", 400, "invalid_parameter")
