"""Parse tokens into the syntax tree, by precedence climbing. The compiler checks types and meaning.

Used by `compiler` only. The depth of nesting is limited, so that no text can exhaust the stack.
"""

from __future__ import annotations

import re

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
from osrdyne.ingress.conditions.tokens import (
    MAX_INDEX_DIGITS,
    Kind,
    SyntaxFault,
    Token,
    number_of,
    string_of,
    tokenize,
)
from osrdyne.ingress.conditions.values import UNDEFINED, Value

MAX_DEPTH = 50  # Parentheses, calls and prefixes within each other.

# Operators between two operands, loosest first.
_LEVELS = (
    ("??",),
    ("OR",),
    ("AND",),
    ("=", "!=", "<>"),
    ("<", "<=", ">", ">="),
    ("+", "-", "||"),
    ("*", "/", "%"),
)
_LEVEL = {symbol: level for level, symbols in enumerate(_LEVELS) for symbol in symbols}
_LITERALS: dict[str, Value] = {"true": True, "false": False, "null": None, "undefined": UNDEFINED}
_BODY_PREFIX = "$body."
_STEP = re.compile(r"\[([0-9]+)\]|\.?(\w+)")


def parse(text: str) -> Node | None:
    """The tree of a condition; None for an empty one. Raises `SyntaxFault`."""
    parser = _Parser(tokenize(text))
    return None if parser.at_end else parser.whole()


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0

    @property
    def at_end(self) -> bool:
        return self._next.kind is Kind.END

    @property
    def _next(self) -> Token:
        return self._tokens[self._position]

    def _take(self) -> Token:
        token = self._next
        self._position += 1
        return token

    def _take_operator(self, symbol: str) -> bool:
        found = self._next.kind is Kind.OPERATOR and self._next.text == symbol
        self._position += found
        return found

    def whole(self) -> Node:
        node = self._expression(0)
        if not self.at_end:
            raise self._unexpected()
        return node

    def _expression(self, level: int) -> Node:
        """An expression of operators that bind at least as tightly as those of `level`."""
        first = self._operand()
        for bound in range(len(_LEVELS) - 1, level - 1, -1):
            links = []
            while self._next.kind is Kind.OPERATOR and _LEVEL.get(self._next.text) == bound:
                operator = self._take()
                links.append(Link(operator.text, operator.column, self._expression(bound + 1)))
            if links:
                first = Chain(first, tuple(links))
        return first

    def _operand(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise SyntaxFault(f"nested more than {MAX_DEPTH} deep", self._next.column)
        node = self._prefixed() if self._next.text in {"-", "NOT"} else self._primary()
        self._depth -= 1
        return node

    def _prefixed(self) -> Node:
        operator = self._take()
        return Prefix(operator.text, operator.column, self._operand())

    def _primary(self) -> Node:
        token = self._next
        match token.kind:
            case Kind.NUMBER:
                return Literal(number_of(self._take().text))
            case Kind.STRING:
                return Literal(string_of(self._take().text))
            case Kind.NAME:
                return self._named()
            case Kind.SYSTEM:
                return _system(self._take(), forced=False)
            case Kind.HEADER:
                return Header(self._take().text[1:-1].strip())
            case _ if self._take_operator("("):
                return self._nested(token)
            case _ if self._take_operator("{"):
                return self._braced()
        raise self._unexpected()

    def _named(self) -> Node:
        name = self._take()
        if name.text in _LITERALS:
            return Literal(_LITERALS[name.text])
        if self._take_operator("("):
            return Call(name.text, name.column, self._arguments())
        return Header(name.text)

    def _arguments(self) -> tuple[Node, ...]:
        if self._take_operator(")"):
            return ()
        arguments = [self._expression(0)]
        while self._take_operator(","):
            arguments.append(self._expression(0))
        if not self._take_operator(")"):
            if self.at_end:
                raise SyntaxFault("missing closing ')'", self._next.column)
            raise self._unexpected()
        return tuple(arguments)

    def _nested(self, opening: Token) -> Node:
        node = self._expression(0)
        if not self._take_operator(")"):
            if self.at_end:
                raise SyntaxFault("missing closing ')'", opening.column)
            raise self._unexpected()
        return node

    def _braced(self) -> Node:
        name = self._take()
        if name.kind is not Kind.SYSTEM:
            raise SyntaxFault("braces take a header or a system property, such as {x-device-id} or {$key}", name.column)
        if not self._take_operator("}"):
            raise SyntaxFault("missing closing '}'", self._next.column)
        return _system(name, forced=True)

    def _unexpected(self) -> SyntaxFault:
        token = self._next
        if token.kind is Kind.END:
            return SyntaxFault("unexpected end", token.column)
        if token.text == ")":
            return SyntaxFault("unmatched closing ')'", token.column)
        return SyntaxFault(f"unexpected {token.text!r}", token.column)


def _system(token: Token, *, forced: bool) -> Node:
    if token.text.lower().startswith(_BODY_PREFIX):
        rest = token.text[len(_BODY_PREFIX) :]
        steps: list[str | int] = []
        for step in _STEP.finditer(rest):
            index, name = step.groups()
            if index and len(index) > MAX_INDEX_DIGITS:
                column = token.column + len(_BODY_PREFIX) + step.start(1)
                raise SyntaxFault(f"an index has at most {MAX_INDEX_DIGITS} digits", column)
            steps.append(int(index) if index else name)
        return BodyPath(token.text, tuple(steps), forced)
    bracket = token.text.find("[")
    if bracket >= 0:
        raise SyntaxFault(
            "an index is only allowed in a path of the body, such as $body.items[0]", token.column + bracket
        )
    return SystemProperty(token.text[1:], forced)
