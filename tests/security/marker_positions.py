"""Every place of Spark's grammar of queries where an expression may stand; `{m}` is the expression.

The bounds of a window frame and TABLESAMPLE take literals only.
"""

SELECT = """
select {m}
select {m} as a
select {m} a, b
select a, b, {m}
select all {m}
select distinct {m}
select ({m})
select ({m}, 1)
select -{m}
select ~{m}
select +{m}
select not {m}
select {m} + 1
select 1 - {m}
select {m} * 2
select {m} / 2
select {m} % 2
select {m} div 2
select {m} & 1
select {m} | 1
select {m} ^ 1
select {m} << 1
select {m} >> 1
select {m} >>> 1
select {m} || 'x'
select 'x' || {m}
select {m} = 1
select {m} <=> 1
select 1 <> {m}
select {m} < 1
select {m} >= 1
select {m} and true
select false or {m}
select {m} is null
select {m} is not null
select {m} is true
select {m} is unknown
select {m} is distinct from 1
select {m} between 1 and 2
select 1 between {m} and 2
select 1 not between 0 and {m}
select {m} in (1, 2)
select 1 in (2, {m})
select {m} in (select 1)
select {m} like 'a'
select 'a' like {m}
select 'a' ilike {m}
select 'a' rlike {m}
select 'a' like any ('b', {m})
select 'a' like all ({m})
select {m} not like some ('b')
select case {m} when 1 then 2 end
select case when {m} then 2 end
select case when true then {m} end
select case when true then 1 else {m} end
select case 1 when {m} then 2 end
select cast({m} as string)
select try_cast({m} as string)
select {m}::string
select {m}[0]
select array(1)[{m}]
select {m}.field
select {m}:field
select upper({m})
select concat('a', {m})
select nested(upper({m}))
select f(x => {m})
select count(distinct {m})
select count(*) filter (where {m})
select percentile_cont({m}) within group (order by a)
select percentile_cont(0.5) within group (order by {m})
select listagg(a, {m}) within group (order by b)
select first({m}) ignore nulls
select transform(array(1), x -> {m})
select transform({m}, x -> x)
select aggregate(array(1), {m}, (a, x) -> a)
select extract(year from {m})
select substring({m} from 1 for 2)
select substring('a' from {m} for 2)
select substring('a' from 1 for {m})
select trim(both {m} from 'a')
select trim(leading 'x' from {m})
select overlay({m} placing 'a' from 1)
select overlay('a' placing {m} from 1 for 2)
select overlay('a' placing 'b' from {m})
select overlay('a' placing 'b' from 1 for {m})
select position({m} in 'a')
select position('a' in {m})
select struct({m} as x)
select struct(1, {m})
select named_struct('a', {m})
select timestampadd(day, {m}, a)
select timestampadd(day, 1, {m})
select timestampdiff(day, {m}, a)
select timestampdiff(day, a, {m})
select any({m})
select if({m}, 1, 2)
select {m} collate utf8_binary
select sum(1) over (partition by {m})
select sum(1) over (order by {m} desc nulls last)
select sum({m}) over ()
select (select {m})
select exists (select 1 where {m})
select * except (a), {m} from nation
"""

CLAUSES = """
select 1 where {m}
select a from nation where {m}
select a from nation group by {m}
select a from nation group by a, {m}
select a from nation group by rollup ({m})
select a from nation group by cube ({m}, a)
select a from nation group by grouping sets ((a), ({m}))
select a from nation group by a, {m} grouping sets ((a))
select a from nation group by {m} with cube
select a from nation group by a having {m}
select a from nation order by {m}
select a from nation sort by {m}
select a from nation cluster by {m}
select a from nation distribute by {m}
select a from nation distribute by a sort by {m}
select a from nation limit {m}
select a from nation limit 1 offset {m}
select a from nation window w as (partition by {m})
select sum(1) over w from nation window w as (partition by a order by {m})
select sum(1) over w from nation window v as (partition by a), w as (distribute by {m} sort by a)
select * from nation lateral view explode({m}) t as x
select * from nation lateral view outer posexplode(array({m})) t
select * from nation pivot (sum({m}) for a in (1, 2))
select * from nation pivot (sum(a) as s for (a, b) in ((1, {m})))
select * from nation pivot (sum(a) for b in ({m} as x))
select * from nation unpivot (v for k in (a, b)) where {m}
select * from nation join region on {m}
select * from nation left anti join region on a = {m}
select * from nation, lateral (select {m})
select * from nation join lateral (select 1 where {m}) on true
select * from (select {m})
select * from (select 1 union all select {m}) t
select * from values ({m})
select * from values (1, {m}), (2, 3) as t (a, b)
values ({m}), (1)
select * from range({m})
select * from explode(array({m}))
select * from nation, lateral explode({m})
select {m} union select 1
select 1 union all select {m}
select 1 except select {m}
select 1 intersect select {m}
(select {m}) order by 1
select 1 union select 2 order by {m}
select 1 union select 2 limit {m}
with t as (select {m}) select * from t
with t as (select 1) select {m} from t
with t (a) as (values ({m})) select a from t
with recursive t (n) as (select {m} union all select n + 1 from t) select * from t
with recursive t (n) as (select 1 union all select n + {m} from t where n < 5) select * from t
from nation select {m}
from nation select a where {m}
select * from nation n join (select 1 from region group by {m}) t
select * from nation where a in (select b from region where {m})
select * from nation where (a, {m}) in (select 1, 2)
select /*+ broadcast(nation) */ {m} from nation
select * from nation limit all offset {m}
"""


def positions() -> list[str]:
    """All of them, one statement each."""
    return [line for line in (SELECT + CLAUSES).splitlines() if line]
