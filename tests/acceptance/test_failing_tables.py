"""A table refuses writes: alarms, last values and the other table go on, and it stores later what it missed."""

import asyncio

import pyarrow.parquet as pq
import pytest
from daemon_process import WORKER, until
from last_value_process import LastValueProcess
from managed_callers import apply, ingesting, managed
from stored_telemetry import refusing_writes

from osrdyne_worker.pipelines.telemetry.table import Table

pytestmark = [pytest.mark.nightly, pytest.mark.one_rabbitmq, pytest.mark.timeout(1800)]

KEY = "plant/1"
ROUTES = {
    "alarms": {"route": "FROM /messages/* WHERE level = 'alarm' INTO $upstream", "priority": 0},
    "log": 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")',
}
SPARK_PATIENCE = 600.0
ALARMS = "workers.examples.alarms:app"


def stored(table: Table) -> list[tuple[int, int, int]]:
    """Offset, index and value of each row, in this order."""
    rows: list[tuple[int, int, int]] = []
    for file in table.files() if table.directory.is_dir() else ():
        columns = pq.read_table(file, partitioning=None, columns=["offset", "index", "value"]).to_pydict()
        rows += zip(columns["offset"], columns["index"], map(int, columns["value"]), strict=True)
    return sorted(rows)


@pytest.mark.proves("telemetry-tables/disk-table-full-directory")
async def test_failure_of_the_warm_table_is_not_seen_on_other_paths(make_daemon, pool_id, tmp_path):
    warm, cold = Table(tmp_path / "warm"), Table(tmp_path / "cold")
    lasting = {"pool": f"{pool_id}_i", "lifecycle": {"stop_delay": "10m"}}
    ingest = ingesting(make_daemon, tmp_path, pool_id, warm, cold, config={"timeout": 120}, **lasting)
    token = tmp_path / "token"
    token.write_text("a-secret-token\n")
    common = {"pool": ingest.pool, "target_lag": "1s", "token_file": str(token)}
    telemetry = {
        "name": "plant",
        "partitions": 1,
        "tables": [{"name": name, **common} for name in ("warm", "cold")],
        "last_values": {"file": str(tmp_path / "last-values.db")},
    }
    driver = {"options": {"command": [WORKER, ALARMS]}}
    daemon = managed(make_daemon, telemetry=telemetry, worker={"app": ALARMS}, driver=driver)
    await asyncio.gather(ingest.start(), daemon.start())
    apply(daemon, tmp_path, ROUTES)

    async def raise_alarm(client, value):
        body = {"series": "a", "value": value}
        assert (await client.call(KEY, "/alarm", body, headers={"level": "alarm"}, timeout=300)).status == "ok"

    async def is_newest():
        found = (await daemon.get("/v1/last", key=KEY)).get("values", [])
        return bool(found and found[0]["value"] == 29)

    async def failures():
        [found] = [one for one in (await daemon.get("/v1/telemetry"))["tables"] if one["table"] == "warm"]
        return found["partitions"][0]["failures"]

    async def until_stored(count, *tables):
        def have_all():
            return all({value for _, _, value in stored(table)} == set(range(count)) for table in tables)

        await until(have_all, f"{count} alarms are stored", timeout=SPARK_PATIENCE, interval=1.0)

    with LastValueProcess(daemon.config).running():
        async with daemon.client() as client:
            for value in range(10):
                await raise_alarm(client, value)
            await until_stored(10, warm, cold)
            with refusing_writes(warm):
                for value in range(10, 20):
                    await raise_alarm(client, value)
                await until(failures, "an ingest of the warm table has failed", timeout=SPARK_PATIENCE, interval=1.0)
                for value in range(20, 30):
                    await raise_alarm(client, value)
                await until_stored(30, cold)
                await until(is_newest, "the last value is the newest")
                assert await failures()
                printed = daemon.osrdyne("telemetry", "status")
                assert f"The table {warm.directory} cannot be used: Not a directory" in printed.stderr
            await until_stored(30, warm)
    assert stored(warm) == stored(cold)
    assert len(stored(warm)) == 30
    assert "a-secret-token" not in daemon.log() + ingest.log()
