"""Queries whose answer fits into no message are refused before they run, on a real Spark."""

import pytest

from osrdyne.protocol.messages import ARROW_TYPE, Request
from osrdyne_worker import Call, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.spark.answers.least_size import least_bytes
from osrdyne_worker.spark.answers.results import PreparedQuery

KEY = "tpch/sf=0.001"
WHOLE = [
    "select * from orders",
    "select o_orderkey, 1 as a, 2 as b from orders order by o_totalprice",
    "select o_orderkey, row_number() over (order by o_orderdate) as n from orders",
    "select id, id + 1 as b from range(0, 1500, 1, 2)",
    "select o_orderkey from orders union all select o_custkey from orders",
]
UNKNOWN = [
    "select * from orders where o_totalprice > 0",
    "select o_custkey, count(*) as n from orders group by o_custkey",
    "select * from orders, nation",
    "select distinct o_orderdate from orders",
    "select * from orders limit 3",
    "select explode(array(o_orderkey)) as x from orders",
]


@pytest.fixture
def ask(make_call, tpch_config):
    context = make_call(tpch_config, KEY).context

    def build(query, *, max_bytes, accept="", limit=None):
        request = Request(key=KEY, body=b"", headers={"accept": accept})
        return pipeline.sql(Call(context, request, max_bytes=max_bytes), pipeline.SqlRequest(query=query, limit=limit))

    return build


@pytest.mark.parametrize("query", WHOLE)
@pytest.mark.parametrize("accept", ["", ARROW_TYPE])
def test_answer_that_is_surely_too_large_is_refused_before_it_is_computed(ask, monkeypatch, query, accept):
    whole = len(ask(query, max_bytes=None, accept=accept).body)
    ask(query, max_bytes=whole, accept=accept)  # it fits
    ask(query, max_bytes=1000, accept=accept, limit=5)
    monkeypatch.setattr(PreparedQuery, "run", None)
    with pytest.raises(RequestError) as refused:
        ask(query, max_bytes=4000, accept=accept)
    assert (refused.value.code, refused.value.error_code) == (413, "answer_too_large")
    assert "at least" in refused.value.message


@pytest.mark.parametrize("query", UNKNOWN)
def test_size_that_depends_on_the_values_is_not_guessed(ask, query):
    assert ask(query, max_bytes=100).body, "the size of a reply is checked when it is sent"


def test_plan_is_not_read_for_an_answer_that_may_fit():
    query = PreparedQuery(None, (("a", "bigint"),))  # reading its plan would fail
    assert least_bytes(query, limit=10_000, arrow=True, above=80_000) is None
