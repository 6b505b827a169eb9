"""Every place of Spark's grammar of queries where an expression may stand.

A `#` is such a place: a line with several of them is a statement for each, with a column in the others. The bounds of a
window frame and TABLESAMPLE take literals only.
"""

UNARY = ("-", "~", "+", "not ")
BINARY = (
    "+", "-", "*", "/", "%", "div", "&", "|", "^", "<<", ">>", ">>>", "||", "=", "<=>", "<>", "<", ">=", "and", "or",
    "is distinct from", "like", "ilike", "rlike",
)  # fmt: skip
TESTS = ("is null", "is not null", "is true", "is unknown", "not like some ('b')")
SELECT = """
select #
select # as a
select # a, b
select a, b, #
select all #
select distinct #
select (#)
select (#, 1)
select # between # and #
select 1 not between 0 and #
select # in (#, #)
select # in (select 1)
select # like any (#, #)
select # like all (#)
select case # when # then # else # end
select case when # then # else # end
select cast(# as string)
select try_cast(# as string)
select #::string
select #[#]
select #.field
select #:field
select upper(#)
select concat(#, #)
select nested(upper(#))
select f(x => #)
select count(distinct #)
select count(*) filter (where #)
select percentile_cont(#) within group (order by #)
select listagg(#, #) within group (order by #)
select first(#) ignore nulls
select transform(#, x -> #)
select aggregate(#, #, (a, x) -> #)
select extract(year from #)
select substring(# from # for #)
select trim(both # from #)
select trim(leading # from #)
select overlay(# placing # from #)
select overlay(# placing # from # for #)
select position(# in #)
select struct(# as x)
select struct(#, #)
select named_struct('a', #)
select timestampadd(day, #, #)
select timestampdiff(day, #, #)
select any(#)
select if(#, #, #)
select # collate utf8_binary
select sum(#) over (partition by # order by # desc nulls last)
select sum(#) over ()
select (select #)
select exists (select # where #)
select * except (a), # from nation
"""

CLAUSES = """
select 1 where #
select a from nation where #
select a from nation group by #
select a from nation group by a, #
select a from nation group by rollup (#)
select a from nation group by cube (#, a)
select a from nation group by grouping sets ((#), (#))
select a from nation group by a, # grouping sets ((a))
select a from nation group by # with cube
select a from nation group by a having #
select a from nation order by #
select a from nation sort by #
select a from nation cluster by #
select a from nation distribute by # sort by #
select a from nation limit #
select a from nation limit 1 offset #
select * from nation limit all offset #
select a from nation window w as (partition by #)
select sum(1) over w from nation window w as (partition by # order by #)
select sum(1) over w from nation window v as (partition by #), w as (distribute by # sort by #)
select * from nation lateral view explode(#) t as x
select * from nation lateral view outer posexplode(array(#)) t
select * from nation pivot (sum(#) for a in (1, 2))
select * from nation pivot (sum(a) as s for (a, b) in ((#, #)))
select * from nation pivot (sum(a) for b in (# as x))
select * from nation unpivot (v for k in (a, b)) where #
select * from nation join region on #
select * from nation left anti join region on # = #
select * from nation, lateral (select #)
select * from nation join lateral (select # where #) on #
select * from (select #)
select * from (select # union all select #) t
select * from values (#)
select * from values (#, #), (#, #) as t (a, b)
values (#), (#)
select * from range(#)
select * from explode(array(#))
select * from nation, lateral explode(#)
select # union select #
select # union all select #
select # except select #
select # intersect select #
(select #) order by #
select 1 union select 2 order by #
select 1 union select 2 limit #
with t as (select #) select # from t
with t (a) as (values (#)) select a from t
with recursive t (n) as (select # union all select n + # from t where #) select # from t
from nation select #
from nation select a where #
select * from nation n join (select # from region group by #) t
select * from nation where # in (select # from region where #)
select * from nation where (#, #) in (select #, #)
select /*+ broadcast(nation) */ # from nation
select /*+ repartition(#) */ a from nation
from nation |> where #
from nation |> extend #, # as b
from nation |> set a = #, b = #
from nation |> select #, sum(#) over w window w as (partition by #)
from nation |> aggregate max(#), # as b group by #, # as d
from nation |> order by # |> limit #
from nation |> join region on #
from nation |> pivot (sum(#) for a in (1, 2))
from nation |> union all (select #) |> offset #
"""


def positions() -> list[str]:
    """One statement for each place; `{m}` is the expression."""
    operators = [f"select {one}#" for one in UNARY] + [f"select # {one} #" for one in BINARY]
    lines = [*operators, *(f"select # {one}" for one in TESTS), *(SELECT + CLAUSES).split("\n")]
    split = [line.split("#") for line in lines]
    return ["c".join(parts[:at]) + "{m}" + "c".join(parts[at:]) for parts in split for at in range(1, len(parts))]
