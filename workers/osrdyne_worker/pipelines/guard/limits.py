"""Limits of a query, checked on the plan of Spark's parser, before Spark evaluates anything.

Spark evaluates constants while it analyses and optimises a query, expands each common table wherever it is used, and
creates one projection for each grouping set and each window of a row. None of that can be cancelled, and all of it
happens in the only JVM of the worker. So the results are estimated first. Pure; the SQL pipeline calls `check_limits`
after `check_parsed`. What cannot be estimated (the time of a regular expression, the rows of a join) is left to the
deadline and to the heap watch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import TokenType

from osrdyne_worker.pipelines.guard.plan_tree import PlanNode, fold, number_of_nodes, read_plan
from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError
from osrdyne_worker.pipelines.guard.sql_guard import PARTITION_HINTS

_COLUMN_BYTES = 8.0
"""The assumed size of a value that depends on the data."""
_TEXT_FORMAT = 1_000
"""Characters up to which the content of a constant text is considered."""
_ITERATIONS = 64
"""Steps of an `aggregate` that are estimated one by one. A size that still grows faster then counts as infinite."""
_MATCHED_BYTES = 48.0
"""The assumed length of a text of the data that is compared with a pattern."""
_REGISTER_BYTES = 24
"""What one register of `approx_count_distinct` takes: ten of them are a column of the plan."""
_UNKNOWN_SPAN = 200 * 365.25 * 86_400e6
"""The assumed microseconds between two constant dates whose values are not known here."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits of one query; settings of the pipeline have the same names."""

    max_query_nesting: int = 30
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


_SET_OPERATORS = re.compile(r"\b(?:union|except|intersect|minus)\b|\|>", re.IGNORECASE)


def check_text(text: str, limits: PlanLimits) -> None:
    """Check what makes Spark's parser itself slow: set operations (quadratic time), pipes, and CUBE and ROLLUP within
    GROUPING SETS, which the parser expands."""
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


def check_limits(description: str, limits: PlanLimits, *, views: Mapping[str, int]) -> None:
    """Raise `LimitExceededError` if the parsed plan exceeds a limit; `PlanWalker.java` writes its `description`.

    `views`: the number of columns of each view.
    """
    root = read_plan(description)
    _enforce(limits, "max_expression_nodes", number_of_nodes(root), "nodes of the plan and its expressions")
    estimate = _Estimate(limits, views)
    try:
        estimate.plan(root, {}, {})
        for node in root.hidden:
            estimate.hidden(node)
    except RecursionError:
        raise QueryRefusedError(
            "The query is nested too deeply; split it with WITH.", error_code="query_too_complex", code=400
        ) from None


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
    nesting: float | None = None
    """Brackets within brackets in a text; None if they are not known."""
    written: bool = False
    """Whether a text or a binary of the query is part of the value."""

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
    numbers = [value.number for value in values if value.number is not None]
    constant = all(value.constant for value in values)
    return _Value(
        bytes=max(value.bytes for value in values),
        items=max(value.items for value in values),
        work=sum(value.work for value in values),
        # A constant whose number is not known may be any; a value that depends on the data is left to the tasks.
        number=None if constant and len(numbers) < len(values) else max(numbers, default=None),
        text=values[0].text if len(values) == 1 else None,
        kind=values[0].kind if len({value.kind for value in values}) == 1 else "",
        nodes=max(value.nodes for value in values),
        constant=constant,
        nesting=values[0].nesting if len(values) == 1 else None,
        written=any(value.written for value in values),
    )


