"""A table refuses writes: alarms, last values and the other table go on, and it stores later what it missed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from daemon_process import OSRDYNE, ROOT, MakeDaemon, until
from last_value_process import LastValueProcess
from managed_callers import apply, managed
from spark_fixtures import SMALL_SPARK
from stored_telemetry import refusing_writes

from osrdyne.client import AsyncClient
from osrdyne.config.models import BrokerSettings
from osrdyne_worker.pipelines.telemetry.table import Table

pytestmark = [pytest.mark.nightly, pytest.mark.one_rabbitmq, pytest.mark.timeout(1800)]

KEY = "plant/1"
ROUTES = {
    "alarms": {"route": "FROM /messages/* WHERE level = 'alarm' INTO $upstream", "priority": 0},
    "log": 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")',
}
SPARK_PATIENCE = 600.0
INGEST = "osrdyne_worker.pipelines.ingest:app"
ALARMS = "workers.examples.alarms:app"
WORKER = str(OSRDYNE.with_name("osrdyne-worker"))


def stored(table: Table) -> list[tuple[int, int, int]]:
    """Offset, index and value of each row, in this order."""
    rows: list[tuple[int, int, int]] = []
    for file in table.files():
        columns = pq.read_table(file, partitioning=None, columns=["offset", "index", "value"]).to_pydict()
        rows += zip(columns["offset"], columns["index"], map(int, columns["value"]), strict=True)
    return sorted(rows)


@pytest.mark.proves("telemetry-tables/disk-table-full-directory")
async def test_failure_of_the_warm_table_is_not_seen_on_other_paths(
    make_daemon: MakeDaemon, broker_settings: BrokerSettings, pool_id: str, tmp_path: Path
) -> None:
    uri = tmp_path / "uri"
    uri.write_text(broker_settings.uri.get_secret_value())
    warm, cold = Table(tmp_path / "warm"), Table(tmp_path / "cold")
    ingest = make_daemon(
        pool=f"{pool_id}_i",
        driver={"options": {"command": [WORKER, INGEST]}},
        worker={
            "app": INGEST,
            "spark_master": SMALL_SPARK["master"],
            "spark_conf": SMALL_SPARK["conf"],
            "config": {
                "pool": pool_id,
                "uri_file": str(uri),
                "tables": {table.directory.name: {"directory": str(table.directory)} for table in (warm, cold)},
                "timeout": 120,
            },
        },
        lifecycle={"stop_delay": "10m"},
    )
    token = tmp_path / "token"
    token.write_text("a-secret-token\n")
    common = {"pool": ingest.pool, "target_lag": "1s", "token_file": str(token)}
    telemetry = {
        "name": "plant",
        "partitions": 1,
        "tables": [{"name": name, **common} for name in ("warm", "cold")],
        "last_values": {"file": str(tmp_path / "last-values.db")},
    }
    daemon = managed(
        make_daemon,
        telemetry=telemetry,
        worker={"app": ALARMS},
        driver={"options": {"command": [WORKER, ALARMS], "cwd": str(ROOT)}},
    )
    await asyncio.gather(ingest.start(), daemon.start())
    apply(daemon, tmp_path, ROUTES)

    async def raise_alarm(client: AsyncClient, value: int) -> None:
        reply = await client.call(
            KEY, "/alarm", {"series": "a", "value": value}, headers={"level": "alarm"}, timeout=300
        )
        assert reply.status == "ok"

    async def last_value() -> int | None:
        values = (await daemon.get("/v1/last", key=KEY)).get("values", [])
        return int(values[0]["value"]) if values else None

    async def failures() -> int:
        tables: list[dict[str, Any]] = (await daemon.get("/v1/telemetry"))["tables"]
        [found] = [table for table in tables if table["table"] == "warm"]
        return int(found["partitions"][0]["failures"])

    def values(table: Table) -> set[int]:
        return {value for _, _, value in stored(table)} if table.directory.is_dir() else set()

    with LastValueProcess(daemon).running():
        async with AsyncClient(broker_settings.uri.get_secret_value(), pool_id) as client:
            for value in range(10):
                await raise_alarm(client, value)
            first = set(range(10))
            await until(
                lambda: values(warm) == values(cold) == first,
                "both tables have the first alarms",
                timeout=SPARK_PATIENCE,
                interval=1.0,
            )
            with refusing_writes(warm):
                for value in range(10, 20):
                    await raise_alarm(client, value)
                await until(failures, "an ingest of the warm table has failed", timeout=SPARK_PATIENCE, interval=1.0)
                for value in range(20, 30):
                    await raise_alarm(client, value)
                everything = set(range(30))
                await until(lambda: values(cold) == everything, "the cold table has all alarms", interval=1.0)

                async def is_newest() -> bool:
                    return await last_value() == 29

                await until(is_newest, "the last value is the newest")
                assert await failures()
                printed = daemon.osrdyne("telemetry", "status")
                assert f"The table {warm.directory} cannot be used: Not a directory" in printed.stderr
            await until(
                lambda: values(warm) == everything,
                "the warm table has what it missed",
                timeout=SPARK_PATIENCE,
                interval=1.0,
            )
    assert stored(warm) == stored(cold)
    assert len(stored(warm)) == len(everything)
    assert "a-secret-token" not in daemon.log() + ingest.log()
