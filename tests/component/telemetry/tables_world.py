"""A log, a table that workers write, and the scheduler that requests ingests, in virtual time."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from osrdyne.client.reply import Reply
from osrdyne.errors import BrokerUnavailableError
from osrdyne.metrics import Metrics
from osrdyne.protocol.rates import EventRate
from osrdyne.telemetry.positions import LivePositions, PositionStore
from osrdyne.telemetry.schedule import TableRules
from osrdyne.telemetry.scheduler import IngestScheduler
from osrdyne.telemetry.status import LogStatus, PartitionStatus, ReaderLag
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.management import Parameters

LOG = "plant"


class LogParameters(Parameters):
    """Global parameters of RabbitMQ, which holds them as JSON."""

    async def put_global_parameter(self, name: str, value: object) -> None:
        await super().put_global_parameter(name, json.loads(json.dumps(value)))

    async def list_global_parameters(self, prefix: str) -> list[str]:
        return [name for name in self.values if name.startswith(prefix)]


@dataclass
class World:
    """`written`: the times of the messages of each partition. `stored`: how often each was stored, by table and
    partition. `requests`: when each request arrived, and its key. `fault`: what a request gets instead of being
    served; it may wait."""

    clock: VirtualClock
    partitions: int = 1
    duration: float = 5.0
    batch: int = 100
    written: dict[int, list[float]] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    stored: dict[str, Counter[int]] = field(default_factory=dict)
    requests: list[tuple[float, str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)
    most_busy: int = 0
    fault: Callable[[str], Reply | Exception | None] = lambda key: None
    next_after: float = 0.0
    rate: EventRate | None = None
    is_measurable: bool = True
    parameters: LogParameters = field(default_factory=LogParameters)
    metrics: Metrics = field(default_factory=Metrics)
    workers: set[asyncio.Task[Reply]] = field(default_factory=set)

    def write(self, count: int = 1, *, partition: int = 0) -> None:
        self.written.setdefault(partition, []).extend([self.clock.time()] * count)

    def is_stored_once(self, table: str) -> bool:
        """Every message is in the table once."""
        expected = {f"{table}/{partition}": Counter(range(len(times))) for partition, times in self.written.items()}
        return expected == {key: self.stored.get(key, Counter()) for key in expected}

    def at(self, key: str) -> list[float]:
        return [at for at, asked in self.requests if asked == key]

    # What the scheduler sees of the log.

    async def measure(self, positions: LivePositions) -> LogStatus:
        if not self.is_measurable:
            raise BrokerUnavailableError("RabbitMQ does not answer")
        began, readers = self.clock.monotonic(), await positions.load()
        await self.clock.sleep(0.01)
        lags, now = [], self.clock.time()
        for reader in readers:
            for partition in range(self.partitions):
                times, position = self.written.get(partition, []), reader.offsets.get(partition, 0)
                unread = times[position:]
                age = now - unread[0] if unread else 0.0
                lags.append(ReaderLag(reader.reader, partition, position, len(unread), age, 0, reader.at))
        shown = tuple(
            PartitionStatus(one, f"P-log-{one}", 0, len(self.written.get(one, []))) for one in range(self.partitions)
        )
        return LogStatus(LOG, shown, tuple(lags), began)

    # The workers. A caller that is cancelled ends no work: as when its process was killed.

    async def call(
        self, key: str, path: str, body: object, *, raise_on_error: bool, timeout: float, token: str | None
    ) -> Reply:
        assert (path, raise_on_error) == ("/ingest", False)
        self.tokens.append(token)
        assert body == ({} if self.rate is None else {"rate": self.rate.to_wire()})
        self.requests.append((self.clock.monotonic(), key))
        if (fault := self.fault(key)) is not None:
            await self.clock.sleep(self.duration)
            if isinstance(fault, Exception):
                raise fault
            return fault
        work = asyncio.create_task(self._serve(key))
        self.workers.add(work)
        work.add_done_callback(self.workers.discard)
        return await asyncio.shield(work)

    async def close(self) -> None:
        pass

    async def _serve(self, key: str) -> Reply:
        if key in self.busy:
            return refusal("ingest_conflict", 409)
        self.busy.add(key)
        self.most_busy = max(self.most_busy, len(self.busy))
        try:
            start, times = self.positions.get(key, 0), self.written.get(int(key.rpartition("/")[2]), [])
            stop, end = min(start + self.batch, len(times)), len(times)
            await self.clock.sleep(self.duration)
            self.stored.setdefault(key, Counter()).update(range(start, stop))
            self.positions[key] = stop
        finally:
            self.busy.discard(key)
        offsets = {"start": start, "stop": stop, "end": end}
        answer = {"offsets": offsets, "rows": stop - start, "invalid": 0, "next_after": self.next_after}
        return Reply(body=json.dumps(answer).encode())

    @asynccontextmanager
    async def scheduling(self, *rules: TableRules) -> AsyncIterator[IngestScheduler]:
        """A scheduler at work; it is killed at the end."""
        store = PositionStore(self.parameters, pool="plant")
        positions = LivePositions(store, tables=[one.name for one in rules], time=self.clock.time)
        world = self

        class Inspector:
            async def status(self, name: str, partitions: int) -> LogStatus:
                assert (name, partitions) == (LOG, world.partitions)
                return await world.measure(positions)

        async def open_caller(pool: str) -> World:
            return world

        scheduler = IngestScheduler(
            rules,
            inspector=Inspector(),
            positions=positions,
            open_caller=open_caller,
            rate_of=lambda key: self.rate,
            clock=self.clock,
            metrics=self.metrics,
        )
        task = asyncio.create_task(scheduler.run(LOG, self.partitions))
        try:
            yield scheduler
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def count(self, table: str, outcome: str) -> float:
        labels = {"table": table, "outcome": outcome}
        return self.metrics.registry.get_sample_value("osrdyne_telemetry_ingests_total", labels) or 0.0


def refusal(code: str, number: int, message: str = "refused") -> Reply:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    return Reply(status="error", code=number, body=body)
