"""Queries that pass the SQL guard and are made to exhaust a worker: time, memory of the JVM, memory of Python.

The view of the key is `region` (five rows).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bomb:
    name: str
    query: str
    setting: str


def _doubling(count: int, body: str, first: str = "select 1 as x", answer: str = "count(*)") -> str:
    """`c0` is `first`; each further common table is `body` over the one before."""
    steps = [f"c0 as ({first})"] + [f"c{n} as ({body.replace('@', f'c{n - 1}')})" for n in range(1, count + 1)]
    return f"with {', '.join(steps)} select {answer} as n from c{count}"


def _aliases(count: int) -> str:
    return ", ".join(f"x{n} + x{n} as x{n + 1}" for n in range(count))


def _columns(count: int) -> str:
    return ", ".join(f"{n} as c{n}" for n in range(count))


def _names(count: int) -> str:
    return ", ".join(f"c{n}" for n in range(1, count + 1))


def _cube(count: int, form: str) -> str:
    names = ", ".join(f"c{n}" for n in range(count))
    return f"select count(*) from (select {_columns(count)} from region) group by {form.replace('@', names)}"


_BRANCHES = "when 1 then 2 when 2 then 3 when 4 then 5 end "
_SETS = ", ".join(f"(c{n % 12}, c{n % 11})" for n in range(1500))

_REFUSED: dict[str, dict[str, str]] = {
    "max_constant_bytes": {
        "repeat": "select repeat('x', 2000000000) as v",
        "repeat of repeat": "select repeat(repeat('x', 50000), 50000) as v",
        "repeat by arithmetic": "select repeat('x', 40000 * 50000) as v",
        "repeat by cast text": "select repeat('x', int('2000000000')) as v",
        "repeat in VALUES": "select * from values (repeat('x', 2000000000)) as t(v)",
        "repeat of rows": "select length(repeat(r_name, 1000000000)) as v from region",
        "repeat through a column": "select repeat(s, 50000) from (select repeat('x', 50000) s)",
        "repeat in a lateral alias": "select repeat('x', 50000) s, repeat(s, 50000) t",
        "repeat in a condition": "select 1 from region where r_name < repeat('x', 2000000000)",
        "space": "select space(2000000000) as v",
        "lpad": "select lpad('x', 2000000000, 'y') as v",
        "rpad": "select rpad('x', 2000000000) as v",
        "format width": "select format_string('%2000000000d', 1) as v",
        "format decimals": "select format_number(1, 2000000000) as v",
        "replace": "select replace(repeat('x', 60000), 'x', repeat('y', 60000)) v",
        "regexp_replace": "select regexp_replace(repeat('x', 60000), '', repeat('y', 60000)) v",
        "sequence": "select sequence(1, 50000000) as v",
        "sequence of days": "select sequence(timestamp'0001-01-01', timestamp'9999-12-31', interval 1 second) as v",
        "explode a sequence": "select count(*) from (select explode(sequence(1, 50000000)))",
        "explode as a table": "select count(*) from explode(sequence(1, 50000000))",
        "lateral view": "select count(*) from region lateral view explode(sequence(1, 90000000)) as v",
        "array_repeat": "select array_repeat('x', 500000000) as v",
        "array_join": "select array_join(array_repeat(repeat('x', 5000), 500000), '') v",
        "transform into text": "select transform(sequence(1, 100000), i -> repeat('x', 100000)) v",
        "aggregate that doubles": "select aggregate(sequence(1, 40), 'x', (a, b) -> a || a) v",
        "stack": "select count(*) from (select stack(2000000000, 1, 2))",
        "repeat of a binary": f"select repeat(X'{'00' * 40_000}', 50000) as v",
        "repeat in a WINDOW clause": "select sum(1) over w from region window w as (order by repeat('x', 2000000000))",
        "column name with a comma": "select repeat(`a, b`, 50000) v from (select repeat('x', 50000) as `a, b`)",
        "26th column name": "select repeat(c26, 50000) v "
        f"from (select {'1, ' * 25} repeat('x', 50000)) as t({_names(26)})",
        "column name that Spark makes": "select repeat(`repeat(x, 50000)`, 50000) v from (select repeat('x', 50000))",
        "column name of two tables": "select repeat(a.s, 50000) v "
        "from (select repeat('x', 50000) s) a, (select 'y' s) b",
        "several names of a generator": "select repeat(w, 50000) v "
        "from (select posexplode(array(repeat('x', 50000))) as (p, w))",
        "field of a struct": "select repeat(t.s.a, 50000) v from (select named_struct('a', repeat('x', 50000)) s) t",
        "values of UNPIVOT": "select repeat(v, 50000) from (select repeat('x', 50000) a) unpivot (v for n in (a))",
        "count in a condition": "select repeat('x', if(r_regionkey > 1, 2000000000, r_regionkey)) as v from region",
    },
    "max_constant_work": {
        "levenshtein": "select levenshtein(repeat('x', 400000), repeat('y', 400000)) as v",
        "nested loops of lambdas": "select transform(sequence(1, 50000), i -> "
        "aggregate(sequence(1, 50000), 0L, (a, b) -> a + b)) v",
        "array_except": "select size(array_union(sequence(1, 300000), array_repeat(array(1), 300000))) v",
    },
    "max_expression_nodes": {
        "26 doubling sums": _doubling(26, "select x + x as x from @", "select r_regionkey as x from region", "max(x)"),
        "doubling lateral aliases": f"select r_regionkey as x0, {_aliases(26)} from region",
        "26 doubling expressions": _doubling(26, "select x || x as x from @", "select 'x' as x", "max(length(x))"),
        "shared operand of CASE": f"select {'case ' * 26} r_regionkey {_BRANCHES * 26} from region",
        "expression nodes": "select size(array(" + ", ".join(["1"] * 20_500) + "))",
    },
    "max_partitions": {
        "range partitions": "select count(*) from range(0, 100, 1, 2147483647)",
        "range partitions by arithmetic": "select count(*) from range(0, 9, 1, 1000 * 1000)",
        "range partitions by name": "select count(*) from range(0, 9, 1, numPartitions => 9999999)",
    },
    "max_plan_nodes": {
        "26 doubling joins": _doubling(26, "select a.x from @ a join @ b on a.x = b.x"),
        "26 doubling unions": _doubling(26, "select * from @ union all select * from @"),
        "26 doubling subqueries": _doubling(26, "select (select max(x) from @) + (select min(x) from @) as x"),
        "plan nodes": "select 1 as x" + " union all select 1" * 4000,
    },
    "max_grouping_sets": {
        "cube": _cube(22, "cube(@)"),
        "with cube": _cube(22, "@ with cube"),
        "cubes beside each other": _cube(11, "cube(@), cube(@)"),
        "empty grouping sets": f"select count(*) from region group by grouping sets ({'(), ' * 5000} ())",
        "grouping sets": f"select count(*) from (select {_columns(12)}) group by grouping sets ({_SETS})",
    },
    "max_window_ratio": {
        "window": "select count(*) from (select window(timestamp'2024-01-01', '1 day', '1 microsecond') from region)",
        "window in a group": "select window(now(), '1 day', '1 microsecond') as w, count(*) from region group by 1",
    },
    "max_columns": {
        "columns": f"select {_columns(2100)} from region",
        "columns by stars": "with a as (select " + _columns(200) + ") select " + ", ".join(["a.*"] * 100) + " from a",
        "columns by doubling stars": _doubling(20, "select p.*, q.* from @ p cross join @ q"),
    },
    "max_recursion_level": {
        "recursion": "with recursive r (x) max recursion level 100000000 as "
        "(select 1 union all select x + 1 from r) select count(*) from r",
    },
}
"""The setting of the limit, and the queries that it refuses before Spark evaluates anything."""

BOMBS = tuple(Bomb(name, query, setting) for setting, queries in _REFUSED.items() for name, query in queries.items())
NOT_INTERRUPTED = "select repeat('a', 200) rlike '(.*)(.*)(.*)(.*)(.*)(.*)(.*)b' as v"
"""A regular expression in a constant, which Spark's optimiser evaluates."""
