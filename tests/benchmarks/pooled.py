"""Pooled workers: many keys in one Spark, beside plain PySpark sessions in one Spark with the same views.

Two processes with the same settings: one gets keys by assignment, in the other one plain PySpark opens sessions with
the same views over files of their own. Keys have five views of small Parquet files.
"""

import asyncio
import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from osrdyne.client import AsyncClient
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.messages import Response
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import PROCESS_KEY
from osrdyne.protocol.statuses import Status
from osrdyne_worker.pooled.memory import process_memory
from tests.acceptance.daemon_process import OSRDYNE, PATIENCE, DaemonProcess, until
from tests.benchmarks.blocks import run_block, seconds
from tests.benchmarks.figures import Comparison, Figure, Goal, Round, compared_percentiles, figure, percentile
from tests.benchmarks.harness import own_directory
from tests.integration.pooled_stage import PooledStage, pooled_stage
from tests.integration.worker_process import WorkerProcess
from tests.spark_starts import misbehaving

POOL = "bench_pooled"
APP = "tests.benchmarks.pooled_app:app"
VIEWS = ("orders", "customers", "parts", "regions", "days")
KILLED = 100
"""Keys of the process that is killed."""
KEYS = (1, 10, 100, 200)
"""Memory is measured with so many keys."""
PLAIN = "plain"
"""The key of the other process, which plain PySpark uses."""
QUERY = "select name, number from orders where number >= 0"
SCAN = "select count(*) from range(0, 100000000000, 1, 1000) where id % 7 = 8"
"""Many tasks of about a tenth of a second: Spark gives a processor to another key only between two tasks."""
SPARK = {
    "master": "local[2]",
    "conf": {"spark.driver.memory": "1500m", "spark.sql.shuffle.partitions": 2, "spark.ui.enabled": False},
}
MEASURED_STARTS = 20
STARTS_AT_ONCE = 8
AT_ONCE = 32
CONCURRENCIES = (1, 4, 8)
ROUNDS = 5
ALONE_QUERIES = 60
OTHERS = [f"other {number}" for number in range(24)]
"""Keys beside those that misbehave."""
OTHERS_QUERIES = 240
SCAN_SECONDS = 15
IDLE_SECONDS = 20.0
MIB = 2**20


async def run(broker: EmbeddedBroker) -> list[Figure]:
    with own_directory() as directory:
        async with pooled_stage(broker.amqp_uri, POOL) as pool:
            bench = _Bench(pool, directory)
            spare = await bench.start()
            return [
                spare,
                *await bench.fill(),
                await bench.all_at_once(),
                await bench.idle(),
                await bench.beside_a_scan(),
                *[await bench.many_at_once(count) for count in CONCURRENCIES],
            ]


async def run_killed(broker: EmbeddedBroker) -> list[Figure]:
    """A process with many keys is killed: by itself, because it needs minutes less than `run`."""
    keys = [f"key{number:03}" for number in range(KILLED)]
    with own_directory() as directory:
        for key in keys:
            _write_views(directory, key)
        return [await _killed(broker, directory, keys, with_spare=each) for each in (False, True)]


async def _killed(broker: EmbeddedBroker, directory: Path, keys: list[str], *, with_spare: bool) -> Figure:
    """A daemon with keys in one process, which is killed while each key has a request: seconds from the moment at which
    its successor is ready until all have answered, beside the same requests before. A spare is ready at the kill."""
    places = {"spares": 1, "keys_per_process": KILLED, "max_processes": 2 if with_spare else 1}
    worker = {"app": APP, "placement": "pooled", "pooled": places}
    spark = {"spark_master": SPARK["master"], "spark_conf": SPARK["conf"], "config": _config(directory)}
    driver = {"options": {"command": [str(OSRDYNE.with_name("osrdyne-worker")), APP]}}
    settings = {"driver": driver, "worker": {**worker, **spark}, "log": {"level": "info"}}
    at = {"amqp_uri": broker.amqp_uri, "management_uri": broker.management_uri}
    daemon = DaemonProcess(directory, **at, pool=f"bench_killed_{with_spare}".lower(), settings=settings)

    async def processes() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await daemon.get("/v1/processes"))["processes"]
        return found

    async def ask_all(client: AsyncClient) -> None:
        replies = await asyncio.gather(*(client.call(key, "/sql", {"query": QUERY}, timeout=PATIENCE) for key in keys))
        assert [reply.json()["rows"][0][0] for reply in replies] == keys

    async def successor(former: int) -> int | None:
        ready = [one for one in await processes() if one["state"] in ("ready", "spare")]
        return next((int(one["external_id"]) for one in ready if one["external_id"] != str(former)), None)

    async def until_successor(former: int) -> int:
        return await until(lambda: successor(former), "its successor is ready", interval=0.05) or 0

    try:
        await daemon.start()
        async with daemon.client() as client:
            await ask_all(client)  # places them
            before = await seconds(ask_all(client))
            [process, *_] = daemon.pids(PROCESS_KEY)
            if with_spare:
                [process] = [int(one["external_id"]) for one in await processes() if one["keys"]]
                await _until_warm(await until_successor(process))
            asked = asyncio.create_task(ask_all(client))
            await asyncio.sleep(0.1)
            os.kill(process, signal.SIGKILL)
            await until_successor(process)
            took = await seconds(asked)
            assert (await daemon.get("/v1/poison"))["total"] == 0
    finally:
        await daemon.close()
    name = f"process with {KILLED} keys killed, all answer again{', with a spare' if with_spare else ''}"
    return figure(name, "s", [Round(before, took)], Goal(10.0, Comparison.ABSOLUTE))


