"""Compile the text of a condition into a function of a request: check the types, then build closures.

All type errors are collected. Used by the route manifest and `osrdyne routes eval`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from osrdyne.ingress.conditions.functions import FUNCTIONS
from osrdyne.ingress.conditions.guards import Clause, clauses_of
from osrdyne.ingress.conditions.operators import (
    ARITHMETIC,
    Apply,
    Evaluate,
    all_of,
    any_of,
    arithmetic,
    comparison,
    concatenation,
    first_defined,
    folded,
    minus,
    negate,
)
from osrdyne.ingress.conditions.parser import parse
from osrdyne.ingress.conditions.samples import Sample, WorkLimitExceededError
from osrdyne.ingress.conditions.syntax import (
    BodyPath,
    Call,
    Chain,
    Header,
    Link,
    Literal,
    Node,
    Prefix,
    SystemProperty,
)
from osrdyne.ingress.conditions.tokens import SyntaxFault
from osrdyne.ingress.conditions.values import COMPARISONS, UNDEFINED, Undefined, Value, ValueType
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem

_NUMBER, _STRING, _BOOL = ValueType.NUMBER, ValueType.STRING, ValueType.BOOL
_NULL, _UNDEFINED, _ANY = ValueType.NULL, ValueType.UNDEFINED, ValueType.ANY
_LOGICAL = frozenset({_BOOL, _NULL, _UNDEFINED, _ANY})


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition. `text`: as written. `clauses`: each of them holds whenever the condition is true."""

    text: str
    _evaluate: Evaluate = field(repr=False)
    clauses: tuple[Clause, ...] = ()

    def evaluate(self, sample: Sample) -> bool | Undefined:
        """Evaluate for a request. Never raises. Beyond the work limits of the sample the result is undefined."""
        result = _limited(self._evaluate, sample)
        if result is None:
            return False
        return result if isinstance(result, bool) else UNDEFINED


def compile_condition(text: str) -> Condition:
    """Raises `InvalidDocumentError` with every error and its column."""
    try:
        tree = parse(text)
    except SyntaxFault as fault:
        raise InvalidDocumentError([Problem(fault.message, fault.column)]) from None
    if tree is None:
        return Condition(text, lambda _: UNDEFINED)
    compiler = _Compiler(SharedParts(tree))
    typed = compiler.compile(tree)
    if compiler.problems:
        raise InvalidDocumentError(compiler.problems)
    return Condition(text, typed.evaluate, clauses_of(tree))


def reader_of(node: Node) -> Evaluate:
    """Compile a part of a condition whose types were checked before."""
    evaluate = _Compiler(SharedParts(node)).compile(node).evaluate
    return lambda sample: _limited(evaluate, sample)


def _limited(evaluate: Evaluate, sample: Sample) -> Value:
    sample.begin_condition()
    try:
        return evaluate(sample)
    except WorkLimitExceededError:
        sample.exceeded += 1
        return UNDEFINED


@dataclass(frozen=True, slots=True)
class _Typed:
    """A compiled part of a condition, with the type of its value as far as it is known."""

    type: ValueType
    evaluate: Evaluate


# Replaces a part with an error. Its type fits every operator, so that one mistake is reported once.
_BROKEN = _Typed(ValueType.ANY, lambda _: UNDEFINED)


