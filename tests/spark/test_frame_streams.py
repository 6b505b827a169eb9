"""DataFrames as streams: the rows and types of `toArrow`, in order, and jobs that end with their stream."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import one_table, wait_for

from osrdyne.client.streams import BatchDecoder
from osrdyne.protocol.messages import Request
from osrdyne.protocol.streams import PART_BYTES
from osrdyne_worker import Answer, Call, DataChangedError, RequestError
from osrdyne_worker.app.streams import ArrowStream, open_stream
from osrdyne_worker.pipelines.sql import SqlRequest, reload_data, sql
from osrdyne_worker.spark.answers import streams
from osrdyne_worker.spark.answers.results import prepare
from osrdyne_worker.spark.session import SparkSessions


def opened(sessions: SparkSessions, value: Any, **options: Any) -> ArrowStream:
    options = {"limit": None, "max_bytes": 2**24, **options}
    stream, _ = open_stream(value, open_batches=sessions.batches, **options)
    assert stream is not None
    return stream


def streaming(call: Call) -> Call:
    """Another call of the same worker, whose caller reads a stream."""
    made = Call(call.context, Request(key=call.context.key, body=b""))
    made.attach_stream(2**24)
    return made


def rows_of(stream: ArrowStream) -> Any:
    parts = list(iter(stream.next_part, None))
    whole = pa.ipc.open_stream(b"".join([*parts, stream.end().body])).read_all()
    stream.close()
    return whole


QUERIES = {
    "types": "select id, cast(id as decimal(20,3)) d, timestamp_micros(id) t, date_from_unix_date(int(id)) x, "
    "string(id) s, array(id, null) a, map('k', id) m, named_struct('x', id, 'y', binary(string(id))) b, "
    "if(id % 2 = 0, null, id) n, interval '1' year * id years, cast(null as void) v from range(0, 5000, 1, 5)",
    "order": "select id, hash(id) h from range(0, 50000, 1, 7) order by h desc, id",
    "group": "select id % 10 k, count(*) c from range(1000) group by k order by k",
    "empty": "select id from range(10) where id > 100",
    "empty partitions": "select id from range(0, 1000, 1, 9) where id between 300 and 350",
    "limit": "select id from range(0, 100000, 1, 5) limit 4321",
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("way", ["spooled", "by partition"])
@pytest.mark.proves("spark/result-many-gb-streamed")
def test_streamed_rows_are_those_of_to_arrow(spark, sessions, query, way, monkeypatch):
    if way == "by partition":  # as on a cluster
        monkeypatch.setattr(streams, "_is_local", lambda context: False)
    frame = spark.sql(query)
    expected = prepare(frame).frame.toArrow()
    found = rows_of(opened(sessions, Answer(frame)))
    assert found.schema.equals(expected.schema)
    assert found.equals(expected)


def test_limit_ends_the_job(spark, sessions):
    stream = opened(sessions, spark.range(0, 10_000_000, 1, 4), limit=1500)
    whole = rows_of(stream)
    assert whole["id"].to_pylist() == list(range(1500))
    assert stream.truncated


@pytest.mark.proves("spark/client-streamed-query-goes")
def test_closed_stream_cancels_its_job_and_leaves_no_file(spark, sessions, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    frame = spark.sql("select java_method('java.lang.Thread', 'sleep', 20L) s, id from range(0, 1000000, 1, 4)")

    tracker = spark.sparkContext.statusTracker()
    stream = sessions.run_in_group(spark, "streamed", lambda: opened(sessions, frame))
    wait_for(lambda: bool(tracker.getActiveStageIds()))
    sessions.run_in_group(spark, "streamed", stream.close)
    wait_for(lambda: not tracker.getActiveStageIds())
    assert list(tmp_path.rglob("osrdyne-*")) == []


def test_error_of_a_task_is_the_error_of_the_stream(spark, sessions, tpch_call):
    """Spark's Python processes see only the end of their input when a task fails."""
    stream = opened(sessions, spark.sql("select 1 / (id - 5000) x from range(0, 10000, 1, 2)"))
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO") as caught, closing(stream):
        rows_of(stream)
    refusal = sessions.refusal(caught.value)
    assert refusal is not None
    assert (refusal.error_code, refusal.code, refusal.details["sql_state"]) == ("DIVIDE_BY_ZERO", 400, "22012")
    answer = sql(streaming(tpch_call), SqlRequest(query="select 1 / (n_nationkey - 24) from nation"))
    with pytest.raises(RequestError) as refused, closing(opened(sessions, answer)) as stream:
        rows_of(stream)
    assert (refused.value.error_code, refused.value.code) == ("DIVIDE_BY_ZERO", 400)


