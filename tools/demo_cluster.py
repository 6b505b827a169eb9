"""The demo of a cluster: a standalone Spark cluster from the PySpark package, and one key whose jobs run on it.

Run by `make demo-cluster`. It prints and checks each step, ends by itself and leaves nothing running. Exit code 0: all
checks passed.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from demo_story import START_LIMIT, DemoError, ask, chapter, check, run_demo, tell

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from osrdyne.client import AsyncClient, StartFailedError  # noqa: E402
from osrdyne.config.models import Settings  # noqa: E402
from osrdyne.dev.stack import running_stack, sample_settings  # noqa: E402
from tests.spark_starts.standalone_cluster import StandaloneCluster  # noqa: E402

KEY, NEXT_KEY = "tpch/sf=0.01", "tpch/sf=0.001"
QUERY = "select l_returnflag as flag, count(*) as items from lineitem group by l_returnflag order by flag"


def demo_settings(master: str) -> Settings:
    settings = Settings.model_validate(
        {
            "pool": {"id": "demo_cluster"},
            "lifecycle": {"start_timeout": "200s", "start_attempts": 1},
            "api": {"port": 0},
            "worker": {
                "cores": 2,
                "spark_conf": {
                    "spark.driver.host": "127.0.0.1",
                    "spark.executor.memory": "512m",
                    "spark.pyspark.python": sys.executable,
                    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
                    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
                    # Executors end during the demo; by default after one minute, or five with shuffle files.
                    "spark.dynamicAllocation.executorIdleTimeout": "5s",
                    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "5s",
                    "spark.dynamicAllocation.shuffleTracking.timeout": "5s",
                },
            },
        }
    )
    sample = sample_settings(settings, scales=("0.001", "0.01"))
    return sample.model_copy(update={"worker": sample.worker.model_copy(update={"spark_master": master})})


async def until_idle(cluster: StandaloneCluster) -> None:
    began = time.perf_counter()
    while cluster.executors():
        check(time.perf_counter() - began < START_LIMIT, "the executors of an idle key end")
        await asyncio.sleep(0.5)


async def story(cluster: StandaloneCluster) -> None:
    chapter("1. A standalone cluster: one master, one worker host with two cores")
    began = time.perf_counter()
    await cluster.start()
    tell(f"[cyan]{cluster.url}[/cyan] is up: {time.perf_counter() - began:.1f} s")
    settings = await asyncio.to_thread(demo_settings, cluster.url)
    async with (
        running_stack(settings) as running,
        AsyncClient(running.broker.uri.get_secret_value(), "demo_cluster") as client,
    ):
        chapter("2. The first request for a key starts its worker, which proves that it gets executors")
        began = time.perf_counter()
        reply = await ask(client, KEY, QUERY)
        rows = reply.json()["rows"]
        check(sum(int(row[1]) for row in rows) == 60_175, f"lineitem at scale 0.01 has 60175 rows, not {rows}")
        tell(f"answered after {time.perf_counter() - began:.1f} s: {rows}")
        tell(f"executors now: {len(cluster.executors())}, each with one core")

        chapter("3. An idle key holds no executors")
        await until_idle(cluster)
        began = time.perf_counter()
        await ask(client, KEY, "select max(l_shipdate) as latest from lineitem")
        tell(f"none was left; the next request got new ones and took {time.perf_counter() - began:.1f} s")

        chapter("4. A cluster that is gone: the caller of a new key gets that error")
        cluster.kill_master()
        try:
            await ask(client, NEXT_KEY, QUERY)
        except StartFailedError as error:
            tell(f"[yellow]{error}[/yellow]")
        else:
            raise DemoError("a key must not start without a master")
    tell("Everything is stopped. Where to look next: docs/reference/workers/clusters.md")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="osrdyne-cluster-") as directory:
        cluster = StandaloneCluster(Path(directory))
        try:
            return run_demo(story(cluster))
        finally:
            cluster.close()


if __name__ == "__main__":
    sys.exit(main())
