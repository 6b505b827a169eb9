"""Limits of a query, checked on the plan of Spark's parser, before Spark evaluates anything.

Spark evaluates constants while it analyses and optimises a query, expands each common table wherever it is used, and
creates one projection for each grouping set and each window of a row. None of that can be cancelled, and all of it
happens in the only JVM of the worker. So the results are estimated first. Pure; the SQL pipeline calls `check_limits`
after `check_parsed`. What cannot be estimated (the time of a regular expression, the rows of a join) is left to the
deadline and to the heap watch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import TokenType

from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError

Node = dict[str, Any]

_COLUMN_BYTES = 8.0
"""The assumed size of a value that depends on the data."""
_TEXT_FORMAT = 200
"""Characters up to which the content of a constant text is considered."""
_ITERATIONS = 64
"""Steps of an `aggregate` that are estimated one by one. A size that still grows faster then counts as infinite."""
_UNKNOWN_SPAN = 200 * 365.25 * 86_400e6
"""The assumed microseconds between two constant dates whose values are not known here."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits of one query; settings of the pipeline have the same names."""

    max_plan_nodes: int = 2_000
    max_expression_nodes: int = 20_000
    max_columns: int = 2_000
    max_constant_bytes: int = 16 * 2**20
    max_constant_work: int = 100_000_000
    max_partitions: int = 1_000
    max_grouping_sets: int = 1_024
    max_window_ratio: int = 2_000
    max_recursion_level: int = 1_000


class LimitExceededError(QueryRefusedError):
    """The query exceeds a limit. The message has the quantity, its value, the limit and the setting."""

    def __init__(self, what: str, *, value: float, limit: int, setting: str) -> None:
        shown = f"{value:,.0f}" if value < 1e15 else f"more than {1e15:,.0f}"
        super().__init__(
            f"The query is refused: {what}: {shown}; the limit is {limit:,} ({setting}).",
            error_code="limit_exceeded",
            code=400,
        )
        self.setting = setting
        self.value = value
        self.limit = limit

    def details(self) -> dict[str, object]:
        return {"setting": self.setting, "limit": self.limit}


_SET_OPERATORS = re.compile(r"\b(?:union|except|intersect|minus)\b", re.IGNORECASE)


def check_text(text: str, limits: PlanLimits) -> None:
    """Check what makes Spark's parser itself slow: set operations (quadratic time), and CUBE and ROLLUP within GROUPING
    SETS, which the parser expands."""
    try:
        tokens = Spark().tokenize(text)
    except SqlglotError:
        tokens, operators = [], len(_SET_OPERATORS.findall(text))
    else:
        operators = sum(_SET_OPERATORS.fullmatch(token.text) is not None for token in tokens)
    _enforce(limits, "max_plan_nodes", 2 * operators + 1, "operators of the plan")
    for at, token in enumerate(tokens):
        if token.token_type in (TokenType.CUBE, TokenType.ROLLUP):
            depth, groups = 0, 1
            for following in tokens[at + 1 :]:
                depth += {TokenType.L_PAREN: 1, TokenType.R_PAREN: -1}.get(following.token_type, 0)
                if depth <= 0:
                    break
                groups += depth == 1 and following.token_type is TokenType.COMMA
            sets = 2.0 ** min(groups, 1000) if token.token_type is TokenType.CUBE else groups + 1.0
            _enforce(limits, "max_grouping_sets", sets, f"grouping sets of {token.text.upper()}")


def check_limits(plan_json: str, limits: PlanLimits, *, views: Mapping[str, int]) -> None:
    """Raise `LimitExceededError` if the plan exceeds a limit. `views`: the number of columns of each view."""
    tree = json.loads(plan_json)
    _enforce(limits, "max_expression_nodes", plan_json.count('"class":'), "nodes of the plan and its expressions")
    try:
        _Estimate(limits, views).plan(tree, {}, {})
    except RecursionError:
        raise QueryRefusedError(
            "The query is nested too deeply; split it with WITH.", error_code="query_too_complex", code=400
        ) from None


def check_named_windows(description: str) -> None:
    """Refuse in WINDOW clauses the functions whose results may be large; `description` is written by the plan walker.

    `TreeNode.toJSON`, which `check_limits` reads, leaves these clauses out.
    """
    if '"field":"windowDefinitions' not in description:
        return
    nodes = json.loads(description)
    inside: set[int] = set()
    for place, node in enumerate(nodes):
        if node["parent"] in inside or str(node["field"]).startswith("windowDefinitions"):
            inside.add(place)
            name = ".".join(node["values"].get("nameParts") or ()).lower()
            if name in _GROWING:
                raise QueryRefusedError(
                    f"The query is refused: the size of {name} in a WINDOW clause cannot be estimated "
                    "(max_constant_bytes); call it in a subquery.",
                    error_code="limit_exceeded",
                    code=400,
                )


