"""The first check of a query: parse it with sqlglot, and refuse it unless it is one SELECT over the views of the key.

Pure and quick; runs before Spark receives the text, and gives good error messages, with positions. It is not trusted
alone: two parsers can read one text differently, so `plan_guard` checks the plan of Spark's own parser. A text that
sqlglot cannot parse raises `QueryNotReadError`: then the plan decides. Both checks see the same text; `names` alone
changes it, before them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from osrdyne_worker.pipelines.guard.functions import ALLOWED_FUNCTIONS, DENIED_FUNCTIONS, TABLE_FUNCTIONS
from osrdyne_worker.pipelines.guard.refusals import QueryNotReadError, QueryRefusedError

JOIN_HINTS = frozenset(
    {
        "broadcast",
        "broadcastjoin",
        "mapjoin",
        "merge",
        "mergejoin",
        "shuffle_hash",
        "shuffle_merge",
        "shuffle_replicate_nl",
    }
)
"""Hints that select a join strategy."""
PARTITION_HINTS = frozenset({"coalesce", "rebalance", "repartition", "repartition_by_range"})
"""Hints that divide rows into partitions; `limits` bounds their number (`max_partitions`)."""
ALLOWED_HINTS = JOIN_HINTS | PARTITION_HINTS

_FIRST_TOKENS = frozenset({TokenType.SELECT, TokenType.WITH, TokenType.VALUES, TokenType.L_PAREN})
_SPARK_ONLY_FIRST_TOKENS = frozenset({TokenType.FROM, TokenType.TABLE})
"""`FROM t SELECT a` and `TABLE t` are queries in Spark; sqlglot parses them differently, and pipes (`|>`) too."""
_OPENING = frozenset({TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE, TokenType.CASE})
_CLOSING = frozenset({TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE, TokenType.END})

_NESTED_TYPES = frozenset({"array", "map", "struct"})

_TEXTS = frozenset({TokenType.STRING, TokenType.RAW_STRING, TokenType.IDENTIFIER})

# In Spark, a backslash continues a comment on the next line, and a carriage return ends it; in sqlglot neither does.
_COMMENT_READ_TWO_WAYS = re.compile(r"--[^\r\n]*(?:\\\r?\n|\r(?!\n))")

_FORBIDDEN: tuple[tuple[type[exp.Expr], str], ...] = (
    (exp.QueryTransform, "TRANSFORM ... USING runs a program"),
    (exp.Command, "this statement is not a SELECT"),
    (exp.DML, "a query may not write"),
    (exp.DDL, "a query may not create, change or drop anything"),
    (exp.Into, "INTO would write a table"),
    (exp.Lock, "a query may not lock anything"),
    (exp.Version, "a view has one version; leave out VERSION or TIMESTAMP AS OF"),
    (exp.Parameter, "variables are not available; write the value, or :name and its value in `parameters`"),
    (exp.SessionParameter, "variables are not available; write the value, or :name and its value in `parameters`"),
)


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The maximum size of a query: protects the worker from texts that exhaust a parser."""

    length: int = 100_000
    nesting: int = 30


def check_query(
    text: str,
    *,
    views: Collection[str],
    limits: TextLimits | None = None,
    parameters: Collection[object] = (),
) -> None:
    """Raise `QueryRefusedError` unless `text` is one query over `views` (lower case).

    `parameters` has the values of its parameters by name, or by position.
    """
    limits = limits or TextLimits()
    # Before the length and the parser: what one parser takes for a comment the other would run.
    if _COMMENT_READ_TWO_WAYS.search(text):
        raise QueryRefusedError(
            "The query is refused: a line with a comment may not end in a backslash or a lone carriage return.",
            error_code="syntax_not_allowed",
        )
    if len(text) > limits.length:
        raise _too_complex(f"The query has {len(text)} characters; the limit is {limits.length}.")
    try:
        root = _parse_one(text, limits)
        # Every node, also those of subqueries: each may read a table or call a function.
        for node in root.walk():
            _check_node(node, views)
        _check_parameters(list(root.find_all(exp.Placeholder)), parameters)
    except RecursionError:
        raise _too_complex("The query is nested too deeply; split it with WITH.") from None


def _parse_one(text: str, limits: TextLimits) -> exp.Expr:
    """Parse `text`, which must be one statement."""
    dialect = Spark()
    try:
        tokens = dialect.tokenize(text)
    except SqlglotError:
        if _brackets(text) > limits.nesting:
            raise _too_complex("The query is nested too deeply; split it with WITH.") from None
        raise QueryNotReadError(
            "The query cannot be read: a quote or a comment is not closed.", error_code="syntax_error", code=400
        ) from None
    # Before the parser, which recurses: a text that is nested too deeply would exhaust its stack.
    _check_tokens(tokens, limits)
    try:
        parsed = dialect.parser().parse(tokens, text)
    except ParseError as error:
        raise _syntax_error(error) from None
    except SqlglotError:
        raise QueryNotReadError("The query cannot be read.", error_code="syntax_error", code=400) from None
    # A comment after a semicolon is a statement of sqlglot; Spark skips it.
    statements = [one for one in parsed if one is not None and not isinstance(one, exp.Semicolon)]
    if len(statements) != 1:
        raise _statement("Send one statement per request.")
    root = statements[0]
    if not isinstance(root, exp.Query | exp.Values):
        raise _statement("Only SELECT, WITH ... SELECT, VALUES and their unions are allowed.")
    return root


