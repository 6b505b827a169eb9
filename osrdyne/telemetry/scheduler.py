"""Send requests to `/ingest` for the tables of the settings, one for a partition whenever its lag requires it.

The effect of a crash at each step of a request:

1. Publish, with confirm and mandatory. Crash before: the next leader measures the lag and sends the request. After: the
   worker stores the range, its answer is dropped, and the next leader measures the lag again. It may send a second
   request, which stores the rest or is answered `ingest_conflict`. The commits of the table store each offset once,
   however many requests are sent.
2. Answer. Crash before the position is stored: it is stored after the next answer. It is only shown.

The scheduler has its own connections. An error of a table ends one measurement or one request of that table, and never
the term, the ingress or other tables. Used in the term of a leader whose pool has a log.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.aio.signals import Wakeup
from osrdyne.aio.tasks import start_endless
from osrdyne.client.daemon_api import token_of_file
from osrdyne.client.errors import PoolNotFoundError, RequestError, RequestTimeoutError, error_from_reply
from osrdyne.client.reply import Reply
from osrdyne.errors import BrokerError, InvalidMessageError, OsrdyneError
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.protocol.rates import EventRate
from osrdyne.telemetry.positions import LivePositions
from osrdyne.telemetry.schedule import IngestAnswer, Outcome, PartitionSchedule, TableRules, TableSchedule
from osrdyne.telemetry.status import LogStatus, TablePartition, TableStatus

PATH = "/ingest"
CONFLICT = "ingest_conflict"
RETRY = Backoff(initial=2.0, maximum=120.0, jitter=0.3)
CONFLICT_RETRY = Backoff(initial=2.0, maximum=30.0, jitter=0.3)
MEASURE_RETRY = Backoff(initial=2.0, maximum=60.0, jitter=0.3)
LONGEST_MEASURE_INTERVAL = 15.0
SAVE_INTERVAL = 5.0
"""Seconds between two writes of the positions of a table: RabbitMQ writes each to disk on every node."""
_MEASURE_SHARE = 0.25
"""The largest share of time spent on measurements: measuring 256 partitions takes longer than measuring four."""
_REMEDIES = {
    "no_answer": "Check that the daemon of the pool {pool} runs and has room for {key!r} (`osrdyne status`).",
    "expired": "Check that the pool {pool} has room for {key!r} (`osrdyne groups list`).",
    "no_pool": "Start the daemon of the pool {pool}, or correct telemetry.tables.",
    "capacity": "Raise lifecycle.max_groups of the pool {pool}, or lower at_once of the table.",
    "no-route": "Add a route for {path} to the manifest of the pool {pool}, or give the table another pool.",
    "unauthorized": "Set token_file of the table to a file with a token that may send to {key!r}.",
    "forbidden": "Give the token in token_file of the table the grant send for {key!r}.",
    "start-failed": "`osrdyne groups show {key}` of the pool {pool} has the reason.",
}


class Caller(Protocol):
    """Sends requests to one pool and waits for their answers. Implemented by `AsyncClient`."""

    async def call(
        self, key: str, path: str, body: object, *, raise_on_error: bool, timeout: float, token: str | None
    ) -> Reply: ...

    async def close(self) -> None: ...


class OpenCaller(Protocol):
    """Connects a caller to the pool of this id. Raises `OsrdyneError`."""

    async def __call__(self, pool: str) -> Caller: ...


class Inspector(Protocol):
    """Measures the log and its readers. Implemented by `LogInspector`. Raises `BrokerError`."""

    async def status(self, name: str, partitions: int) -> LogStatus: ...


class _Callers:
    """One caller for each pool, connected on first use."""

    def __init__(self, open_caller: OpenCaller) -> None:
        self._open = open_caller
        self._opened: dict[str, Caller] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def of(self, pool: str) -> Caller:
        async with self._opening.setdefault(pool, asyncio.Lock()):
            if pool not in self._opened:
                self._opened[pool] = await self._open(pool)
            return self._opened[pool]

    async def close(self) -> None:
        opened, self._opened = self._opened, {}
        for caller in opened.values():
            with suppress(OsrdyneError):
                await caller.close()


@dataclass(slots=True)
class _Table:
    schedule: TableSchedule
    wakeup: Wakeup

    @property
    def rules(self) -> TableRules:
        return self.schedule.rules


class IngestScheduler:
    """The scheduler of one term. `rate_of`: the rate of a key `TABLE/PARTITION` in the quotas of the pool, which
    replaces the rate in the configuration of the workers; None: the quotas have no rate for it."""

    def __init__(
        self,
        rules: Iterable[TableRules],
        *,
        inspector: Inspector,
        positions: LivePositions,
        open_caller: OpenCaller,
        rate_of: Callable[[str], EventRate | None],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._rules = tuple(rules)
        self._inspector = inspector
        self._positions = positions
        self._callers = _Callers(open_caller)
        self._rate_of = rate_of
        self._clock, self._metrics = clock, metrics
        self._tables: list[_Table] = []
        self._positions_changed = Wakeup(clock)
        self._log: Logger = get_logger("telemetry")

    def status(self) -> tuple[TableStatus, ...]:
        """The state of each table and partition."""
        now = self._clock.monotonic()
        return tuple(
            TableStatus(
                one.rules.name,
                one.rules.pool,
                one.rules.target_lag,
                tuple(_shown(number, part, now) for number, part in enumerate(one.schedule.partitions)),
            )
            for one in self._tables
        )

    async def run(self, name: str, partitions: int) -> None:
        """Keep the tables within their target lag. Runs until cancelled; requests in flight are cancelled then."""
        self._tables = [
            _Table(TableSchedule(rules, partitions=partitions), Wakeup(self._clock)) for rules in self._rules
        ]
        try:
            async with asyncio.TaskGroup() as group:
                start_endless(group, "positions of telemetry", self._save_positions())
                for table in self._tables:  # with tasks of their own, so that tables do not delay each other
                    start_endless(group, f"lag of {table.rules.name}", self._measure(table, name, partitions))
                    start_endless(group, f"schedule of {table.rules.name}", self._work(group, table))
        finally:
            await self._callers.close()

    async def _work(self, group: asyncio.TaskGroup, table: _Table) -> None:
        """Send due requests, whenever a lag was measured, a request has ended, or a pause is over."""
        while True:
            now = self._clock.monotonic()
            for partition in table.schedule.start_due(now):
                group.create_task(self._request(table, partition), name=f"ingest {table.rules.name}/{partition}")
            pause = table.schedule.next_due(now)
            await table.wakeup.wait(pause if math.isfinite(pause) else None)

    async def _measure(self, table: _Table, name: str, partitions: int) -> None:
        """Measure the lag of a table at intervals."""
        failures = 0
        while True:
            began = self._clock.monotonic()
            try:
                status = await self._inspector.status(name, partitions)
            except Exception as error:  # error boundary: other tables and the term continue
                failures += 1
                pause = MEASURE_RETRY.delay(failures)
                _report(self._log, "lag of a table not known", error, table=table.rules.name, retry_in=round(pause, 1))
            else:
                failures = 0
                lags = {one.partition: one for one in status.lags if one.reader == table.rules.name}
                table.schedule.observe(lags, since=status.measured_at)
                table.wakeup.set()
                interval = min(max(table.rules.latest / 4, 1.0), LONGEST_MEASURE_INTERVAL)
                pause = max(interval, (self._clock.monotonic() - began) / _MEASURE_SHARE)
            await self._clock.sleep(pause)

    async def _request(self, table: _Table, partition: int) -> None:
        """Send one request and note its answer."""
        rules, key = table.rules, f"{table.rules.name}/{partition}"
        try:
            outcome = self._answered(table, partition, await self._call(rules, key))
        except Exception as error:  # error boundary: a failed request concerns its partition only
            outcome = self._failed(table, partition, error)
        finally:
            table.wakeup.set()
        self._metrics.telemetry_ingests.labels(table=rules.name, outcome=outcome.value).inc()

    async def _call(self, rules: TableRules, key: str) -> IngestAnswer:
        caller = await self._callers.of(rules.pool)
        rate = self._rate_of(key)
        body = {} if rate is None else {"rate": rate.to_wire()}
        # Read for each request, because a file with an expired token is replaced.
        token = rules.token_file and await asyncio.to_thread(token_of_file, rules.token_file, "token_file")
        timeout = rules.request_timeout
        reply = await caller.call(key, PATH, body, raise_on_error=False, timeout=timeout, token=token)
        if (error := error_from_reply(reply, key=key, path=PATH)) is not None:
            raise error
        return IngestAnswer.of_reply(reply, path=PATH, pool=rules.pool)

    def _answered(self, table: _Table, partition: int, answer: IngestAnswer) -> Outcome:
        name = table.rules.name
        if table.schedule.partitions[partition].failures:
            self._log.info("table is ingested again", table=name, partition=partition)
        outcome = table.schedule.answered(partition, answer, self._clock.monotonic())
        labels = {"table": name, "partition": str(partition)}
        self._metrics.telemetry_stored_events.labels(**labels).inc(answer.rows)
        self._metrics.telemetry_invalid_events.labels(**labels).inc(answer.invalid)
        self._metrics.telemetry_old_events.labels(**labels).inc(answer.old)
        self._metrics.telemetry_copies.labels(table=name).inc(answer.copies)
        self._metrics.telemetry_purged_rows.labels(table=name).inc(answer.purged)
        if answer.table_rows is not None and answer.table_bytes is not None:
            self._metrics.telemetry_table_rows.labels(table=name).set(answer.table_rows)
            self._metrics.telemetry_table_bytes.labels(table=name).set(answer.table_bytes)
        if self._positions.note(name, partition, answer.stop, is_saved=answer.position_saved):
            self._positions_changed.set()
        return outcome

    def _failed(self, table: _Table, partition: int, error: Exception) -> Outcome:
        rules, now = table.rules, self._clock.monotonic()
        one = table.schedule.partitions[partition]
        code = code_of(error)
        if code == CONFLICT:
            # By another leader, or a request of a user. The other ingest stores the same rows.
            table.schedule.conflicted(partition, now, pause=CONFLICT_RETRY.delay(one.conflicts + 1))
            return Outcome.CONFLICT
        pause = max(RETRY.delay(one.failures + 1), _retry_after(error))
        text = _with_remedy(error, code, rules, partition)
        table.schedule.failed(partition, now, pause=pause, code=code, error=text)
        facts = {"table": rules.name, "partition": partition, "pool": rules.pool, "code": code}
        _report(self._log, "ingest failed", error, text=text, retry_in=round(pause, 1), failures=one.failures, **facts)
        return Outcome.FAILED

    async def _save_positions(self) -> None:
        """Store positions for `osrdyne telemetry lag` and the next leader."""
        while True:
            await self._positions_changed.wait()
            try:
                await self._positions.save()
            except Exception as error:  # error boundary: the positions are only shown
                _report(self._log, "positions of tables not stored", error)
                self._positions_changed.set()
            await self._clock.sleep(SAVE_INTERVAL)


def code_of(error: Exception) -> str:
    """A short code for a failed request: the code of the worker, or the status of the answer."""
    match error:
        case RequestTimeoutError():
            return "no_answer"
        case PoolNotFoundError():
            return "no_pool"
        case RequestError():
            return error.error.code or error.status or "connection_lost"
        case InvalidMessageError():
            return "invalid_answer"
        case BrokerError():
            return "broker_unavailable"
        case _:
            return "unexpected_error"


def _retry_after(error: Exception) -> float:
    after = error.retry_after if isinstance(error, RequestError) else None
    return 0.0 if after is None or not 0 <= after < math.inf else min(after, RETRY.maximum)


def _with_remedy(error: Exception, code: str, rules: TableRules, partition: int) -> str:
    text = str(error) or type(error).__name__
    if (remedy := _REMEDIES.get(code)) is None:
        return text
    return f"{text} {remedy.format(pool=rules.pool, key=f'{rules.name}/{partition}', path=PATH)}"


def _report(log: Logger, event: str, error: Exception, *, text: str | None = None, **facts: Any) -> None:
    """Log an expected error as a warning, and an unexpected one as an error with its traceback."""
    if isinstance(error, OsrdyneError):
        log.warning(event, error=text or str(error), **facts)
    else:
        log.error(event, error=text or str(error), exc_info=error, **facts)


def _shown(number: int, part: PartitionSchedule, now: float) -> TablePartition:
    return TablePartition(
        number,
        part.in_flight,
        part.rows,
        part.invalid,
        part.failures,
        part.code,
        part.error,
        None if part.in_flight or part.not_before <= now else part.not_before - now,
    )