def _enforce(limits: PlanLimits, setting: str, value: float, what: str) -> None:
    """Raise `LimitExceededError` if a value is above the limit of a setting."""
    limit = getattr(limits, setting)
    if value > limit:
        raise LimitExceededError(what, value=value, limit=limit, setting=setting)


# -- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Value:
    """The estimate of an expression: its maximum bytes and items, and the steps (`work`) of one evaluation.

    `number` is the value of a number, or the microseconds of a time or an interval. `constant`: independent of the
    data; then a `number` of None may be any number.
    """

    bytes: float = _COLUMN_BYTES
    items: float = 0.0
    work: float = 0.0
    number: float | None = None
    text: str | None = None
    constant: bool = False
    kind: str = ""
    """`time` or `interval`, else empty."""
    nodes: float = 1.0
    """Nodes of the expression after Spark's optimiser has replaced names by the expressions that they refer to."""

    @property
    def size(self) -> float:
        """The number, as a size: infinite for a constant whose value is not known here."""
        if self.number is not None:
            return max(0.0, self.number)
        return math.inf if self.constant else 1.0


_COLUMN = _Value()


def _either(values: list[_Value]) -> _Value:
    """The estimate of a value that is one of `values`."""
    if not values:
        return _COLUMN
    numbers = [value.number for value in values]
    return _Value(
        bytes=max(value.bytes for value in values),
        items=max(value.items for value in values),
        work=sum(value.work for value in values),
        number=None if None in numbers else max(number for number in numbers if number is not None),
        text=values[0].text if len(values) == 1 else None,
        kind=values[0].kind if len({value.kind for value in values}) == 1 else "",
        nodes=max(value.nodes for value in values),
        constant=all(value.constant for value in values),
    )


def _made(arguments: list[_Value], *, bytes: float, items: float = 0.0, work: float = 0.0) -> _Value:
    """The estimate of a value that is computed from `arguments`."""
    return _Value(
        bytes=bytes,
        items=items,
        work=work + sum(argument.work for argument in arguments),
        constant=all(argument.constant for argument in arguments),
    )


def _sum(arguments: list[_Value]) -> float:
    return sum(argument.bytes for argument in arguments)


def _argument(arguments: list[_Value], place: int, default: _Value | None = None) -> _Value:
    return arguments[place] if place < len(arguments) else default or _Value(bytes=1, number=1, constant=True)


# The rules below estimate the result of a function from `a`, the estimates of its arguments.


def _repeat(a: list[_Value]) -> _Value:
    return _made(a, bytes=_argument(a, 0).bytes * _argument(a, 1).size)


def _padded(a: list[_Value]) -> _Value:
    return _made(a, bytes=_argument(a, 1).size + 16)


def _spaces(a: list[_Value]) -> _Value:
    return _made(a, bytes=_argument(a, 0).size + 8)


def _array_repeat(a: list[_Value]) -> _Value:
    count = _argument(a, 1).size
    return _made(a, bytes=count * (_argument(a, 0).bytes + 8), items=count)


def _sequence(a: list[_Value]) -> _Value:
    start, stop = _argument(a, 0), _argument(a, 1)
    if not (start.constant and stop.constant):
        return _made(a, bytes=_COLUMN_BYTES, items=1)
    default = _UNITS["day"] if "time" in (start.kind, stop.kind) else 1.0
    step = abs((a[2].number if len(a) > 2 else None) or default)
    span = _UNKNOWN_SPAN if start.number is None or stop.number is None else abs(stop.number - start.number)
    count = math.floor(span / step) + 1
    return _made(a, bytes=count * 8, items=count)


def _joined(a: list[_Value]) -> _Value:
    text = None
    if a and all(value.text is not None for value in a):
        text = "".join(value.text or "" for value in a)[: _TEXT_FORMAT + 1]
    items = sum(value.items for value in a)
    made = _made(a, bytes=_sum(a), items=items)
    return replace(made, text=text if text is not None and len(text) <= _TEXT_FORMAT else None)


def _array_joined(a: list[_Value]) -> _Value:
    separator = max((value.bytes for value in a[1:]), default=0.0)
    return _made(a, bytes=_argument(a, 0).bytes + _argument(a, 0).items * separator)


def _with_separator(a: list[_Value]) -> _Value:
    items = sum(max(1.0, value.items) for value in a[1:])
    return _made(a, bytes=_sum(a[1:]) + items * (a[0].bytes if a else 0.0))


def _replaced(a: list[_Value]) -> _Value:
    text, searched, by = _argument(a, 0), _argument(a, 1), _argument(a, 2, _Value(bytes=0, constant=True))
    length = max(1.0, searched.bytes if searched.text is not None else 1.0)
    return _made(a, bytes=text.bytes + text.bytes / length * by.bytes)


def _regexp_replaced(a: list[_Value]) -> _Value:
    return _made(a, bytes=(_argument(a, 0).bytes + 1) * (_argument(a, 2).bytes + 1))


