"""Results of the SQL pipeline that are read page by page, on a real Spark."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from asking import ask, refusal

from osrdyne.protocol.data_versions import DATA_VERSION_HEADER
from osrdyne.protocol.messages import ARROW_TYPE, Request
from osrdyne_worker import Call
from osrdyne_worker.app.errors import CallCancelledError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.sql import SqlRequest

MakeCall = Callable[..., Call]
EXPIRY = 1000.0
KEY = "tpch/sf=0.001"
QUERY = "select l_orderkey, l_linenumber, l_tax, l_shipdate, l_comment from lineitem order by 1 desc, 2"


@pytest.fixture
def make(make_call, tpch_config, tmp_path):
    def build(key: str = KEY, *, accept: str | None = None, **paging: Any) -> Call:
        options = {"directory": str(tmp_path), "expiry": EXPIRY, **paging}
        return make_call({**tpch_config, "paging": options, "max_row_limit": 20_000}, key, accept=accept)

    return build


@pytest.fixture
def call(make):
    return make()


def read_all(call: Call, page: dict[str, Any], **more: Any) -> list[list[Any]]:
    rows = page["rows"]
    while page["cursor"] is not None:
        page = ask(call, cursor=page["cursor"], **more)
        rows += page["rows"]
    return rows


def test_pages_together_are_the_result_in_its_order(call, tmp_path):
    whole = ask(call, query=QUERY, limit=20_000)
    page = ask(call, query=QUERY, page_size=1000)
    assert (page["row_count"], page["truncated"], page["total_rows"]) == (1000, False, whole["row_count"])
    assert page["columns"] == whole["columns"]
    second = ask(call, cursor=page["cursor"], page_size=10)
    assert ask(call, cursor=page["cursor"], page_size=10) == second, "read again"
    assert ask(call, cursor=page["cursor"], page_size=3)["rows"] == second["rows"][:3]
    assert read_all(call, page, page_size=777) == whole["rows"]
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]


def test_page_names_the_version_of_its_rows_and_not_of_the_data_in_use(call):
    def with_version(version, **headers):
        context = replace(call.context, data_version=version)
        return Call(context, Request(key=KEY, body=b"", headers=headers))

    for version in (7, None):
        first = pipeline.sql(with_version(version), SqlRequest(query=QUERY, page_size=10))
        assert first.headers[DATA_VERSION_HEADER] == version
        cursor = json.loads(first.body)["cursor"]
        # The data has been loaded again since.
        later = pipeline.sql(with_version(9), SqlRequest(cursor=cursor))
        assert later.headers[DATA_VERSION_HEADER] == version
        error = refusal(with_version(9, **{DATA_VERSION_HEADER: 8}), cursor=cursor)
        assert (error.code, error.error_code) == (410, "cursor_expired")
        if version is not None:
            pipeline.sql(with_version(9, **{DATA_VERSION_HEADER: version}), SqlRequest(cursor=cursor))


def test_query_runs_once_for_all_pages(call):
    page = ask(call, query="select uuid() as id, n_name from nation", page_size=20)
    again = ask(call, cursor=page["cursor"])
    assert again == ask(call, cursor=page["cursor"])
    assert len({row[0] for row in read_all(call, page)}) == 25


def test_result_that_fits_in_one_page_is_not_stored(call, tmp_path):
    page = ask(call, query="select n_name from nation", page_size=25)
    assert (page["row_count"], page["cursor"], page["total_rows"]) == (25, None, 25)
    empty = ask(call, query="select n_name from nation where false", page_size=25)
    assert (empty["rows"], empty["cursor"], empty["columns"]) == ([], None, [{"name": "n_name", "type": "string"}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("limit", "truncated"), [(24, True), (25, False), (10, True)])
def test_limit_holds_for_all_pages_together(call, limit, truncated):
    page = ask(call, query="select n_name from nation order by 1", page_size=10, limit=limit)
    assert page["total_rows"] == limit
    found = len(page["rows"])
    while page["cursor"] is not None:
        assert not page["truncated"]
        page = ask(call, cursor=page["cursor"], page_size=10)
        found += len(page["rows"])
    assert (page["truncated"], found) == (truncated, limit)


def test_values_without_an_arrow_type_are_exact_in_pages(call):
    query = "select id, make_ym_interval(cast(id as int)) as span, timestamp_seconds(id) as at from range(0, 5, 1, 3)"
    whole = ask(call, query=query)
    page = ask(call, query=query, page_size=2)
    assert page["columns"] == whole["columns"]
    assert read_all(call, page, page_size=2) == whole["rows"]


def test_arrow_page_has_its_cursor_in_the_schema_and_a_header(make):
    call = make(accept=ARROW_TYPE)
    reply = pipeline.sql(call, SqlRequest(query="select n_name from nation", page_size=20))
    table = pa.ipc.open_stream(reply.body).read_all()
    assert table.schema.metadata[b"total_rows"] == b"25"
    cursor = table.schema.metadata[b"cursor"].decode()
    assert reply.headers["x-cursor"] == cursor
    reply = pipeline.sql(call, SqlRequest(cursor=cursor))
    table = pa.ipc.open_stream(reply.body).read_all()
    assert (table.num_rows, b"cursor" in table.schema.metadata) == (5, False)
    assert "x-cursor" not in reply.headers


@pytest.mark.proves("spark/worker-ends-client-reads")
def test_another_worker_of_the_key_serves_the_next_page_and_one_of_another_key_does_not(make, tpch):
    cursor = ask(make(), query=QUERY, page_size=5)["cursor"]
    assert ask(make(), cursor=cursor, page_size=5)["row_count"] == 5
    (tpch / "sf=other").exists() or (tpch / "sf=other").symlink_to(tpch / "sf=0.001")
    assert refusal(make("tpch/sf=other"), cursor=cursor).error_code == "cursor_expired"


@pytest.mark.proves("spark/worker-ends-client-reads")
def test_expired_cursor_names_the_remedy(call, tmp_path):
    page = ask(call, query=QUERY, page_size=5)
    [file] = tmp_path.iterdir()
    before = time.time() - EXPIRY
    os.utime(file, times=(before - 1, before - 1))
    error = refusal(call, cursor=page["cursor"])
    assert (error.code, error.error_code) == (410, "cursor_expired")
    assert "page_size" in error.message
    # The next result makes room.
    ask(call, query=QUERY, page_size=5)
    assert not file.exists()


def test_request_for_a_page_delays_its_expiry(call, tmp_path):
    page = ask(call, query=QUERY, page_size=5)
    [file] = tmp_path.iterdir()
    old = time.time() - EXPIRY / 2
    os.utime(file, times=(old, old))
    last = ask(call, cursor=page["cursor"], page_size=5)
    assert file.stat().st_mtime > old + 1
    # The last page can be requested again for a short time only.
    ask(call, cursor=last["cursor"])
    assert file.stat().st_mtime < old + 1


def test_text_that_is_no_cursor_is_refused(call):
    for cursor in ("", "x", "../../etc/passwd.0", "a" * 22 + ".-1", "a" * 22, "é" * 22 + ".0"):
        error = refusal(call, cursor=cursor)
        assert (error.code, error.error_code) == (400, "invalid_cursor"), cursor
    assert refusal(call, cursor="a" * 22 + ".0").error_code == "cursor_expired"
    error = refusal(call, cursor="a" * 22 + ".0", query="select 1")
    assert (error.code, error.error_code) == (400, "invalid_request")
    assert refusal(call).error_code == "invalid_request"
    assert refusal(call, query=QUERY, page_size=20_001).error_code == "limit_too_large"


@pytest.mark.proves("spark/result-larger-paging-max")
def test_result_above_the_limit_leaves_nothing(make, tmp_path, monkeypatch):
    call = make(max_bytes=100_000)
    computed = refusal(call, query=QUERY, page_size=10)
    assert (computed.code, computed.error_code) == (413, "answer_too_large")
    assert list(tmp_path.iterdir()) == []
    # A query that may return less than it reads is not refused by an estimate.
    for query in ("select * from lineitem where l_orderkey = 1", "select 1 from lineitem limit 5"):
        assert ask(call, query=query, page_size=10)["row_count"] >= 1
    monkeypatch.setattr("osrdyne_worker.pipelines.queries.paging.arrow_batches", None)  # nothing can be computed
    estimated = refusal(call, query="select * from lineitem order by l_shipdate", page_size=10)
    assert estimated.error_code == "answer_too_large"


@pytest.mark.proves("spark/results-wait-read-fill")
def test_full_directory_refuses_further_results_until_some_expire(make, tmp_path):
    call = make(max_total_bytes=1000)
    page = ask(call, query=QUERY, page_size=5)
    error = refusal(call, query=QUERY, page_size=5)
    assert (error.code, error.error_code) == (503, "paging_full")
    assert ask(call, cursor=page["cursor"])["row_count"] > 5
    [file] = tmp_path.iterdir()
    os.utime(file, times=(0, 0))
    assert ask(call, query=QUERY, page_size=5)["cursor"] is not None


@pytest.mark.proves("spark/worker-killed-stores-result")
def test_result_of_a_killed_worker_is_removed_and_never_served(call, tmp_path):
    """A worker that dies while it writes leaves an unfinished file."""
    finished = ask(call, query=QUERY, page_size=5)["cursor"]
    [file] = tmp_path.iterdir()
    unfinished = file.rename(file.with_suffix(".unfinished"))
    assert refusal(call, cursor=finished).error_code == "cursor_expired"
    os.utime(unfinished, times=(0, 0))
    ask(call, query=QUERY, page_size=5)
    assert not unfinished.exists()


def test_cancelled_or_refused_query_leaves_no_file(call, tmp_path):
    assert refusal(call, query="drop view nation", page_size=5).error_code == "statement_not_allowed"
    assert refusal(call, query="select 1 / (n_nationkey - 24) from nation", page_size=5).error_code == "DIVIDE_BY_ZERO"
    call.cancel()
    with pytest.raises(CallCancelledError):
        pipeline.sql(call, SqlRequest(query=QUERY, page_size=5))
    assert list(tmp_path.iterdir()) == []


def test_directory_that_another_user_may_write_is_not_used(make, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    call = make(directory=None)
    assert ask(call, query=QUERY, page_size=5)["cursor"] is not None
    [directory] = tmp_path.iterdir()
    directory.chmod(0o777)
    error = refusal(call, query=QUERY, page_size=5)
    assert (error.code, error.error_code) == (500, "paging_unavailable")
