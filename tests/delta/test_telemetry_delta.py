"""Delta Lake reads a table of telemetry that the ingest has published: `make test-delta`."""

import pytest
from remote_files import spark_session
from stored_telemetry import compact, events, ingest
from test_delta import CONF

from osrdyne_worker.pipelines.telemetry.delta_log import DeltaLog
from osrdyne_worker.pipelines.telemetry.table import Table

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.timeout(1800)]

HALF_HOUR = 1_800_000


@pytest.fixture
def session():
    with spark_session(CONF) as built:
        yield built


def test_each_version_has_the_rows_of_its_commits(session, tmp_path):
    table = Table(tmp_path)
    log = DeltaLog(table)
    for end in (2, 4, 6):
        ingest(table, end=end, step=HALF_HOUR)
        log.publish()
    compact(table)
    assert log.publish() == 3

    def stored(**options):
        rows = session.read.format("delta").options(**options).load(str(tmp_path))
        return sorted((row.offset, row["index"]) for row in rows.select("offset", "index").collect())

    assert stored() == events(0, 6)
    assert [stored(versionAsOf=number) for number in range(3)] == [events(0, 2), events(0, 4), events(0, 6)]
    rows = session.read.format("delta").load(str(tmp_path))
    assert rows.columns[-2:] == ["date", "hour"]
    hour = rows.where("date = DATE '2026-11-22' and hour = 11").orderBy("offset", "index").collect()
    assert [(row.offset, row.series, row.attributes) for row in hour] == [
        (2, "a", {}),
        (2, "b", {}),
        (3, "a", {}),
        (3, "b", {}),
    ]
    assert hour[0].ts == hour[0].enqueued
    # Programs that follow the table do not see the compaction.
    stream = session.readStream.format("delta").load(str(tmp_path)).writeStream.format("memory").queryName("followed")
    query = stream.trigger(availableNow=True).start()
    assert query.awaitTermination(300)
    followed = session.sql("select offset, index from followed").collect()
    assert sorted((row.offset, row["index"]) for row in followed) == events(0, 6)