_WIDTH = re.compile(r"%[-#+ 0,(<]*(?:\d+\$)?[-#+ 0,(<]*(\d*)(?:\.(\d+))?")


def _formatted(a: list[_Value]) -> _Value:
    form = _argument(a, 0)
    if form.text is None:
        return _made(a, bytes=math.inf if form.constant else _sum(a))
    widths = sum(float(width or 0) + float(places or 0) for width, places in _WIDTH.findall(form.text))
    return _made(a, bytes=_sum(a) * max(1, form.text.count("%")) + widths)


def _format_number(a: list[_Value]) -> _Value:
    places = _argument(a, 1)
    return _made(a, bytes=400 + (places.bytes if places.text is not None else places.size))


def _rounded(a: list[_Value]) -> _Value:
    """The result is a decimal number with as many digits as the scale."""
    number = _argument(a, 0)
    scale = _argument(a, 1, _Value(number=0, constant=True))
    digits = abs(scale.number) if scale.number is not None else scale.size
    return replace(_made(a, bytes=number.bytes + digits), number=number.number)


def _levenshtein(a: list[_Value]) -> _Value:
    made = _made(a, bytes=8, work=_argument(a, 0).bytes * _argument(a, 1).bytes)
    return replace(made, number=max(_argument(a, 0).bytes, _argument(a, 1).bytes))


def _compared_arrays(a: list[_Value]) -> _Value:
    """Items of types without a hash (arrays, structs) are compared pairwise."""
    first, second = _argument(a, 0), _argument(a, min(1, len(a) - 1))
    return _made(a, bytes=_sum(a), items=first.items + second.items, work=first.items * second.items)


def _array_insert(a: list[_Value]) -> _Value:
    """Nulls fill the array up to a position after its end."""
    array, place = _argument(a, 0), _argument(a, 1)
    items = array.items + (abs(place.number) if place.number is not None else place.size)
    return _made(a, bytes=_sum(a) + items * 8, items=items)


def _array(a: list[_Value]) -> _Value:
    return _made(a, bytes=_sum(a) + 8 * len(a), items=float(len(a)))


def _stack(a: list[_Value]) -> _Value:
    return _made(a, bytes=_sum(a) + 16 * _argument(a, 0).size)


def _sketch(a: list[_Value]) -> _Value:
    precision = a[1].number if len(a) > 1 else None
    return _made(a, bytes=16 * 2 / precision if precision else (math.inf if len(a) > 1 else 1000))


def _distinct(a: list[_Value]) -> _Value:
    """HyperLogLog++: the number of registers depends on the relative standard deviation."""
    precision = a[1].number if len(a) > 1 else 0.05
    return _made(a, bytes=(1.106 / precision) ** 2 if precision else math.inf)


def _length(a: list[_Value]) -> _Value:
    return replace(_made(a, bytes=8), number=_argument(a, 0).bytes if _argument(a, 0).constant else None)


def _size(a: list[_Value]) -> _Value:
    return replace(_made(a, bytes=8), number=_argument(a, 0).items if _argument(a, 0).constant else None)


def _at_most(most: float) -> Callable[[list[_Value]], _Value]:
    """A number of at most `most`."""
    return lambda a: replace(_made(a, bytes=8), number=most if all(value.constant for value in a) else None)


def _times(factor: float, *, items: bool = False) -> Callable[[list[_Value]], _Value]:
    """As long as its arguments, times a factor; with `items` an array with one item for each byte."""
    return lambda a: _made(a, bytes=_sum(a) * factor, items=_sum(a) if items else 0.0)


def _same(a: list[_Value]) -> _Value:
    """The same number or time, possibly with another type."""
    first = _argument(a, 0)
    number, kind = first.number, first.kind
    if number is None and first.text is not None:
        number = _number(first.text)
        if number is None:
            number, kind = _time(first.text), "time"
    return replace(_made(a, bytes=first.bytes, items=first.items), number=number, text=first.text, kind=kind)


def _text_of(a: list[_Value]) -> _Value:
    """The argument as text; the text of an array has further bytes for each item."""
    first = _argument(a, 0)
    text = first.text
    if text is None and first.number is not None and float(first.number).is_integer() and abs(first.number) < 1e15:
        text = str(int(first.number))
    return replace(_made(a, bytes=first.bytes + 24 * first.items), number=first.number, text=text)


def _arithmetic(operation: Callable[[float, float], float]) -> Callable[[list[_Value]], _Value]:
    def apply(a: list[_Value]) -> _Value:
        made = _made(a, bytes=max(8.0, max((value.bytes for value in a), default=8.0)))
        known = [_same([value]) for value in a]
        if len(known) != 2 or known[0].number is None or known[1].number is None:
            return made
        left, right = known[0].number, known[1].number
        kinds = {value.kind for value in known}
        if kinds == {"time", ""}:  # a date and a number of days
            left *= 1 if known[0].kind else _UNITS["day"]
            right *= 1 if known[1].kind else _UNITS["day"]
        kind = "time" if "time" in kinds else "interval" if "interval" in kinds else ""
        made = replace(made, kind=kind)
        try:
            return replace(made, number=operation(left, right))
        except (ArithmeticError, ValueError):
            return made

    return apply