def _check_tokens(tokens: list[Token], limits: TextLimits) -> None:
    """Refuse by its tokens a text that should not reach the parser."""
    if not tokens:
        raise QueryRefusedError("The query is empty.", error_code="syntax_error", code=400)
    if tokens[0].token_type not in _FIRST_TOKENS | _SPARK_ONLY_FIRST_TOKENS:
        raise _statement(
            f"Only SELECT, WITH ... SELECT, VALUES and their unions are allowed, not {tokens[0].text[:30]!r}.",
            tokens[0],
        )
    depth = types = 0
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.text.lower() in _NESTED_TYPES and following and following.token_type is TokenType.LT:
            types += 1  # Spark's parser needs minutes for thousands of types within each other
            if types > limits.nesting:
                raise _too_complex(f"The query has types nested more than {limits.nesting} deep.", token)
        elif types and token.token_type not in _TEXTS and not token.text.strip(">"):
            types = max(0, types - len(token.text))
        elif token.token_type in _OPENING:
            depth += 1
            if depth > limits.nesting:
                raise _too_complex(f"The query is nested more than {limits.nesting} deep; split it with WITH.", token)
        elif token.token_type in _CLOSING:
            depth -= 1
        elif token.token_type not in _TEXTS and (token.text == "$" or token.text.startswith("${")):
            raise _syntax("${...} is not supported; write the value", token)
        elif token.token_type is TokenType.SEMICOLON and following and following.token_type is not TokenType.SEMICOLON:
            raise _statement("Send one statement per request.", following)
    if tokens[0].token_type in _SPARK_ONLY_FIRST_TOKENS:
        raise QueryNotReadError(
            f"Only SELECT, WITH ... SELECT, VALUES and their unions are allowed, not {tokens[0].text[:30]!r}.",
            error_code="statement_not_allowed",
            position=_position(tokens[0]),
        )
    pipe = next((token for token in tokens if token.token_type is TokenType.PIPE_GT), None)
    if pipe is not None:
        raise QueryNotReadError(
            "The query is refused: without its plan, the pipe operator |> cannot be checked.",
            error_code="syntax_not_allowed",
            position=_position(pipe),
        )


