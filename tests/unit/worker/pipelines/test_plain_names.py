"""Qualified names of views are changed to plain ones, and nothing else of a query is."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne_worker.pipelines.guard.names import plain_names

VIEWS = {"orders", "nation"}


@pytest.mark.parametrize(
    "marked",
    [
        "select * from «DEFAULT.»`Orders` o -- default.orders",
        "from«`default`.»nation",
        "select 'é🚄' from «spark_catalog» «.» «default» /* default.orders */ «.»orders",
        "select «default.»orders.id, «default.»orders.* from a, «default.»orders",
        "from «default.»orders join («default.»nation) on f(a, «default.»nation.b)",
        "from «default.»orders |> union all table «default.»nation",
        "from nation where x in (select 1 from «default.»orders)",
        "with a as (from «default.»orders) select default.nation from a",
        "select «default.»orders.id, default.nation.id from «default.»orders",
        "select «information_schema.»tables.a from «information_schema.»tables t",
        "select default.orders, default.orders.id from nation",
        "with orders as (select 1) select * from default.orders",
        "select extract(year from default.orders), a is distinct from default.orders from nation",
        "select 'from default.orders', r'from default.orders', `from default.orders` from nation",
        "select * from x.default.orders, default.orders.x, default.other, other.default.orders",
        "select * from csv.`default.orders`, information_schema.views",
        "select 'abc from default.orders",
        "select trim((a) from default.orders), trim((select 1) from default.orders) from «default.»orders",
        "select ((«default.»orders.id)) from ((«default.»orders)) where a in ((from «default.»nation))",
        "from ((select 1) union from «default.»orders)",
        "select /*+ mapjoin(a, «`default`.»orders), merge(«spark_catalog.default.»orders) */ a from «default.»orders",
        "select /*+ repartition(3, «default.»orders.id, default.orders) */ 1 from «default.»orders",
        "select /*+ merge(default.nation), coalesce(default.orders) */ 1 from «default.»orders",
        "select /*+ merge(default.orders, 'a) */ 'default.orders' from «default.»orders",
    ],
)
def test_qualifiers_of_views_become_blanks(marked):
    text = re.sub("[«»]", "", marked)
    assert plain_names(text, VIEWS).text == re.sub("«([^»]*)»", lambda found: " " * len(found[1]), marked)


def test_views_of_the_information_schema_that_are_named_are_told():
    query = "select * from information_schema.tables, `INFORMATION_SCHEMA`.Columns"
    assert plain_names(query, VIEWS).information == {"tables", "columns"}
    assert plain_names(query, {"tables"}).information == {"columns"}, "the key has another view of this name"
    assert plain_names("select * from tables", VIEWS).information == frozenset()


PARTS = (
    "default",
    ".",
    "`orders`",
    "orders",
    " from ",
    "(",
    ")",
    ",",
    "'",
    "/*",
    "/*+ merge(",
    "*/",
    "--",
    "\n",
    " with ",
    "as",
    "é",
)


@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join))
def test_any_text_keeps_its_length_and_loses_nothing_but_qualifiers(text):
    changed = plain_names(text, VIEWS).text
    lost = "".join(old for old, new in zip(text, changed, strict=True) if old != new)
    assert re.fullmatch(r"(?:`?default`?\.)*", lost)