class _Compiler:
    """Visits the tree once, operands before their operator."""

    def __init__(self, shared: SharedParts) -> None:
        self.problems: list[Problem] = []
        self._shared = shared

    def compile(self, node: Node) -> _Typed:
        typed = self._compiled(node)
        place = self._shared.place_of(node)
        return typed if place is None else _Typed(typed.type, _once(place, typed.evaluate))

    def _compiled(self, node: Node) -> _Typed:
        match node:
            case Literal(value):
                return _Typed(_type_of(node), lambda _: value)
            case Header(name):
                lowered = name.lower()
                return _Typed(_STRING, lambda sample: sample.read(sample.header(lowered)))
            case SystemProperty():
                return _system_property(node)
            case BodyPath():
                return _body_path(node)
            case Call():
                return self._call(node)
            case Prefix():
                return self._prefix(node)
            case Chain():
                return self._chain(node)

    def _refuse(self, column: int, message: str) -> _Typed:
        self.problems.append(Problem(message, column))
        return _BROKEN

    def _call(self, call: Call) -> _Typed:
        name = call.name.lower()
        function = FUNCTIONS.get(name)
        if function is None and name != "concat":
            self._refuse(call.column, f"unknown function '{call.name}'")
        arguments = [self.compile(argument) for argument in call.arguments]
        types = [argument.type for argument in arguments]
        evaluates = [argument.evaluate for argument in arguments]
        if name == "concat" and len(arguments) >= 2 and all(type_ in {_STRING, _ANY} for type_ in types):
            return _concatenated(arguments)
        if function is not None and function.accepts(types):
            return _Typed(function.gives, function.bound(evaluates))
        if function is not None or name == "concat":
            shown = ", ".join(types)
            return self._refuse(call.column, f"invalid arguments to function '{call.name}': {call.name}({shown})")
        return _BROKEN

    def _prefix(self, prefix: Prefix) -> _Typed:
        operand = self.compile(prefix.operand)
        evaluate = operand.evaluate
        if prefix.operator == "NOT":
            if operand.type not in _LOGICAL:
                return self._refuse(prefix.column, f"NOT takes a bool, not a {operand.type}")
            return _Typed(_BOOL, lambda sample: negate(evaluate(sample)))
        if operand.type not in {_NUMBER, _ANY, _UNDEFINED}:
            return self._refuse(prefix.column, f"'-' takes a number, not a {operand.type}")
        return _Typed(_NUMBER, lambda sample: minus(evaluate(sample)))

    def _chain(self, chain: Chain) -> _Typed:
        first = self.compile(chain.first)
        operands = [self.compile(link.operand) for link in chain.links]
        match chain.links[0].operator:
            case "AND" | "OR" as operator:
                return self._logic(operator, first, operands, chain.links)
            case "??":
                return self._coalescence(first, operands, chain.links)
            case operator if operator in COMPARISONS:
                return self._comparisons(first, operands, chain.links)
            case _:
                return self._arithmetic(first, operands, chain.links)

    def _logic(self, operator: str, first: _Typed, operands: list[_Typed], links: Sequence[Link]) -> _Typed:
        left = first.type
        for operand, link in zip(operands, links, strict=True):
            if left not in _LOGICAL or operand.type not in _LOGICAL:
                self._refuse(link.column, f"{operator} takes bools, not {left} and {operand.type}")
                left = _BOOL
            nulls = (left is _NULL) + (operand.type is _NULL)
            left = _NULL if nulls == 2 or (nulls and operator == "AND") else _BOOL
        if left is _NULL:
            return _Typed(_NULL, lambda _: None)
        combine = all_of if operator == "AND" else any_of
        return _Typed(_BOOL, combine([first.evaluate, *(operand.evaluate for operand in operands)]))

    def _coalescence(self, first: _Typed, operands: list[_Typed], links: Sequence[Link]) -> _Typed:
        left = first.type
        for operand, link in zip(operands, links, strict=True):
            if left is _UNDEFINED or left is operand.type:
                left = operand.type
            elif _ANY in {left, operand.type}:
                left = _ANY
            elif operand.type is not _UNDEFINED:
                self._refuse(link.column, f"'??' takes two values of one type, not {left} and {operand.type}")
                left = _ANY
        return _Typed(left, first_defined([first.evaluate, *(operand.evaluate for operand in operands)]))

    def _comparisons(self, first: _Typed, operands: list[_Typed], links: Sequence[Link]) -> _Typed:
        left = first.type
        steps: list[tuple[Apply, Evaluate]] = []
        for operand, link in zip(operands, links, strict=True):
            if left is not operand.type and not {left, operand.type} & {_ANY, _NULL, _UNDEFINED}:
                self._refuse(
                    link.column,
                    f"'{link.operator}' cannot compare {left} and {operand.type}{_hint(left, operand.type)}",
                )
            steps.append((comparison(link.operator, left, operand.type), operand.evaluate))
            left = _BOOL
        return _Typed(_BOOL, folded(first.evaluate, steps))

    def _arithmetic(self, first: _Typed, operands: list[_Typed], links: Sequence[Link]) -> _Typed:
        left = first.type
        steps: list[tuple[Apply, Evaluate]] = []
        for operand, link in zip(operands, links, strict=True):
            takes = _STRING if link.operator == "||" else _NUMBER
            if not {left, operand.type} <= {takes, _ANY}:
                wrong = f"'{link.operator}' takes {takes}s, not {left} and {operand.type}"
                self._refuse(link.column, wrong + (_hint(left, operand.type) if takes is _NUMBER else ""))
            elif takes is _NUMBER:
                steps.append((arithmetic(ARITHMETIC[link.operator]), operand.evaluate))
            left = takes
        if links[0].operator == "||":
            return _concatenated([first, *operands])
        return _Typed(_NUMBER, folded(first.evaluate, steps))