def _brackets(text: str) -> int:
    """The maximum nesting of brackets in a text that has no tokens."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _check_node(node: exp.Expr, views: Collection[str]) -> None:
    for kind, reason in _FORBIDDEN:
        if isinstance(node, kind):
            raise _syntax(reason, node)
    if isinstance(node, exp.CTE) and not isinstance(node.this, exp.Query | exp.Values):
        raise _statement("A WITH clause may hold queries only.", node)
    if isinstance(node, exp.Table):
        _check_table(node, views)
    elif isinstance(node, exp.Lateral):
        _check_lateral(node)
    elif isinstance(node, exp.Hint):
        _check_hint(node)
    elif isinstance(node, exp.Func) and not isinstance(node.parent, exp.Hint):
        _check_function(node)
    elif isinstance(node, exp.Dot) and isinstance(node.expression, exp.Func):
        raise _function("Functions have plain names here, without catalog and schema.", node)


def _check_parameters(places: list[exp.Placeholder], parameters: Collection[object]) -> None:
    """Refuse a parameter without a value. Spark would as well; this message has the name."""
    unnamed = [place for place in places if not place.this]
    for place in places:
        if place.this and not (isinstance(parameters, Mapping) and place.name in parameters):
            raise _no_value(f"the parameter :{place.name[:60]}, which has no value in `parameters`", place)
    if unnamed and (isinstance(parameters, Mapping) or len(unnamed) != len(parameters)):
        given = "names" if isinstance(parameters, Mapping) else str(len(parameters))
        raise _no_value(f"{len(unnamed)} parameters `?`; `parameters` must be a list of as many values, not {given}")


def _no_value(what: str, place: exp.Expr | None = None) -> QueryRefusedError:
    return QueryRefusedError(
        f"The query has {what}.", error_code="missing_parameter", code=400, position=_position(place)
    )


def _check_table(table: exp.Table, views: Collection[str]) -> None:
    if isinstance(table.parent, exp.JoinHint):
        return
    if isinstance(table.this, exp.Func):
        _check_table_function(table.this, table)
        return
    if not isinstance(table.this, exp.Identifier) or table.args.get("db") or table.args.get("catalog"):
        raise QueryRefusedError(
            f"{_shown(table)} is not a view of this key: names of tables have no catalog, schema, format or path here, "
            "except spark_catalog.default and information_schema before a view that they have.",
            error_code="table_not_allowed",
            position=_position(table),
        )
    name = table.name.lower()
    if name not in views and name not in _common_tables(table):
        raise QueryRefusedError(
            f"There is no view {_shown(table)}; this key has {', '.join(sorted(views)) or 'none'}.",
            error_code="unknown_table",
            code=400,
            position=_position(table),
        )


def _common_tables(node: exp.Expr) -> Iterator[str]:
    """The names of WITH clauses that are visible at `node`.

    In a definition, the earlier names of its clause are visible, and its own name only with RECURSIVE.
    """
    inside, ancestor = node, node.parent
    while ancestor is not None:
        if isinstance(ancestor, exp.With):
            for common in ancestor.expressions:
                if common is not inside or ancestor.args.get("recursive"):
                    yield common.alias.lower()
                if common is inside:
                    break
        elif not isinstance(inside, exp.With) and isinstance(with_ := ancestor.args.get("with_"), exp.With):
            for common in with_.expressions:
                yield common.alias.lower()
        inside, ancestor = ancestor, ancestor.parent


def _check_table_function(function: exp.Func, node: exp.Expr) -> None:
    names = _function_names(function)
    if names.isdisjoint(TABLE_FUNCTIONS):
        raise _function(
            f"{_shown(function)} may not stand for a table; allowed are {', '.join(sorted(TABLE_FUNCTIONS))}.", node
        )


def _check_lateral(lateral: exp.Lateral) -> None:
    if isinstance(lateral.this, exp.Func):
        _check_table_function(lateral.this, lateral)


def _check_hint(hint: exp.Hint) -> None:
    for item in hint.expressions:
        names = _function_names(item) if isinstance(item, exp.Func) else {item.name.lower()}
        if names.isdisjoint(ALLOWED_HINTS):
            shown = min(names)[:30] or item.sql()[:30]
            raise _syntax(
                f"the hint {shown!r} is not allowed; allowed are hints that choose a join or divide into partitions",
                hint,
            )


def _check_function(function: exp.Func) -> None:
    names = _function_names(function)
    for name in sorted(names & DENIED_FUNCTIONS.keys()):
        raise _function(f"The function {name} is not allowed: {DENIED_FUNCTIONS[name]}.", function)
    if isinstance(function, exp.Anonymous) and names.isdisjoint(ALLOWED_FUNCTIONS | TABLE_FUNCTIONS):
        raise _function(f"The function {_shown(function)} is not known or not allowed.", function)


def _function_names(function: exp.Func) -> set[str]:
    """The possible names of the function in the text, in lower case.

    sqlglot has a class for each function that it knows, and drops the name; unknown functions are `Anonymous`.
    """
    if isinstance(function, exp.Anonymous):
        return {function.name.lower()}
    return {name.lower() for name in type(function).sql_names()}


def _shown(node: exp.Expr) -> str:
    """A short part of the query for a message."""
    text = node.name if isinstance(node, exp.Anonymous) else node.sql(dialect="spark")
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _position(place: exp.Expr | Token | None) -> tuple[int, int] | None:
    """Line and column of a token, or of the first node below `place` that has a position."""
    if isinstance(place, Token):
        return _token_start(place.line, place.col, len(place.text))
    for node in place.walk() if place is not None else ():
        if "line" in node.meta and "col" in node.meta:
            return _token_start(node.meta["line"], node.meta["col"], node.meta["end"] - node.meta["start"] + 1)
    return None


def _token_start(line: int, last_column: int, width: int) -> tuple[int, int]:
    """sqlglot gives the column of a token's last character."""
    return line, max(1, last_column - width + 1)


def _syntax_error(error: ParseError) -> QueryNotReadError:
    first = error.errors[0] if error.errors else {}
    description = str(first.get("description") or "it is not valid SQL").rstrip(".")
    if "<class" in description:  # a message about sqlglot's own classes
        description = "a function has too few or too many arguments, or a clause is incomplete"
    return QueryNotReadError(
        f"The query cannot be read: {description}.",
        error_code="syntax_error",
        code=400,
        position=_token_start(first["line"], first["col"], 1) if "line" in first else None,
    )


def _statement(message: str, place: exp.Expr | Token | None = None) -> QueryRefusedError:
    return QueryRefusedError(message, error_code="statement_not_allowed", position=_position(place))


def _syntax(reason: str, place: exp.Expr | Token) -> QueryRefusedError:
    return QueryRefusedError(
        f"The query is refused: {reason}.", error_code="syntax_not_allowed", position=_position(place)
    )


def _function(message: str, place: exp.Expr) -> QueryRefusedError:
    return QueryRefusedError(message, error_code="function_not_allowed", position=_position(place))


def _too_complex(message: str, place: Token | None = None) -> QueryRefusedError:
    return QueryRefusedError(message, error_code="query_too_complex", code=400, position=_position(place))