def _negative(a: list[_Value]) -> _Value:
    first = _same(a)
    return replace(first, number=None if first.number is None else -first.number, text=None)


def _now(a: list[_Value]) -> _Value:
    return _Value(bytes=8, number=datetime.now(UTC).timestamp() * 1e6, constant=True, kind="time")


def _moved(a: list[_Value], *, unit: float) -> _Value:
    """A date moved by a number of units; a negative unit moves it back."""
    first, by = _same(a), _argument(a, 1)
    number = None if first.number is None or by.number is None else first.number + by.number * unit
    return replace(_made(a, bytes=8), number=number, kind="time")


_RULES: dict[str, Callable[[list[_Value]], _Value]] = {
    "repeat": _repeat,
    "stringrepeat": _repeat,
    "space": _spaces,
    "randstr": _spaces,
    "lpad": _padded,
    "rpad": _padded,
    "array_repeat": _array_repeat,
    "sequence": _sequence,
    "concat": _joined,
    "concatws": _with_separator,
    "concat_ws": _with_separator,
    "array_join": _array_joined,
    "replace": _replaced,
    "regexp_replace": _regexp_replaced,
    "format_string": _formatted,
    "printf": _formatted,
    "format_number": _format_number,
    "levenshtein": _levenshtein,
    "array_insert": _array_insert,
    "array": _array,
    "struct": _array,
    "named_struct": _array,
    "map": _array,
    "stack": _stack,
    "count_min_sketch": _sketch,
    "approx_count_distinct": _distinct,
    "string": _text_of,
    "add": _arithmetic(lambda x, y: x + y),
    "subtract": _arithmetic(lambda x, y: x - y),
    "multiply": _arithmetic(lambda x, y: x * y),
    "divide": _arithmetic(lambda x, y: x / y),
    "integraldivide": _arithmetic(lambda x, y: x // y),
    "div": _arithmetic(lambda x, y: x // y),
    "remainder": _arithmetic(math.fmod),
    "mod": _arithmetic(math.fmod),
    "pmod": _arithmetic(math.fmod),
    "shiftleft": _arithmetic(lambda x, y: x * 2.0**y),
    "unaryminus": _negative,
    "negative": _negative,
    "date_add": lambda a: _moved(a, unit=86_400e6),
    "dateadd": lambda a: _moved(a, unit=86_400e6),
    "date_sub": lambda a: _moved(a, unit=-86_400e6),
    "add_months": lambda a: _moved(a, unit=31 * 86_400e6),
    "date_trunc": lambda a: _same(a[1:]),
    "to_json": _times(3),
    "to_csv": _times(3),
    "to_xml": _times(6),
    "hex": _times(2),
    "url_encode": _times(3),
    "base64": _times(1.4),
    "encode": _times(4),
    "quote": _times(2),
    "bin": _times(8),
    "aes_encrypt": _times(2),
    "flatten": lambda a: _made(a, bytes=_sum(a), items=_sum(a) / 8),
    "split": _times(24, items=True),
    "sentences": _times(24, items=True),
    "regexp_extract_all": _times(24, items=True),
    "str_to_map": _times(24, items=True),
    "from_json": _times(24, items=True),
    "size": _size,
    "cardinality": _size,
    "array_size": _size,
    **dict.fromkeys(("power", "pow"), _arithmetic(lambda x, y: abs(x) ** y)),
    **dict.fromkeys(("round", "bround", "ceil", "ceiling", "floor"), _rounded),
    **dict.fromkeys(("array_union", "array_except", "array_intersect", "array_distinct", "arrays_overlap"),
                    _compared_arrays),
    **dict.fromkeys(("length", "len", "char_length", "character_length", "octet_length", "bit_length", "instr",
                     "locate", "position", "charindex"), _length),
    **dict.fromkeys(("day", "dayofmonth", "dayofyear", "dayofweek", "month", "quarter", "hour", "minute",
                     "weekofyear", "weekday", "sign", "signum", "extract", "date_part", "datepart", "extractvalue",
                     "ascii", "isnull", "isnotnull", "nullif", "bit_count"), _at_most(1_114_111)),
    "year": _at_most(9_999),
    **dict.fromkeys(("now", "current_date", "current_timestamp", "curdate", "localtimestamp", "currentdate",
                     "currenttimestamp"), _now),
    **dict.fromkeys(("int", "bigint", "smallint", "tinyint", "float", "double", "decimal", "date", "timestamp",
                     "to_date", "to_timestamp", "try_to_timestamp", "to_timestamp_ntz", "to_number", "abs",
                     "trunc", "last_day", "next_day", "cast", "trycast", "alias", "reverse", "sort_array", "array_sort",
                     "shuffle", "array_compact", "trim", "upper", "lower", "collate", "positive", "unarypositive",
                     "namedargumentexpression"),
                    _same),
    **dict.fromkeys(("coalesce", "nvl", "nvl2", "ifnull", "if", "casewhen", "greatest", "least", "zeroifnull",
                     "any_value", "first", "first_value", "last", "last_value", "min", "max", "mode", "elt"),
                    _either),
}  # fmt: skip
"""The estimates of functions and operators (by their class, in lower case). The result of any other has at most the
size of its arguments together."""

_LAMBDAS = frozenset(
    (
        "aggregate", "reduce", "transform", "filter", "exists", "forall", "any", "all", "zip_with", "map_filter",
        "transform_keys", "transform_values", "map_zip_with", "array_sort",
    )
)  # fmt: skip

_GROWING = frozenset(
    (
        *_LAMBDAS, "repeat", "space", "randstr", "lpad", "rpad", "array_repeat", "sequence", "concat", "concat_ws",
        "array_join", "replace", "regexp_replace", "format_string", "printf", "format_number", "levenshtein",
        "array_insert", "round", "bround", "count_min_sketch", "approx_count_distinct", "hex", "window",
    )
)  # fmt: skip

_UNITS = {
    "nanosecond": 0.001, "microsecond": 1.0, "millisecond": 1e3, "second": 1e6, "minute": 60e6, "hour": 3_600e6,
    "day": 86_400e6, "week": 7 * 86_400e6, "month": 28 * 86_400e6, "year": 365 * 86_400e6,
}  # fmt: skip
_QUANTITY = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*([a-z]+?)s?\b")


def interval_microseconds(text: str) -> float | None:
    """The length of `1 day 2 hours`; None if the text is not an interval."""
    found = _QUANTITY.findall(text.lower())
    if not found or any(unit not in _UNITS for _, unit in found):
        return None
    return sum(float(amount) * _UNITS[unit] for amount, unit in found)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _time(text: str) -> float | None:
    """Microseconds since 1970; time zones are ignored."""
    try:
        return datetime.fromisoformat(text.strip()[:19]).replace(tzinfo=UTC).timestamp() * 1e6
    except (ValueError, OverflowError):
        return None


def _literal(node: Node) -> _Value:
    value, kind = node.get("value"), str(node.get("dataType"))
    text = "" if value is None else str(value)
    size = float(len(text.encode("utf-8", "surrogatepass")))
    if kind in ("string", "binary") or kind.startswith(("char", "varchar", "string")):
        return _Value(bytes=size, text=text if len(text) <= _TEXT_FORMAT else None, constant=True)
    is_time = kind in ("date", "timestamp", "timestamp_ntz")
    number = _time(text) if is_time else _number(text)
    if kind.startswith("interval") and number is not None and ("year" in kind or "month" in kind):
        number *= _UNITS["month"]
    if kind == "interval" or (kind.startswith("interval") and number is None):
        number = interval_microseconds(text)
    meaning = "time" if is_time else "interval" if kind.startswith("interval") else ""
    return _Value(bytes=max(8.0, size), number=0.0 if value is None else number, constant=True, kind=meaning)


# -- plans -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Relation:
    """The estimate of a plan: its named columns, its number of columns (`width`) and of operators (`nodes`).

    `inner` has the names of the operators below.
    """

    columns: dict[str, _Value] = field(default_factory=dict)
    width: int = 0
    nodes: float = 1.0
    inner: Mapping[str, _Value] = field(default_factory=dict)

    def names(self) -> dict[str, _Value]:
        return {**self.inner, **self.columns}


_Tables = Mapping[str, _Relation]
_Names = Mapping[str, _Value]


class _Estimate:
    """Estimates one plan from its leaves to its root. Recursive only for parts in brackets."""

    def __init__(self, limits: PlanLimits, views: Mapping[str, int]) -> None:
        self._limits = limits
        self._views = views
        self._nested = 0.0

    def plan(self, tree: list[Node], tables: _Tables, outer: _Names) -> _Relation:
        nested = self._nested
        made = self._subtree(tree, _ends(tree), 0, tables, outer)
        self._nested = nested
        return made

    def _subtree(self, tree: list[Node], ends: list[int], root: int, tables: _Tables, outer: _Names) -> _Relation:
        places, at = [], root
        while at < ends[root]:
            places.append(at)
            at = ends[at] if _kind(tree[at]) == "UnresolvedWith" else at + 1
        done: list[_Relation] = []
        for place in reversed(places):
            node = tree[place]
            if _kind(node) == "UnresolvedWith":
                inner = self._common_tables(node, tables, outer)
                done.append(self._subtree(tree, ends, place + 1, inner, outer))
            else:
                children = [done.pop() for _ in range(node.get("num-children", 0))]
                done.append(self._operator(node, children, tables, outer))
        return done.pop()

    def _common_tables(self, node: Node, tables: _Tables, outer: _Names) -> _Tables:
        known = dict(tables)
        for relation in node.get("cteRelations") or ():
            body = [value for value in _fields(relation) if _is_tree(value)]
            name = next((value for value in _fields(relation) if isinstance(value, str)), "").lower()
            for level in _fields(relation):
                if isinstance(level, int) and not isinstance(level, bool):
                    _enforce(self._limits, "max_recursion_level", level, "MAX RECURSION LEVEL")
            for tree in body:
                name = name or str(tree[0].get("identifier", {}).get("name", "")).lower()
                known[name] = self.plan(tree, known, outer)
        return known

    def _operator(self, node: Node, children: list[_Relation], tables: _Tables, outer: _Names) -> _Relation:
        kind = _kind(node)
        self._nested = 0.0
        names: dict[str, _Value] = dict(outer)
        for child in children:
            names.update(child.names())
        made = _Relation(
            columns={name: value for child in children for name, value in child.columns.items()},
            width=sum(child.width for child in children) if kind not in ("Union", "Except", "Intersect") else 0,
            nodes=1 + sum(child.nodes for child in children),
            inner=names,
        )
        if kind in ("Union", "Except", "Intersect"):
            made.width = max((child.width for child in children), default=0)
            made.columns = _united(children)
        if kind == "UnresolvedRelation":
            self._relation(node, made, tables)
        elif kind in ("UnresolvedSubqueryColumnAliases", "UnresolvedTVFAliases"):
            made.columns = _renamed(node, made)
        listed = next((node[name] for name in ("projectList", "aggregateExpressions") if node.get(name)), None)
        if isinstance(listed, list):
            self._project(listed, made, children, names, tables)
        for name, value in node.items():
            if name in ("projectList", "aggregateExpressions", "class"):
                continue
            for tree in _trees(value):
                if _is_plan(tree):
                    self._nested += self.plan(tree, tables, names).nodes
                else:
                    found = self._checked(tree, names, tables)
                    if name in ("rows", "generator", "functionArgs"):
                        self._output(node, made, found)
        if kind == "Aggregate":
            sets = math.prod(_grouping_sets(tree[0]) for tree in _trees(node.get("groupingExpressions")) if tree)
            _enforce(self._limits, "max_grouping_sets", sets, "grouping sets of GROUP BY")
        elif kind == "UnresolvedTableValuedFunction" and _function(node) == "range":
            self._range(node, names, tables)
        made.nodes += self._nested
        _enforce(self._limits, "max_columns", made.width, f"columns of {kind}")
        _enforce(
            self._limits, "max_plan_nodes", made.nodes, "operators of the plan, each common table where it is used"
        )
        return made

    def _relation(self, node: Node, made: _Relation, tables: _Tables) -> None:
        name = str(node.get("multipartIdentifier"))[1:-1].lower()
        table = tables.get(name)
        if table is not None:
            made.columns, made.width, made.nodes = dict(table.columns), table.width, 1 + table.nodes
        else:
            made.width = self._views.get(name, 1)

    def _project(
        self, listed: list[Any], made: _Relation, children: list[_Relation], names: dict[str, _Value], tables: _Tables
    ) -> None:
        """The columns of a SELECT; each may use the names of earlier ones."""
        below = sum(child.width for child in children)
        inherited = dict(made.columns)
        made.columns, made.width = {}, 0
        visible = dict(names)
        for tree in _trees(listed):
            kind = _kind(tree[0])
            if "Star" in kind:
                made.width += below
                made.columns.update(inherited)
                continue
            made.width += 1
            _enforce(self._limits, "max_columns", made.width, "columns of SELECT")
            value = self._checked(tree, visible, tables)
            name = _output_name(tree[0])
            if name is not None:
                made.columns[name] = value
                visible.setdefault(name, value)

    def _output(self, node: Node, made: _Relation, value: _Value) -> None:
        """The names of the output columns of a generator, a table function or VALUES."""
        share = value.bytes / max(1.0, value.items)
        given = [tree[0] for tree in _trees(node.get("generatorOutput"))]
        plain = str(node.get("names") or "").strip("[]").split(", ")
        for name in [*filter(None, (_output_name(one) for one in given)), *filter(None, plain), "col"]:
            one = replace(value, bytes=share, items=0.0, work=0.0) if value.items else value
            made.columns[name.lower()] = _either([one, made.columns.get(name.lower(), one)])
        made.width = max(made.width, len(made.columns))

    def _range(self, node: Node, names: _Names, tables: _Tables) -> None:
        trees = list(_trees(node.get("functionArgs")))
        # range(start, end, step, numPartitions); a named argument may be any of them.
        partitions = [tree for place, tree in enumerate(trees) if place >= 3 or "Named" in _kind(tree[0])]
        for tree in partitions:
            value = self._checked(tree, names, tables)
            _enforce(self._limits, "max_partitions", value.size, "partitions of range")

    # -- expressions -------------------------------------------------------------------------------------------------

    def _checked(self, tree: list[Node], names: _Names, tables: _Tables) -> _Value:
        value = self._expression(tree, _ends(tree), 0, names, tables)
        _enforce(self._limits, "max_constant_work", value.work, "steps to evaluate an expression")
        _enforce(self._limits, "max_expression_nodes", value.nodes, "nodes of an expression with those that it names")
        return value

    def _expression(self, tree: list[Node], ends: list[int], root: int, names: _Names, tables: _Tables) -> _Value:
        """Estimate one expression; functions estimate the bodies of their lambdas themselves."""
        places, at = [], root
        while at < ends[root]:
            places.append(at)
            at = ends[at] if _kind(tree[at]) == "LambdaFunction" else at + 1
        done: list[tuple[int, _Value]] = []
        for place in reversed(places):
            node = tree[place]
            children = (
                [] if _kind(node) == "LambdaFunction" else [done.pop() for _ in range(node.get("num-children", 0))]
            )
            value = self._node(node, place, children, tree, ends, names, tables)
            nodes = 1.0 + sum(child.nodes for _, child in children)
            value = replace(value, nodes=max(nodes, value.nodes))
            if value.bytes > self._limits.max_constant_bytes:
                _enforce(self._limits, "max_constant_bytes", value.bytes, f"bytes of a value of {_function(node)}")
            done.append((place, value))
        return done.pop()[1]

    def _node(
        self, node: Node, place: int, children: list[tuple[int, _Value]], tree: list[Node], ends: list[int],
        names: _Names, tables: _Tables,
    ) -> _Value:  # fmt: skip
        kind, function = _kind(node), _function(node)
        values = [value for _, value in children]
        if kind == "Literal":
            return _literal(node)
        if kind in ("UnresolvedAttribute", "UnresolvedNamedLambdaVariable", "UnresolvedExtractValue", "UnresolvedStar"):
            parts = str(node.get("nameParts") or "").strip("[]").lower().split(", ")
            found = names.get(parts[-1], names.get(parts[0])) if parts else None
            return found if found is not None else (_either(values) if values else _COLUMN)
        if kind == "LambdaFunction":
            return _Value(bytes=0.0, constant=True)
        for name, field_value in node.items():
            if name not in ("class", "dataType"):
                for inner in _trees(field_value):
                    if _is_plan(inner):
                        relation = self.plan(inner, tables, names)
                        self._nested += relation.nodes
                        if kind == "ScalarSubquery" and relation.columns:
                            values = [*values, _either(list(relation.columns.values()))]
        if kind == "Cast" and str(node.get("dataType")) == "string":
            function = "string"
        lambdas = [place for place, _ in children if _kind(tree[place]) == "LambdaFunction"]
        if function in _LAMBDAS and lambdas:
            return self._higher_order(function, values, lambdas, tree, ends, names, tables)
        if function == "window" and kind == "UnresolvedFunction":
            self._window(values)
        rule = _RULES.get(function)
        if rule is not None:
            return rule(values)
        if kind == "ScalarSubquery":
            return replace(_either(values), constant=False, number=_either(values).number) if values else _COLUMN
        made = _made(values, bytes=max(8.0, _sum(values)), items=max((value.items for value in values), default=0.0))
        return made if values else replace(made, constant=False)

    def _window(self, values: list[_Value]) -> None:
        lengths = [
            value.number if value.number is not None else interval_microseconds(value.text or "") for value in values
        ]
        if len(lengths) >= 3 and lengths[1] and lengths[2]:
            ratio = abs(lengths[1] / lengths[2])
            _enforce(self._limits, "max_window_ratio", ratio, "windows of each row (its length divided by its slide)")

    def _higher_order(
        self, function: str, values: list[_Value], lambdas: list[int], tree: list[Node], ends: list[int],
        names: _Names, tables: _Tables,
    ) -> _Value:  # fmt: skip
        array = values[0] if values else _COLUMN
        count = max(1.0, array.items)
        item = replace(array, bytes=array.bytes / count, items=0.0, work=0.0, number=None, text=None)
        work = sum(value.work for value in values)

        def body(*arguments: _Value) -> _Value:
            return self._call(tree, ends, lambdas[0], arguments, names, tables)

        if function in ("aggregate", "reduce"):
            start = replace(_argument(values, 1), work=0.0)
            return self._folded(count, start, item, work, body)
        once = body(item, item, item)
        if function == "array_sort":
            return replace(array, work=work + count * math.log2(count + 1) * (once.work + 1))
        made = _made(values, bytes=array.bytes, items=array.items)
        if function.startswith(("transform", "zip")):
            made = replace(made, bytes=count * (once.bytes + 8))
        return replace(made, work=work + count * (once.work + 1), constant=made.constant and once.constant)

    def _folded(self, count: float, start: _Value, item: _Value, work: float, body: Callable[..., _Value]) -> _Value:
        sizes, value = [start.bytes], start
        for _ in range(int(min(count, _ITERATIONS))):
            value = replace(body(value, item), work=0.0, number=None, text=None)
            sizes.append(value.bytes)
            _enforce(self._limits, "max_constant_bytes", value.bytes, "bytes of a value of aggregate")
            if len(sizes) > 3 and sizes[-1] == sizes[-2] == sizes[-3]:
                break
        else:
            grows = sizes[-1] - sizes[-2]
            if count > _ITERATIONS and grows > 0:
                steady = grows <= (sizes[-2] - sizes[-3]) * 1.001
                size = sizes[-1] + grows * (count - _ITERATIONS) if steady else math.inf
                value = replace(value, bytes=size)
        once = body(value, item).work + 1
        return replace(value, work=work + count * once)

    def _call(
        self, tree: list[Node], ends: list[int], place: int, arguments: tuple[_Value, ...], names: _Names,
        tables: _Tables,
    ) -> _Value:  # fmt: skip
        """The estimate of the body of a lambda. Its variables follow its body among its children."""
        variables = []
        at = ends[place + 1]
        while at < ends[place]:
            variables.append(str(tree[at].get("nameParts") or "").strip("[]").lower())
            at = ends[at]
        inner = {**names, **dict(zip(variables, arguments, strict=False))}
        return self._expression(tree, ends, place + 1, inner, tables)


# -- Spark's JSON ----------------------------------------------------------------------------------------------------


def _kind(node: Node) -> str:
    return str(node.get("class")).rpartition(".")[2].rstrip("$")


def _function(node: Node) -> str:
    """The name of a called function, or the class of the node, in lower case."""
    name = node.get("nameParts") or node.get("name")
    if isinstance(name, dict):
        name = name.get("funcName")
    if _kind(node) in ("UnresolvedFunction", "UnresolvedGenerator", "UnresolvedTableValuedFunction") and name:
        return str(name).strip("[]").lower()
    return _kind(node).lower()


def _is_tree(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "class" in value[0]


def _is_plan(tree: list[Node]) -> bool:
    """Whether a tree is a plan, not an expression."""
    full = str(tree[0].get("class"))
    return ".plans." in full or _kind(tree[0]) in _PLANS_OF_ANALYSIS


_PLANS_OF_ANALYSIS = frozenset(
    (
        "UnresolvedRelation", "UnresolvedHaving", "UnresolvedInlineTable", "UnresolvedSubqueryColumnAliases",
        "UnresolvedTVFAliases", "UnresolvedTableValuedFunction", "UnresolvedTranspose", "ResolvedInlineTable",
        "NamedRelation",
    )
)  # fmt: skip


def _fields(value: object) -> list[Any]:
    """The parts of a tuple or a list."""
    if isinstance(value, dict):
        return [part for name, part in value.items() if name != "product-class"]
    return list(value) if isinstance(value, list) else []


def _trees(value: object) -> Iterator[list[Node]]:
    """The trees in a field, in any collections, but not those inside other trees."""
    if _is_tree(value):
        assert isinstance(value, list)
        yield value
    elif isinstance(value, list | dict):
        for part in _fields(value):
            yield from _trees(part)


def _ends(tree: list[Node]) -> list[int]:
    """For each node of a tree, the index after its last descendant. Nodes are listed before their children."""
    ends = [0] * len(tree)
    for place in range(len(tree) - 1, -1, -1):
        end = place + 1
        for _ in range(tree[place].get("num-children", 0)):
            end = ends[end]
        ends[place] = end
    return ends


def _output_name(node: Node) -> str | None:
    kind = _kind(node)
    if kind == "Alias":
        return str(node.get("name")).lower()
    if kind == "UnresolvedAttribute":
        return str(node.get("nameParts")).strip("[]").lower().split(", ")[-1]
    return None


def _renamed(node: Node, made: _Relation) -> dict[str, _Value]:
    names = str(node.get("outputColumnNames") or node.get("outputNames") or "").strip("[]").lower().split(", ")
    values = list(made.columns.values())
    if len(values) == len(names) == made.width:
        return dict(zip(names, values, strict=True))
    return dict.fromkeys(names, _either(values))


def _united(children: list[_Relation]) -> dict[str, _Value]:
    """The columns of a UNION: the names of the first part, and the values of any part."""
    if not children:
        return {}
    columns = [list(child.columns.values()) for child in children]
    if all(len(values) == child.width == len(columns[0]) for values, child in zip(columns, children, strict=True)):
        return {name: _either([values[place] for values in columns]) for place, name in enumerate(children[0].columns)}
    every = [value for values in columns for value in values]
    return {name: _either(every) for name in children[0].columns}


def _grouping_sets(node: Node) -> float:
    kind, count = _kind(node), int(node.get("num-children", 0))
    match kind:
        case "Cube":
            return 2.0 ** min(count, 1000)
        case "Rollup":
            return count + 1.0
        case "GroupingSets":
            return max(1.0, float(count))
    return 1.0
