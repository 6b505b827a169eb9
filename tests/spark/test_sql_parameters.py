"""Parameters of queries on a real Spark: typed, exact, and never SQL."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from asking import ask, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.sql import ExplainRequest

REFUSED = Path(__file__).parents[1] / "queries" / "refused.yaml"
TEXT_LITERAL = re.compile(r"'([^'\\]*)'")


TYPED: dict[str, tuple[Any, str, Any]] = {
    "v": (None, "void", None),
    "b": (True, "boolean", True),
    "i": (7, "int", 7),
    "l": (2**40, "bigint", 2**40),
    "d": (0.1, "double", 0.1),
    "s": ("it's", "string", "it's"),
    "m": ({"type": "decimal", "value": "1.50"}, "decimal(3,2)", "1.50"),
    "t": ({"type": "date", "value": "2024-02-29"}, "date", "2024-02-29"),
    "z": (
        {"type": "timestamp", "value": "2024-02-29T12:00:00.000001+02:00"},
        "timestamp",
        "2024-02-29T10:00:00.000001Z",
    ),
    "n": ({"type": "timestamp_ntz", "value": "2024-02-29T12:00:00"}, "timestamp_ntz", "2024-02-29T12:00:00"),
    "y": ({"type": "binary", "value": "AP8="}, "binary", "AP8="),
}


@pytest.mark.parametrize("by_name", [True, False], ids=["named", "positional"])
def test_value_of_each_type_is_exact(tpch_call, by_name):
    places = [f":{name}" if by_name else "?" for name in TYPED]
    values = {name: value for name, (value, _, _) in TYPED.items()}
    query = "select " + ", ".join(f"{place} as {name}" for name, place in zip(TYPED, places, strict=True))
    document = ask(tpch_call, query, values if by_name else list(values.values()))
    assert {column["name"]: column["type"] for column in document["columns"]} == {
        name: kind for name, (_, kind, _) in TYPED.items()
    }
    assert document["rows"] == [[expected for _, _, expected in TYPED.values()]]


@settings(max_examples=5)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), min_size=1, max_size=40))
def test_text_arrives_as_it_was_sent(tpch_call, texts):
    texts = [*texts, "'", "\\", "\\'", "' or 1=1 --", "${spark.app.name}", "*/ :a ? /*", "\0", "\r\n"]
    query = "select " + ", ".join(f"? as c{place}" for place in range(len(texts)))
    assert ask(tpch_call, query, texts)["rows"] == [texts]


def test_value_selects_rows_and_other_values_select_others(tpch_call):
    query = "with n as (select * from nation where n_name = :name) select n_nationkey from n limit :rows"
    for name, rows in (("FRANCE", [[6]]), ("GERMANY", [[7]]), ("x' or 'a' = 'a", []), ("FRANCE", [[6]])):
        assert ask(tpch_call, query, {"name": name, "rows": 5})["rows"] == rows


def test_query_asked_again_with_its_values_is_not_analysed_again(tpch_call):
    data: pipeline.SqlData = tpch_call.context.state
    query, parameters = "select n_name from nation where n_nationkey = ?", [11]
    first = ask(tpch_call, query, parameters)
    remembered = len(data._remembered)
    assert ask(tpch_call, query, parameters) == first
    assert len(data._remembered) == remembered
    assert ask(tpch_call, query, [12]) != first


def test_plan_is_explained_with_its_values(tpch_call):
    request = ExplainRequest(query="select * from nation where n_nationkey = :k", parameters={"k": 8675309})
    assert "8675309" in pipeline.explain(tpch_call, request)["plan"]


def test_limits_see_the_values(tpch_call):
    for query, parameters in (
        ("select repeat('x', :n)", {"n": 2_000_000_000}),
        ("select repeat(:s, 20000000)", {"s": "x" * 100}),
        ("select count(*) from range(0, 10, 1, :n)", {"n": 100_000_000}),
        ("select sequence(0, ?)", [10**9]),
    ):
        assert refusal(tpch_call, query, parameters).error_code == "limit_exceeded", query
    many = "select " + ", ".join([":s"] * 1000)
    assert refusal(tpch_call, many, {"s": "x" * 10_000}).error_code == "query_too_complex", "before Spark reads it"
    for query in ("select * from identifier(:t)", "select * from :t", "select :t.n_name from nation"):
        assert refusal(tpch_call, query, {"t": "nation"}).code in (400, 403), "a value does not become a name"


def refused_with_literals() -> list[Any]:
    groups = yaml.safe_load(REFUSED.read_text(encoding="utf-8"))
    found = {name: query for queries in groups.values() for name, query in queries.items()}
    return [pytest.param(query, id=name) for name, query in found.items() if TEXT_LITERAL.search(query)]


@pytest.mark.parametrize("query", refused_with_literals())
def test_attack_with_its_texts_as_parameters_is_refused(tpch_call, query):
    texts = {f"p{place}": text for place, text in enumerate(TEXT_LITERAL.findall(query))}
    names = iter(texts)
    assert refusal(tpch_call, TEXT_LITERAL.sub(lambda _: f":{next(names)}", query), texts).code in (400, 403)
