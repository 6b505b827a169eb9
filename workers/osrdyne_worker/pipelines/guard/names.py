"""Qualified names of the views of a key as plain names: `default.orders` as `orders`, by the tokens of the text.

Pure; runs before both checks of a query, which see the changed text only. A temporary view has no schema, so Spark
itself would not find it by such a name. Characters are replaced by blanks: every position remains that of the caller's
text. See docs/decisions/0140-qualified-names-of-views-become-plain.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from osrdyne_worker.pipelines.guard.sql_guard import JOIN_HINTS

CATALOG = "spark_catalog"
NAMESPACE = "default"
"""The schema of the views, as Spark names it."""
INFORMATION_SCHEMA = "information_schema"
INFORMATION_VIEWS = frozenset({"tables", "columns", "schemata"})
"""The views of the information schema; `queries.information_schema` has their rows."""

_QUALIFIED = re.compile(rf"\b(?:{NAMESPACE}|{INFORMATION_SCHEMA})\b", re.IGNORECASE)
_BEGINS_QUERY = frozenset({TokenType.SELECT, TokenType.FROM, TokenType.TABLE, TokenType.VALUES})
_COMBINES_QUERIES = frozenset({TokenType.UNION, TokenType.EXCEPT, TokenType.INTERSECT})
_ENDS_FROM = frozenset(
    {
        TokenType.SELECT, TokenType.WHERE, TokenType.GROUP_BY, TokenType.HAVING, TokenType.ORDER_BY, TokenType.SORT_BY,
        TokenType.CLUSTER_BY, TokenType.DISTRIBUTE_BY, TokenType.WINDOW, TokenType.QUALIFY, TokenType.PIPE_GT,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlainText:
    """The text of a query with plain names, and the views of the information schema that it names."""

    text: str
    information: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Level:
    """What the text between two brackets has come to."""

    is_query: bool = True
    in_with: bool = False
    """Whether it defines common tables."""
    in_from: bool = False
    """Whether a comma is followed by a further table."""
    expects_table: bool = False


def plain_names(text: str, views: Collection[str]) -> PlainText:
    """Change the names of `views` (lower case) and of the information schema in place of a table, and the qualifiers of
    columns and hints that repeat them. A text without tokens, which the guard refuses, remains as it is."""
    if _QUALIFIED.search(text) is None:
        return PlainText(text)
    try:
        tokens = Spark().tokenize(text)
    except SqlglotError:
        return PlainText(text)
    # A view of the key is never hidden by one of the information schema.
    schemas = {NAMESPACE: frozenset(views), INFORMATION_SCHEMA: INFORMATION_VIEWS.difference(views)}
    tables, others, common = _qualified(text, tokens, schemas)
    changed = list(text)
    # A plain name would be that of the WITH clause, and a qualified one never is.
    used = {name for name, _ in tables if name[1] not in common}
    for name, parts in tables + others:
        for start, end in parts if name in used else ():
            changed[start:end] = " " * (end - start)
    return PlainText("".join(changed), frozenset(view for schema, view in used if schema == INFORMATION_SCHEMA))


_Schemas = Mapping[str, frozenset[str]]
_Found = list[tuple[tuple[str, str], list[tuple[int, int]]]]
"""Schema and view, and the places in the text of the tokens before the view's own name."""


def _qualified(text: str, tokens: list[Token], schemas: _Schemas) -> tuple[_Found, _Found, set[str]]:
    """The qualified names of tables, those that columns begin with, and the names that WITH clauses define."""
    tables: _Found = []
    others: _Found = []
    common: set[str] = set()
    levels = [_Level()]
    at = 0
    while at < len(tokens):
        level = levels[-1]
        names = _chain(text, tokens, at)
        if level.in_with:
            common.update(names[:1])
        if _is(tokens, at, TokenType.HINT):
            others.extend(_of_hint(text, tokens[at], schemas))
        found, follows = _found(tokens, at, names, schemas)
        if level.expects_table:
            tables.extend(found if len(names) == follows else [])
        elif _is(tokens, at + 2 * follows - 1, TokenType.DOT):
            others.extend(found)
        _enter(levels, tokens, at)
        at += max(1, 2 * len(names) - 1)
    return tables, others, common