def _once(place: int, evaluate: Evaluate) -> Evaluate:
    """Evaluate a part that occurs more than once in a condition only once for a request."""

    def shared(sample: Sample) -> Value:
        known = sample.shared
        if place not in known:
            known[place] = evaluate(sample)
        return known[place]

    return shared


def _type_of(literal: Literal) -> ValueType:
    match literal.value:
        case None:
            return _NULL
        case bool():
            return _BOOL
        case str():
            return _STRING
        case float():
            return _NUMBER
        case Undefined():
            return _UNDEFINED


def _system_property(node: SystemProperty) -> _Typed:
    name, header = node.name.lower(), f"${node.name.lower()}"
    if node.forced:
        return _Typed(_STRING, lambda sample: sample.read(sample.system_property(name)))

    def evaluate(sample: Sample) -> Value:
        own = sample.header(header)
        return sample.read(sample.system_property(name) if own is UNDEFINED else own)

    return _Typed(_STRING, evaluate)


def _body_path(node: BodyPath) -> _Typed:
    steps, header = node.steps, node.written.lower()
    if node.forced:
        return _Typed(_ANY, lambda sample: sample.read(sample.at(steps)))

    def evaluate(sample: Sample) -> Value:
        own = sample.header(header)
        return sample.read(sample.at(steps) if own is UNDEFINED else own)

    return _Typed(_ANY, evaluate)


def _concatenated(operands: Sequence[_Typed]) -> _Typed:
    """A property that is null counts as an empty string; any other null makes the result undefined."""
    parts = [(operand.evaluate, operand.type is _STRING) for operand in operands]
    return _Typed(_STRING, concatenation(parts))


def _hint(left: ValueType, right: ValueType) -> str:
    return ": convert with as_number()" if {left, right} == {_STRING, _NUMBER} else ""


Meaning = tuple[object, ...]


class SharedParts:
    """The calls and chains that occur more than once in a tree: each is evaluated once for a request.

    Two parts are equal if they mean the same: columns and the case of names are ignored.
    """

    def __init__(self, tree: Node) -> None:
        self._numbers: dict[Meaning, int] = {}
        # Number of each node by its identity; the tree outlives the compilation.
        self._number_of: dict[int, int] = {}
        self._tree = tree
        self._visit(tree)
        self._times = Counter(self._number_of.values())

    def place_of(self, node: Node) -> int | None:
        """The number under which the value of a repeated part is kept; None for any other part."""
        if not isinstance(node, Call | Chain):
            return None
        number = self._number_of.get(id(node))
        return number if number is not None and self._times[number] > 1 else None

    def _visit(self, node: Node) -> int:
        """Give equal parts equal numbers, operands first, in time linear in the size of the tree."""
        number = self._numbers.setdefault(self._meaning(node), len(self._numbers))
        self._number_of[id(node)] = number
        return number

    def _meaning(self, node: Node) -> Meaning:
        match node:
            case Literal(value):
                return "literal", type(value), value
            case Header(name):
                return "header", name.lower()
            case SystemProperty(name, forced):
                return "system", name.lower(), forced
            case BodyPath(written, steps, forced):
                return "body", written.lower(), steps, forced
            case Call(name, _, arguments):
                return "call", name.lower(), *map(self._visit, arguments)
            case Prefix(operator, _, operand):
                return "prefix", operator, self._visit(operand)
            case Chain(first, links):
                parts = [(link.operator, self._visit(link.operand)) for link in links]
                return "chain", self._visit(first), *parts
