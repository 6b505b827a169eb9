"""The values of conditions and how they compare: strings, numbers (doubles), booleans, null and undefined.

Null is Python's None. Undefined is a value of its own, neither true nor false. An operation on undefined is undefined,
except for the three-valued AND and OR, `??` and `is_defined`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, Final


class Undefined(Enum):
    """The type of the one value `UNDEFINED`."""

    UNDEFINED = "undefined"


UNDEFINED: Final = Undefined.UNDEFINED

Value = str | float | bool | None | Undefined
Truth = bool | None | Undefined  # The operands of logic.


class ValueType(StrEnum):
    """The static type of a value; ANY for a value of the body, whose type is known only at evaluation."""

    NUMBER = "number"
    STRING = "string"
    BOOL = "bool"
    NULL = "null"
    UNDEFINED = "undefined"
    ANY = "any"


_NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*")

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def defined_number(number: float) -> float | Undefined:
    """NaN is undefined; infinity is not."""
    return UNDEFINED if number != number else number


def parse_number(text: str) -> float | Undefined:
    """The number that a text holds, as `as_number` reads it; too large a number is infinite."""
    return float(text) if _NUMBER.fullmatch(text) else UNDEFINED


def compare_by_type(symbol: str, left: Value, right: Value) -> bool | Undefined:
    """Compare values by their types at evaluation: values of different types are unequal, and neither is smaller."""
    if left is UNDEFINED or right is UNDEFINED:
        return UNDEFINED
    if type(left) is not type(right):
        return symbol in {"!=", "<>"}
    if left is None:
        return symbol in {"=", "<=", ">="}
    return COMPARISONS[symbol](left, right)


def divide(left: float, right: float) -> float:
    """Divide by IEEE 754: a number by zero is infinite, zero by zero is NaN."""
    if right != 0:
        return left / right
    if left == 0 or left != left:
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1, right)


def remainder(left: float, right: float) -> float:
    """The remainder with the sign of the dividend; NaN by zero."""
    if right == 0 or math.isinf(left):
        return math.nan
    return math.fmod(left, right)


def power(base: float, exponent: float) -> float:
    """The power by IEEE 754, where Python raises errors."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        odd = exponent == int(exponent) and int(exponent) % 2 == 1
        return -math.inf if base < 0 and odd else math.inf
    except ValueError:
        if base != 0:
            return math.nan
        odd = exponent == int(exponent) and int(exponent) % 2 == 1
        return math.copysign(math.inf, base) if odd else math.inf


def exponential(number: float) -> float:
    try:
        return math.exp(number)
    except OverflowError:
        return math.inf


def square_root(number: float) -> float:
    return math.nan if number < 0 else math.sqrt(number)
