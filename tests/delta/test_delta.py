"""The SQL pipeline on tables of Delta Lake, with the versions of the extra `delta`: `make test-delta`."""

import json
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from remote_files import spark_session

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Answer, Call, Context, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.queries.export import ExportRequest
from osrdyne_worker.pipelines.queries.lookup import LookupRequest
from osrdyne_worker.pipelines.sql import SqlRequest
from osrdyne_worker.spark.failures.missing_jars import NEWEST_DELTA, delta_problem

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.timeout(1800)]

CONF = {
    "spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


@pytest.fixture(scope="module")
def session():
    with spark_session(CONF) as built:
        yield built


@pytest.fixture(scope="module")
def call(session, tmp_path_factory):
    directory = tmp_path_factory.mktemp("delta")
    path = str(directory / "table")
    session.range(10).selectExpr("id", "'first' as name").write.format("delta").save(path)
    session.range(5).selectExpr("id", "'second' as name").write.format("delta").mode("append").save(path)
    table = {"view": "t", "format": "delta", "path": path, "key_columns": ["id"]}
    config = {
        "datasets": [{"key": "k", "tables": [table]}],
        "export": {"directory": str(directory / "exports")},
        "paging": {"directory": str(directory / "pages")},
    }
    context = Context(key=Key("k"), config=config, session=session)
    context = replace(context, state=pipeline.open_data(context))
    return Call(context, Request(key="k", body=b""))


def ask(call: Call, **body: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(pipeline.sql(call, SqlRequest(**body)).body)
    return document


def test_versions_are_those_of_the_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = project["optional-dependencies"]["delta"][:2]
    assert pinned == [f"pyspark=={version('pyspark')}", f"delta-spark=={version('delta-spark')}"]
    assert version("delta-spark") == NEWEST_DELTA
    assert delta_problem(CONF) is None


def test_table_is_queried_in_pages_looked_up_and_exported(call):
    assert ask(call, query="select count(*), sum(id) from t")["rows"] == [[15, 55]]
    page = ask(call, query="select id, name from t order by id, name", page_size=4)
    assert page["rows"] == [[0, "first"], [0, "second"], [1, "first"], [1, "second"]]
    assert ask(call, cursor=page["cursor"], page_size=1)["rows"] == [[2, "first"]]
    [found] = pipeline.lookup([call], [LookupRequest(table="t", key={"id": 3})])
    assert isinstance(found, Answer)
    assert sorted(json.loads(found.body)["rows"]) == [[3, "first"], [3, "second"]]
    assert pipeline.export(call, ExportRequest(query="select * from t"))["rows"] == 15


@pytest.mark.parametrize(
    "query",
    [
        "select * from t version as of 0",
        "select * from t timestamp as of '2024-01-01'",
        "describe history t",
        "delete from t",
        "vacuum t",
        "select * from delta.`/tmp`",
        "select * from table_changes('t', 0)",
    ],
)
def test_statement_of_delta_lake_is_refused(call, query):
    with pytest.raises(RequestError) as caught:
        ask(call, query=query)
    assert caught.value.code in (400, 403)
    assert ask(call, query="select count(*) from t")["rows"] == [[15]]
