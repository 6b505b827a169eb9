"""Queries that pass the SQL guard and are made to exhaust a worker: time, memory of the JVM, memory of Python.

The view of the key is `region` (five rows).
"""

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


def _each(form: str, count: int) -> str:
    return ", ".join(form.replace("@", str(n)) for n in range(count))


def _type(depth: int) -> str:
    return "array<" * depth + "int" + ">" * depth


_JARO = "jaro_winkler_similarity(repeat('ab', 4500), repeat('ba', 4500 + @))"
_COUNTS = "count_min_sketch(r_regionkey + @, 1e-4d, 1 - 1e-16d, 1)"
_PERCENT, _ARRAYS, _OBJECTS = "'%a'", "'array<array<'", '{"a":'
_BRANCHES = "when 1 then 2 when 2 then 3 when 4 then 5 end "
_SETS = ", ".join(f"(c{n % 12}, c{n % 11})" for n in range(1500))

_HINTED = "(select /*+ repartition(90) */ r_name from region)"
_REFUSED: dict[str, dict[str, str]] = {
    "max_constant_bytes": {
        "repeat": "select repeat('x', 2000000000) as v",
        "repeat in pipes": "from region |> extend repeat('x', 50000) as v |> select repeat(v, 50000)",
        "repeat in SET": "from region |> set r_name = repeat('x', 50000) |> set r_name = repeat(r_name, 50000)",
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
        "approx_count_distinct": "select approx_count_distinct(r_name, 0.001) from region",
        "many approx_count_distinct": f"select {_each('approx_count_distinct(r_regionkey + @, 0.01)', 60)} from region",
        "count_min_sketch": "select count_min_sketch(r_regionkey, 0.1d, 0.99999999999999999999, 1) from region",
        "many count_min_sketch": f"select {_each(_COUNTS, 20)} from region",
        "count in a condition": "select repeat('x', if(r_regionkey > 1, 2000000000, r_regionkey)) as v from region",
    },
    "max_constant_work": {
        "levenshtein": "select levenshtein(repeat('x', 400000), repeat('y', 400000)) as v",
        "jaro_winkler_similarity": "select jaro_winkler_similarity(repeat('ab', 100000), repeat('ba', 100000)) as v",
        "many jaro_winkler_similarity": f"select {_each(_JARO, 30)}",
        "like": f"select repeat('a', 100) like '{'%a' * 30}%b' as v",
        "like of rows": f"select count(*) as v from region where r_name like '{'%a' * 30}%b'",
        "like of a joined pattern": f"select repeat('a', 100) like concat({_each(_PERCENT, 8)}, 'b') as v",
        "like any": f"select repeat('a', 100) like any ('{'%a' * 8}%b', 'x') as v",
        "not ilike all": f"select repeat('a', 100) not ilike all ('{'%a' * 8}%b', 'x') as v",
        "nested loops of lambdas": "select transform(sequence(1, 50000), i -> "
        "aggregate(sequence(1, 50000), 0L, (a, b) -> a + b)) v",
        "array_except": "select size(array_union(sequence(1, 300000), array_repeat(array(1), 300000))) v",
    },
    "max_query_nesting": {
        "type of from_json": f"select from_json('1', '{_type(3000)}') as v",
        "type of from_json in parts": f"select from_json('1', concat({_each(_ARRAYS, 20)}, 'int', '{'>' * 40}')) as v",
        "type of from_json by repeat": "select from_json('1', repeat('array<', 900) || 'int' || repeat('>', 900)) as v",
        "type of from_csv": f"select from_csv('1', 'a {_type(3000)}') as v",
        "type of variant_get": f"select variant_get(parse_json('1'), '$', '{_type(3000)}') as v",
        "type of an example": f"select from_json('1', schema_of_json('{_OBJECTS * 900}1{'}' * 900}')) as v",
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
        "repartition": "select /*+ repartition(2000000) */ * from region",
        "rebalance by a column": "select /*+ rebalance(2000000, r_name) */ * from region",
        "repartition_by_range": "select /*+ coalesce(1), repartition_by_range(2000000, r_name) */ * from region",
        "repartition in a pipe": "from region |> select /*+ repartition(2000000) */ r_name",
        "range partitions by name": "select count(*) from range(0, 9, 1, numPartitions => 9999999)",
        "repartitions of a join": f"select count(*) from {_HINTED} a cross join {_HINTED} b",
        "repartition of a lateral join": f"select * from {_HINTED}, lateral (select /*+ rebalance(90) */ r_name)",
        "repartitions of a union": f"select * from {_HINTED}" + f" union all select * from {_HINTED}" * 12,
        "repartitions in each other": "select /*+ repartition(600), repartition(700, r_name) */ * from region",
        "repartition in a subquery": f"select /*+ coalesce(950) */ * from region where r_name in (from {_HINTED})",
        "repartition of a common table": f"with a as (from {_HINTED}) select count(*) from a, a b",
        "ranges of a join": "select count(*) from range(0, 90, 1, 90) a, range(0, 90, 1, 90) b",
    },
    "max_plan_nodes": {
        "26 doubling joins": _doubling(26, "select a.x from @ a join @ b on a.x = b.x"),
        "26 doubling unions": _doubling(26, "select * from @ union all select * from @"),
        "26 doubling subqueries": _doubling(26, "select (select max(x) from @) + (select min(x) from @) as x"),
        "plan nodes": "select 1 as x" + " union all select 1" * 4000,
        "pipes": "from region" + " |> where r_regionkey = 1" * 3000,
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
        "(select 1 union all select x + 1 from r) select count(*) from r"
    },
}
"""The setting of the limit, and the queries that it refuses before Spark evaluates anything."""

