"""Three-valued logic over true, false and undefined, with null as the language has it.

Undefined OR true is true, undefined AND false is false. Null AND anything but false is null, null OR x is x, NOT
null is true. What is no truth value at all (a number of the body) counts as undefined. Used by `compiler` only.
"""

from __future__ import annotations

from collections.abc import Sequence

from osrdyne.ingress.conditions.operators import Evaluate
from osrdyne.ingress.conditions.samples import Sample
from osrdyne.ingress.conditions.values import UNDEFINED, Truth, Undefined, Value


def as_truth(value: Value) -> Truth:
    return value if value is None or isinstance(value, bool) else UNDEFINED


def negate(value: Value) -> bool | Undefined:
    truth = as_truth(value)
    return UNDEFINED if truth is UNDEFINED else not truth


def all_of(operands: Sequence[Evaluate]) -> Evaluate:
    """AND of all operands; those after a false one are not looked at."""

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
    """OR of all operands; those after a true one are not looked at."""

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