def _found(tokens: list[Token], at: int, names: list[str], schemas: _Schemas, *, offset: int = 0) -> tuple[_Found, int]:
    """The view that the name at this place begins with, if any, and how many parts it has. `offset`: of the tokens."""
    before = 1 if names[:1] == [CATALOG] else 0
    schema, *rest = names[before : before + 2] or [""]
    if not rest or rest[0] not in schemas.get(schema, ()):
        return [], 0
    parts = [(offset + part.start, offset + part.end + 1) for part in tokens[at : at + 2 * before + 2]]
    return [((schema, rest[0]), parts)], before + 2


def _of_hint(text: str, hint: Token, schemas: _Schemas) -> _Found:
    """The tables of a hint that chooses a join, and the qualified columns of any hint. A hint is one token."""
    begin, end = hint.start + len("/*+"), hint.end + 1 - len("*/")
    content = text[begin:end]
    try:
        tokens = Spark().tokenize(content)
    except SqlglotError:
        return []
    others: _Found = []
    of_join = False
    at = 0
    while at < len(tokens):
        names = _chain(content, tokens, at)
        found, follows = _found(tokens, at, names, schemas, offset=begin)
        if _is(tokens, at + 2 * follows - 1, TokenType.DOT) or (of_join and len(names) == follows):
            others.extend(found)
        if _is(tokens, at + 1, TokenType.L_PAREN):
            of_join = tokens[at].text.lower() in JOIN_HINTS
        at += max(1, 2 * len(names) - 1)
    return others


def _enter(levels: list[_Level], tokens: list[Token], at: int) -> None:
    """Note what the token at this place begins or ends."""
    level, kind = levels[-1], tokens[at].token_type
    expected, level.expects_table = level.expects_table, False
    if kind is TokenType.L_PAREN:
        query = expected or _is(tokens, at + 1, *_BEGINS_QUERY, TokenType.WITH)
        levels.append(_Level(is_query=query, in_from=expected, expects_table=expected))
    elif kind is TokenType.R_PAREN and len(levels) > 1:
        levels.pop()
    elif kind is TokenType.COMMA:
        level.expects_table = level.in_from
    elif kind is TokenType.WITH and (at == 0 or _is(tokens, at - 1, TokenType.L_PAREN)):
        level.in_with = True
    elif kind in (TokenType.JOIN, TokenType.TABLE) or (
        # Not that of `IS DISTINCT FROM a` and `extract(year FROM a)`.
        kind is TokenType.FROM and level.is_query and not _is(tokens, at - 1, TokenType.DISTINCT)
    ):
        level.in_from = level.expects_table = True
    elif kind in _ENDS_FROM:
        level.in_from = False
    if kind in _COMBINES_QUERIES:
        level.is_query = True  # also after `((SELECT 1)`, which may be the argument of a function until here
    if kind in _BEGINS_QUERY:
        level.in_with = False


def _chain(text: str, tokens: list[Token], at: int) -> list[str]:
    """The parts, in lower case, of the name that begins at this place."""
    names: list[str] = []
    while at < len(tokens) and _is_name(text, tokens[at]):
        names.append(tokens[at].text.lower())
        if not _is(tokens, at + 1, TokenType.DOT):
            break
        at += 2
    return names


def _is_name(text: str, token: Token) -> bool:
    written = text[token.start : token.end + 1]  # a text in quotes is longer than its content
    plain = written == token.text and re.fullmatch(r"\w+", written) is not None
    return plain or token.token_type is TokenType.IDENTIFIER


def _is(tokens: list[Token], at: int, *kinds: TokenType) -> bool:
    return 0 <= at < len(tokens) and tokens[at].token_type in kinds
