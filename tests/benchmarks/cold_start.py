"""The first answer of a new dedicated key, as it was and as it is, with the sample tables in a warm file cache.

Measured from the start of the worker process, for a request that waits in the queue. The floor is the start without a
class data sharing archive, with all views opened one after the other and `lineitem` cached before the first answer. The
parts are those that the worker reports.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osrdyne.client import AsyncClient
from osrdyne.config.models import SMALL_FOOTPRINT
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.dev.sample_data import default_directory, generate_tpch, sql_configuration
from osrdyne.dev.stack import SAMPLE_SPARK_CONF
from osrdyne.protocol.activity import COLD_START_PARTS, Event, cold_start_of
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.integration.worker_process import Stage, stage

KEY = "tpch/sf=0.01"
QUERY = "select l_returnflag, count(*), sum(l_extendedprice) from lineitem group by l_returnflag order by 1"
OPTIONS = "spark.driver.extraJavaOptions"
WITHOUT_ARCHIVE = {OPTIONS: "-Xshare:auto"}
"""The default of Java; because the user says it, the worker adds no archive."""
C1_ONLY = {OPTIONS: "-XX:TieredStopAtLevel=1"}
"""Without the second compiler of the JVM, whose code is faster and takes longer to compile."""
LATE_C2 = {
    OPTIONS: "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
}
"""The second compiler compiles methods only after ten times as many calls; loops as early as by default."""
FORMER, PRESENT = "tests.benchmarks.former_start:app", "osrdyne_worker.pipelines.sql:app"
ROUNDS = 3

Start = Mapping[str, float]
"""Seconds until the answer (`answer`), and of each part."""


async def run(broker: EmbeddedBroker) -> list[Figure]:
    directory = default_directory()
    generate_tpch(directory, "0.01")
    program = Path(sys.executable).with_name("osrdyne")
    subprocess.run([program, "spark", "warm-archive"], check=True, capture_output=True, timeout=600)
    config = sql_configuration(directory)
    rounds: list[tuple[Start, Start, Start, Start, Start]] = []
    for number in range(ROUNDS + 1):  # the first one warms the file cache
        former = await _first_answer(broker, FORMER, config, WITHOUT_ARCHIVE)
        present = await _first_answer(broker, PRESENT, config, {})
        small = await _first_answer(broker, PRESENT, config, SMALL_FOOTPRINT)
        first_compiler = await _first_answer(broker, PRESENT, config, C1_ONLY)
        late = await _first_answer(broker, PRESENT, config, LATE_C2)
        if number > 0:
            rounds.append((former, present, small, first_compiler, late))
    first, of_small, of_c1, of_late_c2 = [
        [Round(kinds[0]["answer"], kinds[kind]["answer"]) for kinds in rounds] for kind in (1, 2, 3, 4)
    ]
    parts = [
        figure(
            f"cold start: {part}",
            "s",
            [Round(former.get(part, 0.0), present.get(part, 0.0)) for former, present, *_ in rounds],
            Goal(15.0, Comparison.ABSOLUTE),
        )
        for part in COLD_START_PARTS
    ]
    return [
        figure("first answer of a new key", "s", first, Goal(0.4)),
        figure("first answer of a new key, C1 only", "s", of_c1, Goal(0.4)),
        figure("first answer of a new key, late C2", "s", of_late_c2, Goal(0.4)),
        figure("first answer of a new key, small footprint", "s", of_small, Goal(0.4)),
        *parts,
    ]


async def _first_answer(broker: EmbeddedBroker, app: str, config: dict[str, object], conf: Mapping[str, str]) -> Start:
    pool = f"bench_{secrets.token_hex(4)}"
    spark = {"master": "local[2]", "conf": {**SAMPLE_SPARK_CONF, **conf}}
    async with stage(broker.amqp_uri, pool, KEY) as group, AsyncClient(broker.amqp_uri, pool) as client:
        asked = asyncio.create_task(client.call(KEY, "/sql", {"query": QUERY}, timeout=300))
        began = time.perf_counter()
        worker = await group.start(app=app, config=config, spark=spark, ready=False)
        reply = await asked
        answer = time.perf_counter() - began
        assert reply.json()["row_count"] == 3
        await group.until_reported(worker, Event.REQUEST_COMPLETED)
        return {"answer": answer, **_parts(group)}


def _parts(group: Stage) -> dict[str, Any]:
    return {part: took / 1000 for report in group.reports for part, took in cold_start_of(report).items()}