def _made(arguments: list[_Value], *, bytes: float, items: float = 0.0, work: float = 0.0) -> _Value:
    """The estimate of a value that is computed from `arguments`."""
    return _Value(
        bytes=bytes,
        items=items,
        work=work + sum(argument.work for argument in arguments),
        constant=all(argument.constant for argument in arguments),
        written=any(argument.written for argument in arguments),
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
    # A text that opens brackets may be joined to others of its kind.
    nesting = None if any(value.nesting is None for value in a) else sum(value.nesting or 0.0 for value in a)
    made = replace(_made(a, bytes=_sum(a), items=items), nesting=nesting)
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


def _jaro_winkler(a: list[_Value]) -> _Value:
    return _made(a, bytes=8, work=_argument(a, 0).bytes * _argument(a, 1).bytes)


def _like(a: list[_Value]) -> _Value:
    """LIKE is a regular expression, which tries every place for every `%` except the last one of a pattern."""
    text, *patterns = a or [_COLUMN]
    length = text.bytes if text.constant else max(text.bytes, _MATCHED_BYTES)
    work = 0.0
    for pattern in patterns:
        if pattern.text is not None:
            wildcards = float(pattern.text.rstrip("%").count("%"))
        else:
            wildcards = pattern.bytes if pattern.constant else 1.0
        work += _combinations(length + wildcards, wildcards)
    return replace(_made(a, bytes=8, work=work), written=False)


def _combinations(of: float, count: float) -> float:
    exponent = math.lgamma(of + 1) - math.lgamma(count + 1) - math.lgamma(of - count + 1)
    return math.exp(exponent) if exponent < 500 else math.inf


def _count_min_sketch(a: list[_Value]) -> _Value:
    precision, confidence = (_same([_argument(a, place)]).number for place in (1, 2))
    if not precision or confidence is None or not 0 <= confidence < 1:
        return _made(a, bytes=math.inf)
    return _made(a, bytes=8 * math.ceil(2 / abs(precision)) * max(1, math.ceil(-math.log2(1 - confidence))))


def _distinct(a: list[_Value]) -> _Value:
    """HyperLogLog++: the number of registers depends on the relative standard deviation."""
    precision = _same([a[1]]).number if len(a) > 1 else 0.05
    if not precision or precision < 0:
        return _made(a, bytes=math.inf)
    return _made(a, bytes=_REGISTER_BYTES * 2.0 ** max(4, math.ceil(2 * math.log2(1.106 / precision))))


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
    made = _made(a, bytes=first.bytes, items=first.items)
    return replace(made, number=number, text=first.text, kind=kind, nesting=first.nesting)


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
    "jaro_winkler_similarity": _jaro_winkler,
    "count_min_sketch": _count_min_sketch,
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
    "schema_of_json": lambda a: replace(_made(a, bytes=_sum(a) * 8), nesting=_argument(a, 0).nesting),
    "schema_of_csv": lambda a: replace(_made(a, bytes=_sum(a) * 8), nesting=0.0),
    "split": _times(24, items=True),
    "sentences": _times(24, items=True),
    "regexp_extract_all": _times(24, items=True),
    "str_to_map": _times(24, items=True),
    "from_json": _times(24, items=True),
    "size": _size,
    "cardinality": _size,
    "array_size": _size,
    **dict.fromkeys(("like", "ilike", "likeall", "likeany", "notlikeall", "notlikeany"), _like),
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
                     "namedargumentexpression", "pipeexpression"),
                    _same),
    **dict.fromkeys(("coalesce", "nvl", "nvl2", "ifnull", "if", "casewhen", "greatest", "least", "zeroifnull",
                     "any_value", "first", "first_value", "last", "last_value", "min", "max", "mode", "elt"),
                    _either),
}  # fmt: skip
"""The estimates of functions and operators (by their class, in lower case). The result of any other has at most the
size of its arguments together."""

_TYPES = {"from_json": 1, "from_csv": 1, "schema_of_json": 0, "variant_get": 2, "try_variant_get": 2}
"""The place of the argument that Spark's parser reads as a type, or that a type is made of."""
_BUFFERS = frozenset(("approx_count_distinct", "count_min_sketch"))
"""Aggregates whose buffer may be large although their arguments are not."""
_SKETCHES = ("hll_", "theta_", "kll_", "tuple_", "bitmap_", "approx_top_k_")
_SKETCHED = re.compile(
    r"hll_sketch_agg|theta_sketch_agg|kll_sketch_agg_\w+|tuple_sketch_agg_\w+|bitmap_construct_agg|approx_top_k_accumulate"
    r"|bitmap_bit_position|bitmap_bucket_number"
)
"""Functions of sketches whose arguments are no sketches."""
_SKETCH_MODES = frozenset(("sum", "min", "max", "alwaysone"))
_PREDICATES = frozenset(
    (
        "equalto", "equalnullsafe", "lessthan", "lessthanorequal", "greaterthan", "greaterthanorequal", "in", "between",
        "isnull", "isnotnull", "not", "rlike", "regexp_like", "contains", "startswith", "endswith",
    )
)  # fmt: skip

