"""Why a condition is undefined for a request: the part of it that has no value. Used by `explain`."""

from __future__ import annotations

from collections.abc import Sequence

from osrdyne.ingress.conditions.compiler import reader_of
from osrdyne.ingress.conditions.parser import parse
from osrdyne.ingress.conditions.samples import Sample
from osrdyne.ingress.conditions.syntax import BodyPath, Call, Chain, Header, Literal, Node, Prefix, SystemProperty
from osrdyne.ingress.conditions.tokens import SyntaxFault
from osrdyne.ingress.conditions.values import UNDEFINED


def undefined_part(text: str, sample: Sample) -> str | None:
    """The innermost first part of a condition that is undefined for a request, in words; None if no part is, as when
    the condition reached the work limit."""
    try:
        node = parse(text)
    except SyntaxFault:
        return None
    if node is None or not _is_undefined(node, sample):
        return None
    while (cause := next((part for part in _parts(node) if _is_undefined(part, sample)), None)) is not None:
        node = cause
    return _named(node)


def _is_undefined(node: Node, sample: Sample) -> bool:
    return reader_of(node)(sample) is UNDEFINED


def _parts(node: Node) -> Sequence[Node]:
    match node:
        case Chain(first, links):
            return [first, *(link.operand for link in links)]
        case Call():
            return node.arguments
        case Prefix():
            return [node.operand]
        case _:
            return ()


def _named(node: Node) -> str:
    match node:
        case Header(name):
            return f"the header {name}"
        case SystemProperty(name):
            return f"${name}"
        case BodyPath(written):
            return written
        case Literal():
            return "the value undefined"
        case Call(name, column):
            return f"{name}(…) at column {column}"
        case Prefix(operator, column):
            return f"{operator} at column {column}"
        case Chain(_, links):
            return f"the operands of {links[0].operator} at column {links[0].column}"
