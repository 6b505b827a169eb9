"""The functions of conditions: the types of their parameters and results, and their implementation.

A new function is one entry of `FUNCTIONS`, and one line of the table in docs/reference/routes/conditions.md. Used by
`compiler` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from osrdyne.ingress.conditions.operators import Evaluate
from osrdyne.ingress.conditions.samples import Sample
from osrdyne.ingress.conditions.values import (
    UNDEFINED,
    Undefined,
    Value,
    ValueType,
    defined_number,
    exponential,
    parse_number,
    power,
    square_root,
)

_NUMBER, _STRING, _BOOL = ValueType.NUMBER, ValueType.STRING, ValueType.BOOL
_PYTHON_TYPES: dict[ValueType, type] = {_NUMBER: float, _STRING: str, _BOOL: bool}


@dataclass(frozen=True, slots=True)
class Function:
    """`takes`: the types of each parameter, empty for any type. `gives`: the type of the result. `apply` is called with
    values of these types only. `optional`: how many of the last parameters may be left out. `repeats`: the last
    parameter may be repeated. `reads_text`: its work grows with the length of its strings, which counts against the
    work limit of the sample.
    """

    takes: tuple[frozenset[ValueType], ...]
    gives: ValueType
    apply: Callable[..., Value]
    optional: int = 0
    repeats: bool = False
    reads_text: bool = True

    def accepts(self, types: Sequence[ValueType]) -> bool:
        """Whether it may be called with arguments of these types."""
        least, most = len(self.takes) - self.optional, len(self.takes)
        if len(types) < least or (len(types) > most and not self.repeats):
            return False
        return all(not taken or given is ValueType.ANY or given in taken for given, taken in self._pairs(types))

    def bound(self, arguments: Sequence[Evaluate]) -> Evaluate:
        """The call with these arguments. Undefined if an argument has another type, such as null or undefined."""
        apply, reads_text = self.apply, self.reads_text
        wanted = [tuple(_PYTHON_TYPES[one] for one in taken) for _, taken in self._pairs(arguments)]
        if len(arguments) == 1 and wanted[0]:
            [argument], [types] = arguments, wanted

            def call_with_one(sample: Sample) -> Value:
                value = argument(sample)
                if type(value) not in types:
                    return UNDEFINED
                if reads_text and type(value) is str:
                    sample.spend(len(value))
                return apply(value)

            return call_with_one

        def call(sample: Sample) -> Value:
            values = [argument(sample) for argument in arguments]
            for value, types in zip(values, wanted, strict=True):
                if types and type(value) not in types:
                    return UNDEFINED
            if reads_text:
                sample.spend(_work(values))
            return apply(*values)

        return call

    def _pairs(self, arguments: Sequence[Any]) -> list[tuple[Any, frozenset[ValueType]]]:
        takes = self.takes + self.takes[-1:] * (len(arguments) - len(self.takes))
        return list(zip(arguments, takes, strict=False))


_ANYTHING: frozenset[ValueType] = frozenset()


def _of_numbers(count: int, compute: Callable[..., float]) -> Function:
    def apply(*numbers: float) -> Value:
        return defined_number(compute(*numbers))

    return Function((frozenset({_NUMBER}),) * count, _NUMBER, apply)


def _of_strings(count: int, gives: ValueType, apply: Callable[..., Value], *, repeats: bool = False) -> Function:
    return Function((frozenset({_STRING}),) * count, gives, apply, repeats=repeats)


def _type_test(apply: Callable[[Value], Value]) -> Function:
    return Function((_ANYTHING,), _BOOL, apply, reads_text=False)


def _work(values: Sequence[Value]) -> int:
    """The cost of a call in characters. A search may compare a part of its pattern at each place of the text."""
    lengths = [len(value) for value in values if isinstance(value, str)]
    return sum(lengths) if len(lengths) < 2 else lengths[0] * (1 + min(lengths[1], 100) // 16) + sum(lengths[1:])


def _whole(number: float, rounded: Callable[[float], int]) -> float:
    return float(rounded(number)) if math.isfinite(number) else number


def _sign(number: float) -> float:
    return float((number > 0) - (number < 0))


def _as_number(value: str | float) -> float | Undefined:
    return parse_number(value) if isinstance(value, str) else value


def _substring(text: str, start: float, length: float | None = None) -> str | Undefined:
    """Undefined unless the whole substring is inside the text."""
    end = float(len(text)) if length is None else start + length
    # The length is tested separately: a tiny fraction is lost in the sum.
    if not (0 <= start <= end <= len(text)) or not start.is_integer() or not (length is None or length.is_integer()):
        return UNDEFINED
    return text[int(start) : int(end)]


# By name in lower case. `concat` is compiled as the operator `||`, because it takes null properties.
FUNCTIONS: dict[str, Function] = {
    "abs": _of_numbers(1, abs),
    "exp": _of_numbers(1, exponential),
    "power": _of_numbers(2, power),
    "square": _of_numbers(1, lambda number: number * number),
    "ceiling": _of_numbers(1, lambda number: _whole(number, math.ceil)),
    "floor": _of_numbers(1, lambda number: _whole(number, math.floor)),
    "sign": _of_numbers(1, _sign),
    "sqrt": _of_numbers(1, square_root),
    "as_number": Function((frozenset({_NUMBER, _STRING}),), _NUMBER, _as_number),
    "is_bool": _type_test(lambda value: isinstance(value, bool)),
    "is_defined": _type_test(lambda value: value is not UNDEFINED),
    "is_null": _type_test(lambda value: value is None),
    "is_number": _type_test(lambda value: isinstance(value, float) and math.isfinite(value)),
    "is_string": _type_test(lambda value: isinstance(value, str)),
    "length": Function((frozenset({_STRING}),), _NUMBER, lambda text: float(len(text)), reads_text=False),
    "lower": _of_strings(1, _STRING, str.lower),
    "upper": _of_strings(1, _STRING, str.upper),
    "substring": Function(
        (frozenset({_STRING}), frozenset({_NUMBER}), frozenset({_NUMBER})), _STRING, _substring, optional=1
    ),
    "index_of": _of_strings(2, _NUMBER, lambda text, part: float(text.find(part))),
    "starts_with": _of_strings(2, _BOOL, str.startswith),
    "ends_with": _of_strings(2, _BOOL, str.endswith),
    "contains": _of_strings(2, _BOOL, str.__contains__),
}