BOMBS = tuple(Bomb(name, query, setting) for setting, queries in _REFUSED.items() for name, query in queries.items())
FORGED_SKETCHES = {
    "hll": f"select hll_sketch_estimate(X'{'ff' * 1000}') as v",
    "made of text": "select hll_sketch_estimate(unhex(repeat('0a0107', 10000))) as v",
    "in VALUES": "select hll_union_agg(v) from values (X'0203') as t(v)",
    "in a condition": "select theta_sketch_estimate(if(r_regionkey > 1, unhex('0203'), X'00')) from region",
    "bitmap": "select bitmap_count(unhex(repeat('ff', 4000000))) as v",
    "kll": "select kll_sketch_to_string_bigint(encode('abc', 'utf-8')) as v",
}
"""Sketches that the query itself brings: their headers can claim any size."""
HONEST = {
    "like": "select r_name like '%a%b%c%', r_name like any ('a%', '%b') from region",
    "like of a long text": f"select r_name like '{'x' * 300}%' from region",
    "type": "select from_json('{}', 'a int, b struct<c: array<int>>'), from_json('{}', schema_of_json('{\"a\": [1]}'))",
    "sketch": "select hll_sketch_estimate(hll_union_agg(s)) from "
    "(select hll_sketch_agg(r_name, 12) s from region where r_name like 'r%' group by r_regionkey)",
    "distinct": "select approx_count_distinct(r_name), approx_count_distinct(r_name, 0.01) from region",
    "count_min_sketch": "select count_min_sketch(r_regionkey, 0.01d, 0.99d, 1) from region",
    "hints": f"select count(*) from {_HINTED} a join region b using (r_name) join region c using (r_name)",
    "WINDOW clause": "select sum(1) over w from region window w as (order by lpad(r_name, 10))",
}
"""Queries with the same functions that are answered."""
NOT_INTERRUPTED = "select repeat('a', 200) rlike '(.*)(.*)(.*)(.*)(.*)(.*)(.*)b' as v"
"""A regular expression in a constant, which Spark's optimiser evaluates."""
