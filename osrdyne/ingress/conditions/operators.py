"""The operators of conditions at evaluation. Chains run as loops, so that their length costs no stack.

Used by `compiler` only, which has checked the static types. A value of another type, null or undefined makes the result
undefined, never an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from osrdyne.ingress.conditions.samples import Sample
from osrdyne.ingress.conditions.values import (
    COMPARISONS,
    UNDEFINED,
    Truth,
    Undefined,
    Value,
    ValueType,
    compare_by_type,
    defined_number,
    divide,
    remainder,
)

Evaluate = Callable[[Sample], Value]
Apply = Callable[[Value, Value], Value]

# Characters of a concatenation; a longer one is undefined, to bound the memory of a condition.
MAX_TEXT = 2**20

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divide,
    "%": remainder,
}
_PYTHON_TYPES: dict[ValueType, type] = {ValueType.NUMBER: float, ValueType.STRING: str, ValueType.BOOL: bool}


def folded(first: Evaluate, steps: Sequence[tuple[Apply, Evaluate]]) -> Evaluate:
    """Apply the operators from left to right."""
    if len(steps) == 1:
        [(only, right)] = steps
        return lambda sample: only(first(sample), right(sample))

    def evaluate(sample: Sample) -> Value:
        value = first(sample)
        for apply, operand in steps:
            value = apply(value, operand(sample))
        return value

    return evaluate


def minus(value: Value) -> float | Undefined:
    return -value if type(value) is float else UNDEFINED


def arithmetic(compute: Callable[[float, float], float]) -> Apply:
    def apply(left: Value, right: Value) -> Value:
        if type(left) is float and type(right) is float:
            return defined_number(compute(left, right))
        return UNDEFINED

    return apply


def comparison(symbol: str, left: ValueType, right: ValueType) -> Apply:
    """Compare values of these static types. Undefined if a property with a static type is null."""
    typed_left, typed_right = _PYTHON_TYPES.get(left), _PYTHON_TYPES.get(right)
    if typed_left is not None and typed_left is typed_right:
        return _comparison_of(symbol, typed_left)

    def apply(one: Value, other: Value) -> Value:
        if (one is None and typed_left) or (other is None and typed_right):
            return UNDEFINED
        if (typed_left and right is ValueType.NULL) or (typed_right and left is ValueType.NULL):
            return UNDEFINED
        return compare_by_type(symbol, one, other)

    return apply


def _comparison_of(symbol: str, type_: type) -> Apply:
    compare = COMPARISONS[symbol]

    def apply(one: Value, other: Value) -> Value:
        return compare(one, other) if type(one) is type_ and type(other) is type_ else UNDEFINED

    return apply


def first_defined(operands: Sequence[Evaluate]) -> Evaluate:
    def evaluate(sample: Sample) -> Value:
        for operand in operands:
            value = operand(sample)
            if value is not UNDEFINED:
                return value
        return UNDEFINED

    return evaluate


def concatenation(operands: Sequence[tuple[Evaluate, bool]]) -> Evaluate:
    """Join strings. The flag of an operand: whether null counts as an empty string."""

    def evaluate(sample: Sample) -> Value:
        parts, length = [], 0
        for operand, null_is_empty in operands:
            value = operand(sample)
            text = "" if value is None and null_is_empty else value
            if not isinstance(text, str):
                return UNDEFINED
            parts.append(text)
            length += len(text)
            if length > MAX_TEXT:
                return UNDEFINED
        sample.spend(length // 16)
        return "".join(parts)

    return evaluate


# Three-valued logic over true, false and undefined; null by the rules of the language. Undefined OR true is true,
# undefined AND false is false. Null AND anything but false is null, null OR x is x, NOT null is true. A value of
# another type, such as a number of the body, counts as undefined.


def as_truth(value: Value) -> Truth:
    return value if value is None or isinstance(value, bool) else UNDEFINED


def negate(value: Value) -> bool | Undefined:
    truth = as_truth(value)
    return UNDEFINED if truth is UNDEFINED else not truth


def all_of(operands: Sequence[Evaluate]) -> Evaluate:
    """AND of all operands; operands after a false one are not evaluated."""

    def evaluate(sample: Sample) -> Value:
        result: Truth = True
        for operand in operands:
            truth = as_truth(operand(sample))
            if truth is False:
                return False
            if truth is None or (truth is UNDEFINED and result is True):
                result = truth
        return result

    return evaluate


def any_of(operands: Sequence[Evaluate]) -> Evaluate:
    """OR of all operands; operands after a true one are not evaluated."""

    def evaluate(sample: Sample) -> Value:
        result: Truth = None
        for operand in operands:
            truth = as_truth(operand(sample))
            if truth is True:
                return True
            if truth is UNDEFINED or (truth is False and result is None):
                result = truth
        return result

    return evaluate