async def run_misbehaving(broker: EmbeddedBroker) -> list[Figure]:
    return [figure for way in misbehaving.WAYS for figure in await _beside(broker, way)]


async def _beside(broker: EmbeddedBroker, way: misbehaving.Way) -> list[Figure]:
    """Small queries of other keys, alone and while six keys misbehave; none of them fails or expires."""
    keys = itertools.cycle(OTHERS)
    async with pooled_stage(broker.amqp_uri, f"bench_{way.__name__}") as pool:

        async def ask() -> None:
            body = {"place": "view", "own_session": True}
            misbehaving.document(await pool.call(next(keys), "/read", body))

        async def latencies() -> list[float]:
            return (await run_block(ask, calls=OTHERS_QUERIES, in_flight=1)).latencies

        process = await pool.start(misbehaving.APP, spark=misbehaving.SPARK)
        await asyncio.gather(*(pool.assign(process, key, **misbehaving.settings(key)) for key in OTHERS))
        await latencies()  # Java compiles most of it
        alone, ended = await latencies(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(misbehaving.EACH):
                group.create_task(way(misbehaving.Culprit(pool, process, f"culprit {number}", ended)))
            await asyncio.sleep(2.0)
            beside = await latencies()
            ended.set()
    name = f"{way.__name__.replace('_', ' ')}: 24 keys beside 6"
    return compared_percentiles(name, "ms", [(alone, beside)], {50: Goal(3.0), 95: Goal(3.0)})


def _config(directory: Path) -> dict[str, Any]:
    tables = [{"view": view, "path": f"{directory}/{{key}}/{view}.parquet"} for view in VIEWS]
    return {"datasets": [{"key": "{key}", "tables": tables}]}


def _write_views(directory: Path, key: str) -> None:
    (directory / key).mkdir()
    table = pa.table({"number": list(range(50)), "name": [key] * 50})
    for view in VIEWS:
        pq.write_table(table, directory / key / f"{view}.parquet")


class _Bench:
    def __init__(self, pool: PooledStage, directory: Path) -> None:
        self._pool = pool
        self._directory = directory
        self._processes: list[WorkerProcess] = []
        self._keys: list[str] = []
        self._numbers = itertools.count()

    async def start(self) -> Figure:
        """Both processes; the first key of a process that was a spare, beside the first plain session."""
        for _ in range(2):
            process = await self._pool.start(APP, config=_config(self._directory), spark=SPARK)
            self._processes.append(process)
            await _until_warm(process.pid)
        _write_views(self._directory, PLAIN)
        await self._assign(self._processes[1], PLAIN)
        [plain] = await self._plain_sessions(1)
        rounds = [Round(plain, await self._first_answer())]
        return figure("first answer on a spare", "ms", rounds, Goal(300, Comparison.ABSOLUTE))

    # --- keys

    def _new_key(self) -> str:
        key = f"key{next(self._numbers):03}"
        self._keys.append(key)
        return key

    async def _assign(self, process: WorkerProcess, key: str, **runtime: Any) -> WorkerId:
        settings = {"config": _config(self._directory), "spark": SPARK, "runtime": runtime}
        return await self._pool.assign(process, key, running=False, **settings)

    async def _first_answer(self) -> float:
        """Milliseconds from the assignment of a new key to the answer of the request that waits for it."""
        key = self._new_key()
        _write_views(self._directory, key)
        await self._pool.stage.declare_request_queue(self._pool.queue(key))
        waiting = await self._pool.send(key, "/sql", {"query": QUERY})
        began = time.perf_counter()
        assigning = asyncio.create_task(self._assign(self._processes[0], key))
        response = await self._pool.stage.caller.answer(waiting)
        took = (time.perf_counter() - began) * 1000
        assert json.loads(response.body)["rows"][0] == [key, 0], response
        await assigning
        return took

    async def _plain_sessions(self, count: int) -> list[float]:
        views = {view: f"{self._directory}/{PLAIN}/{view}.parquet" for view in VIEWS}
        body = {"count": count, "views": views, "query": QUERY}
        return list(json.loads((await self._pool.call(PLAIN, "/plain_sessions", body)).body))

    async def _ask(self, key: str, query: str) -> float:
        """Milliseconds of one query."""
        began = time.perf_counter()
        response = await self._pool.call(key, "/sql", {"query": query})
        assert response.status == Status.OK, response
        return (time.perf_counter() - began) * 1000

    async def _ask_all(self, keys: list[str]) -> tuple[float, list[Response]]:
        """Send one query for each of the keys; the seconds until all have answered."""
        began = time.perf_counter()
        sent = [await self._pool.send(key, "/sql", {"query": QUERY}) for key in keys]
        answers = await asyncio.gather(*map(self._pool.stage.caller.answer, sent))
        return time.perf_counter() - began, answers

    # --- figures

    async def fill(self) -> list[Figure]:
        """Assign keys, and open plain sessions beside them; the time of the first ones, and the memory at some
        numbers."""
        rounds: list[Round] = []
        memory: dict[int, tuple[float, float]] = {}
        for keys in KEYS:
            while len(self._keys) < min(keys, MEASURED_STARTS):
                [plain] = await self._plain_sessions(1)
                rounds.append(Round(plain, await self._first_answer()))
            await self._fill_up(keys - len(self._keys))
            ours, plain = [(process_memory(process.pid)[1] or 0) / MIB for process in self._processes]
            memory[keys] = plain, ours
        warm = rounds[len(rounds) // 2 :]  # Java has compiled most of it by then
        starts = [
            figure("assign to first answer, first ten keys", "ms", rounds[:10], Goal(300, Comparison.ABSOLUTE)),
            figure("assign to first answer", "ms", warm, Goal(300, Comparison.ABSOLUTE)),
        ]
        sizes = [
            figure(f"PSS of a process with {keys} keys", "MiB", [Round(*memory[keys])], Goal(1.5)) for keys in KEYS
        ]
        further = Round(*((after - before) / 99 for before, after in zip(memory[1], memory[100], strict=True)))
        return [*starts, *sizes, figure("PSS of a further key", "MiB", [further], Goal(10.0, Comparison.ABSOLUTE))]

    async def _fill_up(self, keys: int) -> None:
        if keys:
            await run_block(self._first_answer, calls=keys, in_flight=STARTS_AT_ONCE)
            await self._plain_sessions(keys)

    async def all_at_once(self) -> Figure:
        """One request to each key, sent together: seconds, if all answer."""
        ours, answers = await self._ask_all(self._keys)
        assert [json.loads(answer.body)["rows"][0][0] for answer in answers] == self._keys
        per_second = await self._plain_threads(2, len(self._keys))
        rounds = [Round(len(self._keys) / per_second, ours)]
        return figure(f"{len(self._keys)} keys asked at once, all answer", "s", rounds, Goal(3.0))

    async def idle(self) -> Figure:
        """Per cent of a processor that both processes use without requests."""
        before = [_processor_time(process.pid) for process in self._processes]
        await asyncio.sleep(IDLE_SECONDS)
        after = [_processor_time(process.pid) for process in self._processes]
        ours, plain = [(end - begin) / IDLE_SECONDS * 100 for begin, end in zip(before, after, strict=True)]
        rounds = [Round(plain, ours)]
        return figure(f"idle process with {len(self._keys)} keys", "% cpu", rounds, Goal(10.0, Comparison.DIFFERENCE))

    async def beside_a_scan(self) -> Figure:
        key, other = self._keys[-1], self._keys[-2]
        for _ in range(20):
            await self._ask(key, QUERY)
        rounds = []
        for _ in range(3):
            alone = [await self._ask(key, QUERY) for _ in range(ALONE_QUERIES)]
            scan = await self._pool.send(other, "/sql", {"query": SCAN}, expiration=f"{SCAN_SECONDS * 1000}")
            ended = asyncio.create_task(self._pool.stage.caller.answer(scan))
            await asyncio.sleep(1.0)
            beside = []
            while not ended.done():
                beside.append(await self._ask(key, QUERY))
            assert (await ended).status == Status.EXPIRED  # it has used the processors all the time
            rounds.append(Round(percentile(alone, 99), percentile(beside, 99)))
        return figure("p99 of a key beside another's scan", "ms", rounds, Goal(2.0))

    async def many_at_once(self, concurrency: int) -> Figure:
        key = self._new_key()
        _write_views(self._directory, key)
        await self._assign(self._processes[0], key, concurrency=concurrency)
        rounds = []
        for _ in range(ROUNDS + 1):
            plain = await self._plain_threads(concurrency, AT_ONCE)
            ours, answers = await self._ask_all([key] * AT_ONCE)
            rounds.append(Round(plain, AT_ONCE / ours))
            assert {answer.status for answer in answers} == {Status.OK}
        name = f"{AT_ONCE} small queries at once, concurrency {concurrency}"
        return figure(name, "per second", rounds[1:], Goal(0.8, at_least=True))

    async def _plain_threads(self, threads: int, count: int) -> float:
        response = await self._pool.call(PLAIN, "/plain_threads", {"query": QUERY, "threads": threads, "count": count})
        return float(response.body)


async def _until_warm(pid: int) -> None:
    """Wait until the process has done what it does before its first key."""
    before, now = -1.0, _processor_time(pid)
    while now - before >= 0.2:
        await asyncio.sleep(2.0)
        before, now = now, _processor_time(pid)


def _processor_time(pid: int) -> float:
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)
