"""Find the parts of a condition that occur more than once, so that each is evaluated once for a request.

Two parts are the same if they mean the same: the case of names and the columns do not count. Used by `compiler`.
"""

from __future__ import annotations

from collections import Counter

from osrdyne.ingress.conditions.syntax import BodyPath, Call, Chain, Header, Literal, Node, Prefix, SystemProperty

Meaning = tuple[object, ...]


class SharedParts:
    """The calls and chains of operators in a tree that occur more than once."""

    def __init__(self, tree: Node) -> None:
        self._numbers: dict[Meaning, int] = {}
        self._number_of: dict[int, int] = {}
        """Number of each node by its identity; the tree outlives the compilation."""
        self._tree = tree
        self._visit(tree)
        self._times = Counter(self._number_of.values())

    def place_of(self, node: Node) -> int | None:
        """A number for a part that is worth keeping, None for any other."""
        if not isinstance(node, Call | Chain):
            return None
        number = self._number_of.get(id(node))
        return number if number is not None and self._times[number] > 1 else None

    def _visit(self, node: Node) -> int:
        """Give equal parts equal numbers, operands before what contains them: linear in the size of the tree."""
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
