"""The second net on Spark's real plans: it refuses by itself what the first one would."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.errors import AnalysisException, PySparkException

from osrdyne_worker.pipelines.guard.plan_guard import check_analyzed, check_parsed
from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError
from osrdyne_worker.spark.plans import analyzed_plan, parse_query

QUERIES = Path(__file__).parents[1] / "queries"
VIEWS = frozenset({"customer", "lineitem", "nation", "orders", "part", "partsupp", "region", "supplier"})
# Two parsers differ here, and neither reading is dangerous: Spark reads these as plain queries over the views, by plain
# names, ignores the options of a view, or (first names) refuses to resolve them when they are analysed.
HARMLESS = {
    "current_user_bare", "comment_goes_on", "comment_goes_on_windows",
    "column_identifier", "table_identifier", "leading_semicolon",
    "nonsense",
    "comment_first", "scalar_function_as_table",
}  # fmt: skip


def refused() -> list[Any]:
    groups = yaml.safe_load((QUERIES / "refused.yaml").read_text(encoding="utf-8"))
    found = {name: query for queries in groups.values() for name, query in queries.items()}
    return [pytest.param(query, id=name) for name, query in found.items() if name not in HARMLESS]


@pytest.mark.parametrize("query", refused())
def test_attack_is_refused_by_the_plan_alone(tpch_call, query):
    session = tpch_call.context.session
    with pytest.raises((QueryRefusedError, PySparkException)):
        parsed = parse_query(session, query)
        assert parsed is not None
        check_parsed(parsed.description, views=VIEWS)


@pytest.mark.parametrize("query", ["select * from nation, hidden", "select current_user", "select user"])
def test_name_that_only_the_analyser_knows_is_refused(tpch_call, query):
    session = tpch_call.context.session
    session.range(3).createOrReplaceTempView("hidden")
    with pytest.raises((QueryRefusedError, AnalysisException)):
        check_analyzed(analyzed_plan(session.sql(query), views=VIEWS) or "")


def test_files_as_tables_and_braces_are_off_in_spark_itself(tpch_call):
    session = tpch_call.context.session
    with pytest.raises(AnalysisException):
        session.sql("select * from text.`/etc/hostname`")
    assert session.sql("select '${spark.app.name}'").first()[0] == "${spark.app.name}"
