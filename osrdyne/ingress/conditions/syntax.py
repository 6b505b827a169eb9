"""The syntax tree of a condition. Built by `parser`, compiled by `compiler`.

Operators of one precedence form one flat `Chain`: a thousand ANDs are one level deep. Only nesting adds depth, and
nesting is limited.
"""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.ingress.conditions.values import Value


@dataclass(frozen=True, slots=True)
class Literal:
    """A value as written."""

    value: Value


@dataclass(frozen=True, slots=True)
class Header:
    """A bare name."""

    name: str


@dataclass(frozen=True, slots=True)
class SystemProperty:
    """`$name`, or `{$name}` if `forced`: then a header of that name is ignored. `name` is without the `$`."""

    name: str
    forced: bool


@dataclass(frozen=True, slots=True)
class BodyPath:
    """`$body.a[2].c` or `{$body.a[2].c}`: the steps are names of members and indices; `written` is the whole text."""

    written: str
    steps: tuple[str | int, ...]
    forced: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments; the name as written."""

    name: str
    column: int
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """`-` or `NOT`."""

    operator: str
    column: int
    operand: Node


@dataclass(frozen=True, slots=True)
class Link:
    """One operator of a chain and the operand to its right."""

    operator: str
    column: int
    operand: Node


@dataclass(frozen=True, slots=True)
class Chain:
    """Operands joined from left to right by operators of one precedence."""

    first: Node
    links: tuple[Link, ...]


Node = Literal | Header | SystemProperty | BodyPath | Call | Prefix | Chain