_LAMBDAS = frozenset(
    (
        "aggregate", "reduce", "transform", "filter", "exists", "forall", "any", "all", "zip_with", "map_filter",
        "transform_keys", "transform_values", "map_zip_with", "array_sort",
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


def _literal(node: PlanNode) -> _Value:
    value, kind = node.values.get("value"), str(node.values.get("dataType"))
    text = "" if value is None else str(value)
    size = float(len(text.encode("utf-8", "surrogatepass")))
    length = float(node.values.get("bytes", size))
    if kind in ("string", "binary") or kind.startswith(("char", "varchar", "string")):
        known = length == size and kind != "binary" and len(text) <= _TEXT_FORMAT  # otherwise the text is cut
        nesting = float(node.values.get("nesting", 0))
        return _Value(bytes=length, text=text if known else None, constant=True, nesting=nesting, written=True)
    number = 0.0 if value is None else _number(text)
    if kind == "interval":
        number = interval_microseconds(text)
    elif number is not None and kind.startswith("interval") and ("year" in kind or "month" in kind):
        number *= _UNITS["month"]
    elif number is not None and kind == "date":
        number *= _UNITS["day"]
    is_time = kind in ("date", "timestamp", "timestamp_ntz")
    meaning = "time" if is_time else "interval" if kind.startswith("interval") else ""
    items = float(node.values.get("items", 0))
    return _Value(bytes=max(8.0, length, items * 8), items=items, number=number, constant=True, kind=meaning)


# -- plans -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Relation:
    """The estimate of a plan: its named columns, its number of columns (`width`) and of operators (`nodes`).

    `inner` has the names of the operators below; `partitions` are those that hints and `range` ask for.
    """

    columns: dict[str, _Value] = field(default_factory=dict)
    width: int = 0
    nodes: float = 1.0
    partitions: float = 0.0
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
        self._nested: list[_Relation] = []
        """The subqueries in the expressions of an operator."""
        self._work = 0.0
        self._buffers = 0.0

    def plan(self, root: PlanNode, tables: _Tables, outer: _Names) -> _Relation:
        nested = self._nested
        made = self._subtree(root, tables, outer)
        self._nested = nested
        return made

    def hidden(self, node: PlanNode) -> None:
        """Estimate a plan or an expression of which the place in the query is not known."""
        if node.is_plan:
            self.plan(node, {}, {})
        else:
            self._checked(node, {}, {})

    def _subtree(self, root: PlanNode, tables: _Tables, outer: _Names) -> _Relation:
        def parts(node: PlanNode) -> list[PlanNode]:
            return [] if node.kind == "UnresolvedWith" else node.plans()

        def visit(node: PlanNode, children: list[_Relation]) -> _Relation:
            if node.kind == "UnresolvedWith":
                return self._with(node, tables, outer)
            return self._operator(node, children, tables, outer)

        return fold(root, parts, visit)

    def _with(self, node: PlanNode, tables: _Tables, outer: _Names) -> _Relation:
        """The query after a WITH clause, for which each common table counts wherever it is used."""
        known = dict(tables)
        made = _Relation()
        for path, part in node.below:
            if path.startswith("cteRelations"):
                level = node.values.get(f"{path.rpartition('.')[0]}.2")
                if level is not None:
                    _enforce(self._limits, "max_recursion_level", float(level), "MAX RECURSION LEVEL")
                known[str(part.values.get("identifier.name")).lower()] = self.plan(part, known, outer)
        for path, part in node.below:
            if not path.startswith("cteRelations"):
                made = self._subtree(part, known, outer)
        return made

    def _operator(self, node: PlanNode, children: list[_Relation], tables: _Tables, outer: _Names) -> _Relation:
        kind = node.kind
        self._nested = []
        names = {**outer, **_merged([child.names() for child in children])}
        made = _Relation(
            columns=_merged([child.columns for child in children]),
            width=sum(child.width for child in children) if kind not in ("Union", "Except", "Intersect") else 0,
            nodes=1 + sum(child.nodes for child in children),
            inner=names,
        )
        if kind in ("Union", "Except", "Intersect"):
            made.width = max((child.width for child in children), default=0)
            made.columns = _united(children)
        asked = 0.0
        if kind == "UnresolvedRelation":
            self._relation(node, made, tables)
            asked = made.partitions
        elif kind in ("UnresolvedSubqueryColumnAliases", "UnresolvedTVFAliases"):
            made.columns = _renamed(node, made)
        listed = [(path, tree) for path, tree in node.below if not tree.is_plan]
        columns = [tree for path, tree in listed if path.startswith(_OUTPUT)]
        if columns:
            self._project(columns, made, children, names, tables)
        for path, tree in listed:
            if path.startswith(_OUTPUT):
                continue
            found = self._checked(tree, names, tables)
            if path.startswith(("rows", "generator", "functionArgs")):
                self._output(node, made, found)
            elif kind in ("Pivot", "Unpivot"):  # the names of their columns are made of values
                made.columns[f"{_UNNAMED}{kind}.{path}"] = found
        if kind == "Aggregate":
            sets = math.prod(_grouping_sets(tree) for path, tree in listed if path.startswith("groupingExpressions"))
            _enforce(self._limits, "max_grouping_sets", sets, "grouping sets of GROUP BY")
        elif kind == "UnresolvedTableValuedFunction" and _function(node) == "range":
            # range(start, end, step, numPartitions); a named argument may be any of them.
            arguments = enumerate(node.expressions())
            numbers = [tree for place, tree in arguments if place >= 3 or "Named" in tree.kind]
            asked = self._partitions(numbers, names, tables)
        elif kind == "UnresolvedHint" and str(node.values.get("name")).lower() in PARTITION_HINTS:
            # Not a column, also one that has the value of a number.
            numbers = [tree for _, tree in listed if tree.kind != "UnresolvedAttribute"]
            asked = self._partitions(numbers, names, tables)
        made.nodes += sum(part.nodes for part in self._nested)
        below = [part.partitions for part in [*children, *self._nested] if part.partitions]
        # A join without an equality runs a task for each pair of partitions.
        made.partitions = asked + (math.prod(below) if kind.endswith("Join") else sum(below))
        _enforce(self._limits, "max_columns", made.width, f"columns of {kind}")
        _enforce(self._limits, "max_partitions", made.partitions, "partitions of hints and range, multiplied by joins")
        _enforce(
            self._limits, "max_plan_nodes", made.nodes, "operators of the plan, each common table where it is used"
        )
        return made

    def _relation(self, node: PlanNode, made: _Relation, tables: _Tables) -> None:
        name = ".".join(node.texts("multipartIdentifier"))
        table = tables.get(name)
        if table is not None:
            made.columns, made.width, made.nodes = dict(table.columns), table.width, 1 + table.nodes
            made.partitions = table.partitions
        else:
            made.width = self._views.get(name, 1)

    def _project(
        self,
        listed: list[PlanNode],
        made: _Relation,
        children: list[_Relation],
        names: dict[str, _Value],
        tables: _Tables,
    ) -> None:
        """The columns of a SELECT; each may use the names of earlier ones."""
        below = sum(child.width for child in children)
        inherited = dict(made.columns)
        made.columns, made.width = {}, 0
        visible = dict(names)
        for tree in listed:
            if "Star" in tree.kind:
                made.width += below
                made.columns.update(inherited)
                for replaced in tree.expressions():  # `|> SET column = value`
                    value = self._checked(replaced, visible, tables)
                    made.columns.update(dict.fromkeys(_output_names(replaced), value))
                continue
            made.width += 1
            _enforce(self._limits, "max_columns", made.width, "columns of SELECT")
            value = self._checked(tree, visible, tables)
            for name in _output_names(tree) or [f"{_UNNAMED}{made.width}"]:
                made.columns[name] = value
                visible.setdefault(name, value)

    def _output(self, node: PlanNode, made: _Relation, value: _Value) -> None:
        """The names of the output columns of a generator, a table function or VALUES."""
        share = value.bytes / max(1.0, value.items)
        outputs = [tree for path, tree in node.below if path.startswith("generatorOutput")]
        given = [name for tree in outputs for name in _output_names(tree)]
        for name in [*given, *node.texts("names"), "col"]:
            one = replace(value, bytes=share, items=0.0, work=0.0) if value.items else value
            made.columns[name] = _either([one, made.columns.get(name, one)])
        made.width = max(made.width, len(made.columns))

    def _partitions(self, numbers: list[PlanNode], names: _Names, tables: _Tables) -> float:
        return max((self._checked(tree, names, tables).size for tree in numbers), default=0.0)

    # -- expressions -------------------------------------------------------------------------------------------------

    def _checked(self, tree: PlanNode, names: _Names, tables: _Tables) -> _Value:
        value = self._expression(tree, names, tables)
        self._work += value.work
        _enforce(self._limits, "max_constant_work", self._work, "steps to evaluate each expression once")
        _enforce(self._limits, "max_expression_nodes", value.nodes, "nodes of an expression with those that it names")
        return value

    def _expression(self, root: PlanNode, names: _Names, tables: _Tables) -> _Value:
        """Estimate one expression; functions estimate the bodies of their lambdas themselves."""

        def parts(node: PlanNode) -> list[PlanNode]:
            return [] if node.kind == "LambdaFunction" else node.expressions()

        def visit(node: PlanNode, children: list[_Value]) -> _Value:
            value = self._node(node, children, names, tables)
            nodes = 1.0 + sum(child.nodes for child in children)
            value = replace(value, nodes=max(nodes, value.nodes))
            if value.bytes > self._limits.max_constant_bytes:
                _enforce(self._limits, "max_constant_bytes", value.bytes, f"bytes of a value of {_function(node)}")
            return value

        return fold(root, parts, visit)

    def _node(self, node: PlanNode, values: list[_Value], names: _Names, tables: _Tables) -> _Value:
        kind, function = node.kind, _function(node)
        if kind == "Literal":
            return _literal(node)
        if kind in ("UnresolvedAttribute", "UnresolvedNamedLambdaVariable", "UnresolvedExtractValue", "UnresolvedStar"):
            found = _named(node.texts("nameParts"), names)
            return found if found is not None else (_either(values) if values else _COLUMN)
        if kind == "LambdaFunction":
            return _Value(bytes=0.0, constant=True)
        for inner in node.plans():
            relation = self.plan(inner, tables, names)
            self._nested.append(relation)
            if kind == "ScalarSubquery" and relation.columns:
                values = [*values, _either(list(relation.columns.values()))]
        if kind == "Cast" and node.values.get("dataType") == "string":
            function = "string"
        lambdas = [part for part in node.expressions() if part.kind == "LambdaFunction"]
        if function in _LAMBDAS and lambdas:
            return self._higher_order(function, values, lambdas[0], names, tables)
        if function == "window" and kind == "UnresolvedFunction":
            self._window(values)
        if kind.endswith(("LikeAll", "LikeAny")):
            texts = [text for name, text in node.values.items() if name.startswith("patterns.")]
            values = [*values, *(_Value(bytes=float(len(text)), text=str(text), constant=True) for text in texts)]
        if function in _TYPES:
            self._type(function, _argument(values, _TYPES[function]))
        if function.startswith(_SKETCHES):
            return self._sketch(function, values)
        rule = _RULES.get(function)
        if rule is not None:
            made = rule(values)
            if function in _BUFFERS:
                self._buffers += made.bytes
                _enforce(self._limits, "max_constant_bytes", self._buffers, f"bytes of the buffers of {function}")
            return made
        if kind == "ScalarSubquery":
            return replace(_either(values), constant=False, number=_either(values).number) if values else _COLUMN
        made = _made(values, bytes=max(8.0, _sum(values)), items=max((value.items for value in values), default=0.0))
        made = replace(made, written=made.written and function not in _PREDICATES)
        return made if values else replace(made, constant=False)

    def _type(self, function: str, text: _Value) -> None:
        """Spark's parser needs seconds for types that are nested hundreds of times, and nothing stops it."""
        nesting = text.bytes if text.nesting is None else text.nesting
        _enforce(self._limits, "max_query_nesting", nesting, f"brackets within brackets in the type of {function}")

    def _sketch(self, function: str, values: list[_Value]) -> _Value:
        """A sketch comes from an aggregate or from the data: a forged one can take any time and memory."""
        made = _made(values, bytes=max(8.0, _sum(values)))
        if _SKETCHED.fullmatch(function):
            return replace(made, constant=False, written=False)
        if any(value.written and value.text not in _SKETCH_MODES for value in values):
            raise QueryRefusedError(
                f"The query is refused: {function} reads a sketch, which may not be a constant; read it from a view or "
                "make it with an aggregate.",
                error_code="function_not_allowed",
            )
        return made

    def _window(self, values: list[_Value]) -> None:
        lengths = [
            value.number if value.number is not None else interval_microseconds(value.text or "") for value in values
        ]
        if len(lengths) >= 3 and lengths[1] and lengths[2]:
            ratio = abs(lengths[1] / lengths[2])
            _enforce(self._limits, "max_window_ratio", ratio, "windows of each row (its length divided by its slide)")

    def _higher_order(
        self, function: str, values: list[_Value], called: PlanNode, names: _Names, tables: _Tables
    ) -> _Value:
        array = values[0] if values else _COLUMN
        count = max(1.0, array.items)
        item = replace(array, bytes=array.bytes / count, items=0.0, work=0.0, number=None, text=None)
        work = sum(value.work for value in values)

        def body(*arguments: _Value) -> _Value:
            return self._call(called, arguments, names, tables)

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

    def _call(self, called: PlanNode, arguments: tuple[_Value, ...], names: _Names, tables: _Tables) -> _Value:
        """The estimate of the body of a lambda. Its variables follow its body among its children."""
        body, *variables = called.expressions()
        taken = [".".join(variable.texts("nameParts")) for variable in variables]
        return self._expression(body, {**names, **dict(zip(taken, arguments, strict=False))}, tables)


# -- names of Spark --------------------------------------------------------------------------------------------------

_OUTPUT = ("projectList", "aggregateExpressions")
"""The fields of an operator that have its columns."""
_UNNAMED = "\0"
"""The beginning of the name here of a column to which the query gives no name."""


def _function(node: PlanNode) -> str:
    """The name of a called function, or the class of the node, in lower case."""
    called = {
        "UnresolvedFunction": node.texts("nameParts"),
        "UnresolvedTableValuedFunction": node.texts("name"),
        "UnresolvedGenerator": [str(node.values.get("name.funcName")).lower()],
    }.get(node.kind)
    return ".".join(called) if called else node.kind.lower()


def _named(parts: list[str], names: _Names) -> _Value | None:
    """The value of a column, or of a column that has it as a field; None if it depends on the data."""
    for part in reversed(parts):
        if part in names:
            return names[part]
    # Spark makes names of expressions. A name that is not known here may be that of any column without one.
    unnamed = [value for name, value in names.items() if name.startswith(_UNNAMED)] if parts else []
    if not unnamed:
        return None
    numbers = [value.number for value in unnamed if value.number is not None]
    unknown = any(value.constant and value.number is None and value.text is None for value in unnamed)
    return replace(
        _either(unnamed), number=None if unknown else max(numbers, default=None), text=None, constant=unknown
    )


def _output_names(node: PlanNode) -> list[str]:
    """The names of the columns that an expression of SELECT makes."""
    match node.kind:
        case "Alias":
            return [str(node.values.get("name")).lower()]
        case "MultiAlias":
            return node.texts("names")
        case "UnresolvedAttribute":
            return node.texts("nameParts")[-1:]
    return []


def _merged(relations: list[Mapping[str, _Value]]) -> dict[str, _Value]:
    """The names of all relations; a name of several stands for any of their values."""
    found: dict[str, _Value] = {}
    for names in relations:
        for name, value in names.items():
            found[name] = _either([found[name], value]) if name in found else value
    return found


def _renamed(node: PlanNode, made: _Relation) -> dict[str, _Value]:
    names = node.texts("outputColumnNames") or node.texts("outputNames")
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


def _grouping_sets(node: PlanNode) -> float:
    count = max(int(node.values.get("groupingSetIndexes", 0)), len(node.expressions()))
    match node.kind:
        case "Cube":
            return 2.0 ** min(count, 1000)
        case "Rollup":
            return count + 1.0
        case "GroupingSets":
            return max(1.0, float(count))
    return 1.0
