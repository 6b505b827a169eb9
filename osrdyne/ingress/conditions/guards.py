"""What a request must have for a condition to be true, where that is a plain equality: `level = 'alert' AND …`.

A table of many routes looks up by these values which conditions are worth evaluating. Pure; used by `compiler`.
"""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.ingress.conditions.syntax import BodyPath, Chain, Header, Literal, Node, SystemProperty

Property = Header | SystemProperty | BodyPath
MAX_GUARDS = 16
"""Alternatives of one condition; with more it is evaluated for every request."""


@dataclass(frozen=True, slots=True)
class Guard:
    """`property` equals `value`."""

    property: Property
    value: str | float


def guards_of(node: Node) -> tuple[Guard, ...]:
    """At least one of these holds whenever the condition is true. Empty: nothing is known."""
    if not isinstance(node, Chain):
        return ()
    operands = [node.first, *(link.operand for link in node.links)]
    match node.links[0].operator:
        case "AND":
            return min(filter(None, map(guards_of, operands)), key=len, default=())
        case "OR":
            sides = [guards_of(one) for one in operands]
            alternatives = tuple(guard for side in sides for guard in side)
            return alternatives if all(sides) and len(alternatives) <= MAX_GUARDS else ()
        case "=" if len(operands) == 2:
            return _equality(*operands)
    return ()


def _equality(left: Node, right: Node) -> tuple[Guard, ...]:
    if isinstance(left, Literal):
        left, right = right, left
    if isinstance(left, Property) and isinstance(right, Literal) and isinstance(right.value, str | float):
        return (Guard(left, right.value),)
    return ()
