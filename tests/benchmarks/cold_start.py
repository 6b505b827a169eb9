"""The first answer of a new dedicated key, as it was and as it is, with the sample tables in a warm file cache.

The floor is the start as it was: `former_start`, without a class data sharing archive. The parts are those that the
worker reports.
"""

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from osrdyne.client import AsyncClient
from osrdyne.config.models import SMALL_FOOTPRINT
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.dev.sample_data import default_directory, generate_tpch, sql_configuration
from osrdyne.dev.stack import SAMPLE_SPARK_CONF
from osrdyne.protocol.activity import COLD_START_PARTS, Event, cold_start_of
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, figure
from tests.integration.worker_process import stage

KEY = "tpch/sf=0.01"
QUERY = "select l_returnflag, count(*), sum(l_extendedprice) from lineitem group by l_returnflag order by 1"
OPTIONS = "spark.driver.extraJavaOptions"
WITHOUT_ARCHIVE = {OPTIONS: "-Xshare:auto"}
"""The default of Java; because the user says it, the worker adds no archive."""
LATE_C2 = "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
KINDS: Mapping[str, Mapping[str, str]] = {
    "": {},
    ", C1 only": {OPTIONS: "-XX:TieredStopAtLevel=1"},
    ", late C2": {OPTIONS: LATE_C2},
    ", small footprint": SMALL_FOOTPRINT,
}
"""Without the second compiler of the JVM, whose code is faster and takes longer to compile; and with one that compiles
methods only after ten times as many calls, and loops as early as by default."""
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
    rounds: list[tuple[Start, dict[str, Start]]] = []
    for _ in range(ROUNDS + 1):
        former = await _first_answer(broker, FORMER, config, WITHOUT_ARCHIVE)
        rounds.append((former, {kind: await _first_answer(broker, PRESENT, config, KINDS[kind]) for kind in KINDS}))

    def compared(name: str, kind: str, part: str, goal: Goal) -> Figure:
        # The first round warms the file cache.
        both = [Round(former.get(part, 0.0), kinds[kind].get(part, 0.0)) for former, kinds in rounds[1:]]
        return figure(name, "s", both, goal)

    parts_goal = Goal(15.0, Comparison.ABSOLUTE)
    return [
        *(compared(f"first answer of a new key{kind}", kind, "answer", Goal(0.4)) for kind in KINDS),
        *(compared(f"cold start: {part}", "", part, parts_goal) for part in COLD_START_PARTS),
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
        parts = {part: took / 1000 for report in group.reports for part, took in cold_start_of(report).items()}
        return {"answer": answer, **parts}