@pytest.mark.proves("spark/result-many-gb-streamed")
def test_full_disk_is_an_error_that_says_so(spark, sessions, monkeypatch):
    monkeypatch.setattr(streams, "MIN_FREE_BYTES", 2**70)
    stream = opened(sessions, spark.range(100))
    with pytest.raises(RequestError) as caught:
        rows_of(stream)
    stream.close()
    assert caught.value.error_code == "no_disk_space"


def test_sql_streams_beyond_its_limits_of_rows(tpch_call, sessions):
    query = "select a.l_orderkey from lineitem a, region b, region c order by 1"
    call = streaming(tpch_call)
    whole = rows_of(opened(sessions, sql(call, SqlRequest(query=query))))
    limited = rows_of(opened(sessions, sql(call, SqlRequest(query=query, limit=10))))
    expected = tpch_call.context.session.sql(query).toArrow()
    assert whole.num_rows > 100_000, "more than the row limits allow"
    assert whole.equals(expected)
    assert limited.equals(expected.slice(0, 10))


@pytest.mark.parametrize(("columns", "configured", "rows"), [(1, "10000", 10_000), (8, "10000", 2048), (8, "500", 500)])
def test_batches_are_small_and_the_session_keeps_its_setting(spark, sessions, columns, configured, rows):
    """Java's collector stores arrays of half a megabyte apart from all others, and frees them late."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    session = sessions.request_session(spark)
    session.conf.set(name, configured)
    frame = session.range(0, 50_000, 1, 2).selectExpr("id", *(f"id + {n} as c{n}" for n in range(1, columns)))
    opened_frame = sessions.batches(frame)
    assert opened_frame is not None
    sizes = [batch.num_rows for batch in opened_frame.batches]
    opened_frame.close()
    assert (max(sizes), sum(sizes)) == (rows, 50_000)
    assert session.conf.get(name) == configured


def test_partition_on_a_cluster_is_limited(spark, sessions, monkeypatch):
    """The JVM of the worker holds a whole partition there. Its heap is that of all tests: the limit is lower here."""
    monkeypatch.setattr(streams, "_is_local", lambda context: False)
    conf, limit = spark.sparkContext._jsc.sc().conf(), "spark.driver.maxResultSize"
    before = conf.get(limit)
    conf.set(limit, "8m")
    try:
        columns = ["id", *(f"rand({number}) as r{number}" for number in range(9))]
        stream = opened(sessions, spark.range(0, 200_000, 1, 1).selectExpr(*columns))
        with pytest.raises(Exception, match="maxResultSize") as caught:
            rows_of(stream)
        stream.close()
    finally:
        conf.set(limit, before)
    refusal = sessions.refusal(caught.value)
    assert refusal is not None
    assert (refusal.error_code, refusal.code) == ("answer_too_large", 413)


@pytest.mark.parametrize("query", ["select * from v", "select x, count(*) c from v group by x order by x"])
@pytest.mark.proves("spark/files-streamed-query-replaced")
def test_stream_over_replaced_files_asks_for_a_reload(make_call, sessions, tmp_path, query):
    """The first query opens the stream, the second one runs a job before that."""
    (tmp_path / "v").mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "v" / "old.parquet")
    call = streaming(make_call(one_table("k", view="v", path=str(tmp_path / "v")), "k"))
    (tmp_path / "v" / "old.parquet").unlink()
    pq.write_table(pa.table({"x": [3]}), tmp_path / "v" / "new.parquet")
    with pytest.raises(DataChangedError), closing(opened(sessions, sql(call, SqlRequest(query=query)))) as stream:
        rows_of(stream)
    # As the runtime does then.
    call.context = replace(call.context, session=sessions.request_session(call.context.session))
    call.context = replace(call.context, state=reload_data(call.context))
    with closing(opened(sessions, sql(call, SqlRequest(query=query)))) as stream:
        assert rows_of(stream)["x"].to_pylist() == [3]


def test_parts_of_a_frame_are_decoded_as_they_come(spark, sessions):
    stream, decoder, found = opened(sessions, spark.range(0, 2_000_000, 1, 3)), BatchDecoder(), 0
    for part in iter(stream.next_part, None):
        assert len(part) <= PART_BYTES + 1024
        found += sum(batch.num_rows for batch in decoder.decode(part))
    stream.close()
    assert found == 2_000_000
