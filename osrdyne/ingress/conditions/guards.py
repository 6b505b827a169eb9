"""Requirements of a condition that follow from its comparisons with literals: `level = 'alert'`, `name < 'm'`,
`as_number(level) > 3`, `$body.celsius <= 50`, `starts_with(name, 'x')`.

The index of a route table uses them to skip conditions that cannot be true for a request. Pure; used by `compiler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from osrdyne.ingress.conditions.syntax import BodyPath, Call, Chain, Header, Literal, Node, Prefix, SystemProperty

Property = Header | SystemProperty | BodyPath
MAX_GUARDS = 16  # Alternatives of one clause; a clause with more is not used.
MAX_CLAUSES = 4  # Clauses of one condition that are used, the most selective first.


class Relation(Enum):
    """How the subject of a guard relates to its value. The lower the number, the more selective the guard."""

    EQUALS = 0
    STARTS_WITH = 1
    AT_LEAST = 2
    AT_MOST = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """A property, or the result of `as_number` for it."""

    property: Property
    as_number: bool = False


@dataclass(frozen=True, slots=True)
class Guard:
    """The subject has the type of the value and this relation to it. `>` counts as at least: a guard may be true for a
    request that the condition excludes, never the reverse."""

    subject: Subject
    relation: Relation
    value: str | float


Clause = tuple[Guard, ...]  # At least one of these guards holds.

_RELATIONS = {
    "=": Relation.EQUALS,
    ">": Relation.AT_LEAST,
    ">=": Relation.AT_LEAST,
    "<": Relation.AT_MOST,
    "<=": Relation.AT_MOST,
}
_MIRRORED = {"=": "=", ">": "<", ">=": "<=", "<": ">", "<=": ">="}


def clauses_of(node: Node) -> tuple[Clause, ...]:
    """Clauses that all hold whenever the condition is true. Empty: none can be derived."""
    match node:
        case Call(name=name, arguments=(subject, Literal(str(value)))) if name.lower() == "starts_with":
            return _guarded(subject, Relation.STARTS_WITH, value)
        case Chain(first, links):
            operands = [first, *(link.operand for link in links)]
            match links[0].operator:
                case "AND":
                    found = [clause for operand in operands for clause in clauses_of(operand)]
                    return tuple(sorted(found, key=_selectivity)[:MAX_CLAUSES])
                case "OR":
                    return _one_of([clauses_of(operand) for operand in operands])
                case operator if operator in _RELATIONS and len(operands) == 2:
                    return _comparison(operator, *operands)
    return ()


def _one_of(sides: list[tuple[Clause, ...]]) -> tuple[Clause, ...]:
    if not all(sides):
        # A side without a clause may be true for any request, so the whole OR may be.
        return ()
    together = tuple(guard for side in sides for guard in min(side, key=_selectivity))
    return (together,) if len(together) <= MAX_GUARDS else ()


def _selectivity(clause: Clause) -> tuple[int, int]:
    """For sorting: a lower value is more selective."""
    return max(guard.relation.value for guard in clause), len(clause)


def _comparison(operator: str, left: Node, right: Node) -> tuple[Clause, ...]:
    value = _value(right)
    if value is None:
        left, value, operator = right, _value(left), _MIRRORED[operator]
    return () if value is None else _guarded(left, _RELATIONS[operator], value)


def _guarded(subject: Node, relation: Relation, value: str | float) -> tuple[Clause, ...]:
    match subject:
        case Header() | SystemProperty() | BodyPath():
            return ((Guard(Subject(_folded(subject)), relation, value),),)
        case Call(name=name, arguments=((Header() | SystemProperty() | BodyPath()) as property_,)) if (
            name.lower() == "as_number"
        ):
            return ((Guard(Subject(_folded(property_), as_number=True), relation, value),),)
    return ()


def _folded(property_: Property) -> Property:
    """The property with the name of a header in lower case, by which the index finds headers."""
    return Header(property_.name.lower()) if isinstance(property_, Header) else property_


def _value(node: Node) -> str | float | None:
    """The value of a string or number literal; None for any other node."""
    match node:
        case Literal(str() | float() as value):
            return value
        case Prefix("-", _, Literal(float(value))):
            return -value
    return None
