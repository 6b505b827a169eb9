"""Queries that pass the SQL guard and are made to exhaust a worker: time, memory of the JVM, memory of Python.

The view of the key is `region` (five rows). Used by `test_query_bombs` and `bombs_table`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bomb:
    """One query. `setting`: the limit that refuses it before Spark evaluates anything; None: it passes the limits."""

    name: str
    query: str
    setting: str | None = None


def _doubling(count: int, body: str, first: str) -> str:
    """`c0` is `first`; each further common table is `body` over the one before."""
    steps = [f"c0 as ({first})"] + [f"c{n} as ({body.replace('@', f'c{n - 1}')})" for n in range(1, count + 1)]
    return f"with {', '.join(steps)} select count(*) as n from c{count}"


def _columns(count: int) -> str:
    return ", ".join(f"{n} as c{n}" for n in range(count))


def _cube(count: int, form: str) -> str:
    names = ", ".join(f"c{n}" for n in range(count))
    return f"select count(*) from (select {_columns(count)} from region) group by {form.replace('@', names)}"


_SETS = ", ".join(f"(c{n % 12}, c{n % 11})" for n in range(1500))

CONSTANTS = (
    Bomb("repeat", "select repeat('x', 2000000000) as v", "max_constant_bytes"),
    Bomb("repeat of repeat", "select repeat(repeat('x', 50000), 50000) as v", "max_constant_bytes"),
    Bomb("repeat by arithmetic", "select repeat('x', 40000 * 50000) as v", "max_constant_bytes"),
    Bomb("repeat by cast text", "select repeat('x', int('2000000000')) as v", "max_constant_bytes"),
    Bomb("repeat in VALUES", "select * from values (repeat('x', 2000000000)) as t(v)", "max_constant_bytes"),
    Bomb("repeat of rows", "select length(repeat(r_name, 1000000000)) as v from region", "max_constant_bytes"),
    Bomb("repeat through a column", "select repeat(s, 50000) from (select repeat('x', 50000) s)", "max_constant_bytes"),
    Bomb("repeat in a lateral alias", "select repeat('x', 50000) s, repeat(s, 50000) t", "max_constant_bytes"),
    Bomb("repeat in a condition", "select 1 from region where r_name < repeat('x', 2000000000)", "max_constant_bytes"),
    Bomb("space", "select space(2000000000) as v", "max_constant_bytes"),
    Bomb("lpad", "select lpad('x', 2000000000, 'y') as v", "max_constant_bytes"),
    Bomb("rpad", "select rpad('x', 2000000000) as v", "max_constant_bytes"),
    Bomb("format width", "select format_string('%2000000000d', 1) as v", "max_constant_bytes"),
    Bomb("format decimals", "select format_number(1, 2000000000) as v", "max_constant_bytes"),
    Bomb("replace", "select replace(repeat('x', 60000), 'x', repeat('y', 60000)) v", "max_constant_bytes"),
    Bomb(
        "regexp_replace",
        "select regexp_replace(repeat('x', 60000), '', repeat('y', 60000)) v",
        "max_constant_bytes",
    ),
    Bomb("sequence", "select sequence(1, 50000000) as v", "max_constant_bytes"),
    Bomb(
        "sequence of days",
        "select sequence(timestamp'0001-01-01', timestamp'9999-12-31', interval 1 second) as v",
        "max_constant_bytes",
    ),
    Bomb("explode a sequence", "select count(*) from (select explode(sequence(1, 50000000)))", "max_constant_bytes"),
    Bomb("explode as a table", "select count(*) from explode(sequence(1, 50000000))", "max_constant_bytes"),
    Bomb(
        "lateral view",
        "select count(*) from region lateral view explode(sequence(1, 90000000)) as v",
        "max_constant_bytes",
    ),
    Bomb("array_repeat", "select array_repeat('x', 500000000) as v", "max_constant_bytes"),
    Bomb("array_join", "select array_join(array_repeat(repeat('x', 5000), 500000), '') v", "max_constant_bytes"),
    Bomb(
        "transform into text",
        "select transform(sequence(1, 100000), i -> repeat('x', 100000)) v",
        "max_constant_bytes",
    ),
    Bomb("aggregate that doubles", "select aggregate(sequence(1, 40), 'x', (a, b) -> a || a) v", "max_constant_bytes"),
    Bomb(
        "levenshtein",
        "select levenshtein(repeat('x', 400000), repeat('y', 400000)) as v",
        "max_constant_work",
    ),
    Bomb(
        "nested loops of lambdas",
        "select transform(sequence(1, 50000), i -> aggregate(sequence(1, 50000), 0L, (a, b) -> a + b)) v",
        "max_constant_work",
    ),
    Bomb(
        "array_except",
        "select size(array_union(sequence(1, 300000), array_repeat(array(1), 300000))) v",
        "max_constant_work",
    ),
)

PLANS = (
    Bomb(
        "26 doubling sums",
        _doubling(26, "select x + x as x from @", "select r_regionkey as x from region").replace("count(*)", "max(x)"),
        "max_expression_nodes",
    ),
    Bomb(
        "doubling lateral aliases",
        "select r_regionkey as x0, " + ", ".join(f"x{n} + x{n} as x{n + 1}" for n in range(26)) + " from region",
        "max_expression_nodes",
    ),
    Bomb("range partitions", "select count(*) from range(0, 100, 1, 2147483647)", "max_partitions"),
    Bomb("range partitions by arithmetic", "select count(*) from range(0, 9, 1, 1000 * 1000)", "max_partitions"),
    Bomb("range partitions by name", "select count(*) from range(0, 9, 1, numPartitions => 9999999)", "max_partitions"),
    Bomb(
        "26 doubling joins",
        _doubling(26, "select a.x from @ a join @ b on a.x = b.x", "select 1 as x"),
        "max_plan_nodes",
    ),
    Bomb(
        "26 doubling unions",
        _doubling(26, "select * from @ union all select * from @", "select 1 as x"),
        "max_plan_nodes",
    ),
    Bomb(
        "26 doubling subqueries",
        _doubling(26, "select (select max(x) from @) + (select min(x) from @) as x", "select 1 as x"),
        "max_plan_nodes",
    ),
    Bomb(
        "26 doubling expressions",
        _doubling(26, "select x || x as x from @", "select 'x' as x").replace("count(*)", "max(length(x))"),
        "max_expression_nodes",
    ),
    Bomb("cube", _cube(22, "cube(@)"), "max_grouping_sets"),
    Bomb("with cube", _cube(22, "@ with cube"), "max_grouping_sets"),
    Bomb("cubes beside each other", _cube(11, "cube(@), cube(@)"), "max_grouping_sets"),
    Bomb(
        "grouping sets",
        f"select count(*) from (select {_columns(12)}) group by grouping sets ({_SETS})",
        "max_grouping_sets",
    ),
    Bomb(
        "window",
        "select count(*) from (select window(timestamp'2024-01-01', '1 day', '1 microsecond') from region)",
        "max_window_ratio",
    ),
    Bomb(
        "window in a group",
        "select window(now(), '1 day', '1 microsecond') as w, count(*) from region group by 1",
        "max_window_ratio",
    ),
    Bomb("columns", f"select {_columns(2100)} from region", "max_columns"),
    Bomb(
        "columns by stars",
        "with a as (select " + _columns(200) + ") select " + ", ".join(["a.*"] * 100) + " from a",
        "max_columns",
    ),
    Bomb(
        "columns by doubling stars",
        _doubling(20, "select p.*, q.* from @ p cross join @ q", "select 1 as x"),
        "max_columns",
    ),
    Bomb("plan nodes", "select 1 as x" + " union all select 1" * 4000, "max_plan_nodes"),
    Bomb("expression nodes", "select size(array(" + ", ".join(["1"] * 20_500) + "))", "max_expression_nodes"),
    Bomb(
        "recursion",
        "with recursive r (x) max recursion level 100000000 as "
        "(select 1 union all select x + 1 from r) select count(*) from r",
        "max_recursion_level",
    ),
    Bomb("stack", "select count(*) from (select stack(2000000000, 1, 2))", "max_constant_bytes"),
)

WORK = (
    Bomb("regular expression in a constant", "select repeat('a', 200) rlike '(.*)(.*)(.*)(.*)(.*)(.*)(.*)b' as v"),
    Bomb("regular expression", "select repeat(r_name, 40) rlike '(.*)(.*)(.*)(.*)(.*)(.*)(.*)@' as v from region"),
    Bomb("cross joins", "select count(*) from range(100000) a cross join range(100000) b where a.id * b.id % 7 = 9"),
    Bomb("one long range", "select count(*) from range(0, 1000000000000, 1, 1) where id % 7 = 8"),
    Bomb("text of rows", "select max(length(repeat('x', int(id + 100000000)))) as v from range(0, 16, 1, 4)"),
    Bomb("collect_list", "select size(collect_list(sha2(string(id), 512))) as v from range(20000000)"),
    Bomb("sort in memory", "select max(v) from (select sort_array(collect_list(rand())) as v from range(90000000))"),
    Bomb("1 GB answer", "select repeat('x', 20000) as v from range(50000)"),
    Bomb("1 GB answer in one partition", "select repeat(string(id), 20000) as v from range(0, 50000, 1, 1)"),
    Bomb("1 GB in 100 rows", "select repeat(string(id), int(id + 5000000)) as v from range(100)"),
)

ALL = CONSTANTS + PLANS + WORK
