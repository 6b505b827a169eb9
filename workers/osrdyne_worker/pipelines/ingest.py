"""The ingest of telemetry: stores the events of one partition of the log in a table.

Its application: `osrdyne_worker.pipelines.ingest:app`. The key is `{table}/{partition}`. Each request stores one
bounded range of offsets, from where the last commit of the table ends; `telemetry.table` commits each range once.
See docs/reference/telemetry/ingest.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote, urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from osrdyne.amqp.streams import StreamRange
from osrdyne.errors import BrokerError, BrokerUnavailableError, ConfigurationError, OsrdyneError, StreamDataLostError
from osrdyne.ingress.quotas.tiers import EVENT_BLOCK_BYTES, STORE_TIERS
from osrdyne.logs import get_logger
from osrdyne.protocol.event_mapping import EventMapping, mapping_from_settings
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.rates import EventRate, rate_from_wire
from osrdyne.telemetry.positions import READER, ReaderPosition, parameter_of
from osrdyne.telemetry.times import taken_from
from osrdyne_sources.rabbit_stream import RabbitStream
from osrdyne_sources.rabbit_stream.broker import BlockingBroker, read_uri
from osrdyne_sources.rabbit_stream.options import parse_options
from osrdyne_worker import App, Call, Context, RequestError
from osrdyne_worker.app.errors import describe
from osrdyne_worker.pipelines.telemetry.compaction import (
    INVALID_SORTED_BY,
    SORTED_BY,
    Compaction,
    WriteSorted,
    commit_compaction,
    compact_within,
    plan_compaction,
)
from osrdyne_worker.pipelines.telemetry.copies import IDS, Copies, find_copies, message_ids
from osrdyne_worker.pipelines.telemetry.data_files import WriteRange
from osrdyne_worker.pipelines.telemetry.delta_log import DeltaLog
from osrdyne_worker.pipelines.telemetry.events import EVENTS, INVALID
from osrdyne_worker.pipelines.telemetry.live_files import DataFile
from osrdyne_worker.pipelines.telemetry.ranges import Range, data_lost, next_range, store
from osrdyne_worker.pipelines.telemetry.replays import ReplayConflictError, ReplayError, plan_replay
from osrdyne_worker.pipelines.telemetry.storage_limits import (
    StorageLimit,
    StorageLimitError,
    check_limit,
    purge,
    usage_of,
)
from osrdyne_worker.pipelines.telemetry.table import (
    Commit,
    CommitConflictError,
    Replay,
    StorageError,
    Table,
    TableDamagedError,
)
from osrdyne_worker.pipelines.telemetry.throttle import Allowed, Cost, ThrottleLog, next_after
from osrdyne_worker.spark.session import SparkSessions

log = get_logger(__name__)

_SMALLEST_TASK = 20_000
"""Offsets: a smaller range is not divided, because each task opens a connection and writes files of its own."""
_COLUMNS = ("offset", "routing_key", "message_id", "content_encoding", "timestamp", "headers", "body")
_SAVE_INTERVAL = 5.0
_EXPIRE_INTERVAL = 3600.0
_COMPACT_SHARE = 0.5
"""Share of the time until the deadline of an ingest in which it may also compact."""
_HTTP_TIMEOUT = 10.0


class TableConfig(BaseModel):
    """One table."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    directory: Annotated[str, StringConstraints(pattern=r"^/")]
    """An absolute path, the same on each host that runs tasks."""
    retention_days: int | None = Field(None, ge=1, le=36_500)
    """Days after their arrival at which events are removed; None: never."""
    begin: Literal["earliest", "replay"] = "earliest"
    """Where an empty table begins: at the first message of the log, or only where a replay begins."""
    format: Literal["parquet", "delta"] = "parquet"
    """With `delta`, the table is also published as a table of Delta Lake."""
    compact_interval: int | None = Field(None, ge=1, le=31_536_000)
    """Seconds after which an ingest that has reached the end of the stream also compacts; None: only on request."""
    copies: Literal["keep", "drop", "mark"] = "keep"
    """What happens to a message that was stored at most `copies_window` seconds before."""
    copies_window: int = Field(600, ge=1, le=604_800)
    max_rows: int | None = Field(None, ge=1)
    max_bytes: int | None = Field(None, ge=1)
    on_storage_limit: Literal["purge", "pause"] = "pause"
    """What happens when the table has reached `max_rows` or `max_bytes`."""
    preset: Literal["store-s1", "store-s2"] | None = None
    """The tier of the throttle; None: no throttle."""
    units: int = Field(1, ge=1, le=10)
    catch_up: float = Field(1.0, ge=1.0, le=2.0)
    """Multiplies the rate of the tier and its units."""
    mapping: dict[str, str] = Field(default_factory=dict)
    """How messages become events: a preset, and what differs from it."""

    @field_validator("mapping")
    @classmethod
    def _valid_mapping(cls, value: dict[str, str]) -> dict[str, str]:
        mapping_from_settings(value)
        return value

    @property
    def event_mapping(self) -> EventMapping:
        return mapping_from_settings(self.mapping)

    @property
    def storage_limit(self) -> StorageLimit:
        return StorageLimit(self.max_rows, self.max_bytes, self.on_storage_limit)

    def rate(self, given: Mapping[str, Any] | None) -> EventRate | None:
        """The rate of the throttle: that of the request, else of the preset; None: no limit. Raises ValueError."""
        rate = rate_from_wire(given)
        if rate is None and self.preset is not None:
            rate = EventRate(float(STORE_TIERS[self.preset].events_a_minute * self.units), EVENT_BLOCK_BYTES)
        return None if rate is None else replace(rate, events_per_minute=rate.events_per_minute * self.catch_up)


class IngestConfig(BaseModel):
    """`worker.config` of the ingest. Source: docs/reference/telemetry/ingest.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    uri_file: str
    tables: dict[Annotated[str, StringConstraints(pattern=rf"^{READER.pattern}$")], TableConfig] = Field(min_length=1)
    pool: str | None = None
    max_offsets: int = Field(1_000_000, ge=1)
    tasks: int = Field(4, ge=1, le=1_000)
    fail_on_data_loss: bool = True
    timeout: int = Field(60, ge=1, le=86_400)
    management_uri_file: str | None = None


class IngestRequest(BaseModel):
    """Body of `/ingest`. `max_offsets`: the maximum number of offsets, up to that of the configuration. `rate`: of the
    throttle, instead of that of the configuration."""

    model_config = ConfigDict(extra="forbid")

    max_offsets: int | None = Field(None, ge=1)
    rate: dict[str, Any] | None = None

    @field_validator("rate")
    @classmethod
    def _valid_rate(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        rate_from_wire(value)
        return value


class ReplayRequest(BaseModel):
    """Body of `/replay`. `from`, `to`: offsets, or times in ISO 8601; None: the ends of the log."""

    model_config = ConfigDict(extra="forbid")

    begin: Annotated[int, Field(ge=0)] | str | None = Field(None, alias="from")
    end: Annotated[int, Field(ge=0)] | str | None = Field(None, alias="to")
    max_offsets: int | None = Field(None, ge=1)


class CompactRequest(BaseModel):
    """Body of `/compact`. `max_hours`: how many hours are merged at most."""

    model_config = ConfigDict(extra="forbid")

    max_hours: int = Field(24, ge=1, le=10_000)


@dataclass
class Ingest:
    """The table and the stream of this worker's key."""

    config: IngestConfig
    pool: str
    name: str
    partition: int
    table: Table
    busy: threading.Lock = field(default_factory=threading.Lock)
    saved: dict[int, int] | None = None
    saved_at: float = 0.0
    expired_at: float = 0.0
    compacted_at: float | None = None
    delta_log: DeltaLog | None = None

    @property
    def settings(self) -> TableConfig:
        return self.config.tables[self.name]

    @property
    def stream(self) -> str:
        return PoolNames(self.pool).log_stream(self.partition)

    @property
    def source(self) -> dict[str, str]:
        """The options of the source, without a range."""
        return {
            "uriFile": self.config.uri_file,
            "stream": self.stream,
            "timeout": str(self.config.timeout),
            "failOnDataLoss": str(self.config.fail_on_data_loss).lower(),
        }


def parse_config(config: Mapping[str, Any]) -> IngestConfig:
    """Check `worker.config`. Raises an error of pydantic."""
    return IngestConfig.model_validate(dict(config))


app = App(sessions=SparkSessions(), check_config=parse_config)


@app.on_start
def start(context: Context) -> Ingest:
    """Parse the key, and remove uncommitted files of earlier workers."""
    config = parse_config(context.config)
    name, _, number = context.key.rpartition("/")
    if name not in config.tables or not (number.isascii() and number.isdecimal() and len(number) < 6):
        raise RequestError(
            f"The key {context.key!r} is not TABLE/PARTITION, such as {next(iter(config.tables))}/0; tables are "
            f"{', '.join(config.tables)}.",
            code=404,
            error_code="invalid_key",
        )
    ingest = Ingest(config, config.pool or context.pool, name, int(number), Table(Path(config.tables[name].directory)))
    context.session.dataSource.register(RabbitStream)
    # A batch has up to 10,000 messages, whatever their size.
    context.session.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(64 * 1024 * 1024))
    try:
        removed = ingest.table.remove_uncommitted(ingest.partition)
    except (StorageError, TableDamagedError) as error:
        log.warning("uncommitted files not removed", error=error.message)
    else:
        if removed:
            log.info("uncommitted files removed", table=name, partition=ingest.partition, files=len(removed))
    return ingest


@app.handler("/ingest")
def ingest(call: Call, request: IngestRequest) -> dict[str, Any]:
    """Store the next range of offsets."""
    with _exclusive(call) as ingest:
        return _ingest(call, ingest, request.max_offsets, rate=request.rate)


@app.handler("/replay")
def replay(call: Call, request: ReplayRequest) -> dict[str, Any]:
    """Store the next range of offsets of a replay; the first request of a partition begins it."""
    with _exclusive(call) as ingest:
        return _ingest(call, ingest, request.max_offsets, request)


@app.handler("/compact")
def compact(call: Call, request: CompactRequest) -> dict[str, Any]:
    """Merge the files of closed hours."""
    with _exclusive(call) as ingest:
        return _compact(call.context.session, ingest, request.max_hours)


@contextmanager
def _exclusive(call: Call) -> Iterator[Ingest]:
    """Let one request at a time change the partition, and translate errors of the log and of the table into answers."""
    ingest: Ingest = call.context.state
    if not ingest.busy.acquire(blocking=False):
        raise RequestError(
            f"An ingest of {call.context.key} is running in this worker; request the next one after its answer.",
            code=409,
            error_code="ingest_conflict",
        )
    try:
        with _refusals():
            yield ingest
    finally:
        ingest.busy.release()


def _ingest(
    call: Call,
    ingest: Ingest,
    max_offsets: int | None,
    request: ReplayRequest | None = None,
    *,
    rate: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    session, table, partition = call.context.session, ingest.table, ingest.partition
    purged = make_room(ingest)
    last = table.last_commit(partition)
    wanted, allowed = _plan(ingest, last, max_offsets, request, rate=ingest.settings.rate(rate))
    answer: dict[str, Any] = {
        "table": ingest.name,
        "partition": partition,
        "rows": 0,
        "invalid": 0,
        "copies": 0,
        "old": 0,
        "offsets": {"start": wanted.start, "stop": wanted.stop, "end": wanted.end},
        "files": [],
        "commit": None if last is None else last.number,
    }
    if wanted.is_commit:
        commit, old = _store(session, ingest, wanted)
        answer |= {"rows": commit.rows, "invalid": commit.invalid, "copies": commit.copies, "commit": commit.number}
        answer["old"] = old
        answer["files"] = [one.path for one in (*commit.files, *commit.invalid_files)]
        # From here an error of the table must not fail the request: its events are stored.
        purged += _purge_after_commit(ingest)
        log.info("telemetry stored", **{name: answer[name] for name in ("table", "partition", "rows", "invalid")})
        if old:
            log.warning(
                "events were more than a year old when they arrived",
                **{name: answer[name] for name in ("table", "partition", "old")},
                remedy="check the unit of ts (mapping.ts_unit of the table) and the clocks of the devices",
            )
    if allowed is not None:
        answer["blocks"] = allowed.blocks
        answer["next_after"] = next_after(allowed.free_at, time.time()) if wanted.stop < wanted.end else 0.0
    if wanted.stop == wanted.end:
        compact_regularly(session, ingest, budget=call.deadline * _COMPACT_SHARE)
    answer["storage"] = _usage(ingest, committed=wanted.is_commit) | {"purged": purged}
    answer |= publish_delta(ingest)
    answer["position_saved"] = _save_position(ingest, is_last=wanted.stop == wanted.end)
    return answer


def _plan(
    ingest: Ingest,
    last: Commit | None,
    max_offsets: int | None,
    request: ReplayRequest | None,
    *,
    rate: EventRate | None,
) -> tuple[Range, Allowed | None]:
    """The offsets to store next, and what the throttle allows of them; None without a throttle. `last`: the last commit
    of the partition."""
    config = ingest.config
    with BlockingBroker(parse_options(ingest.source)) as broker:
        found = broker.bounds()[ingest.stream]
        bounds = None if found is None else (found.start, found.stop)
        replay = None if request is None else _replay(ingest, last, request, found, broker)
        begins_by_replay = request is not None or ingest.settings.begin == "replay"
        if last is None and replay is None and begins_by_replay:
            wanted = Range(1, 0, 0, 0)  # nothing yet: no replay has begun, or the stream has no messages
        else:
            wanted = next_range(
                last,
                bounds,
                stream=ingest.stream,
                max_offsets=min(max_offsets or config.max_offsets, config.max_offsets),
                fail_on_data_loss=config.fail_on_data_loss,
                replay=replay,
            )
        allowed = _throttle(ingest, wanted, rate, broker)
    return (wanted if allowed is None else replace(wanted, stop=allowed.stop)), allowed


def _throttle(ingest: Ingest, wanted: Range, rate: EventRate | None, broker: BlockingBroker) -> Allowed | None:
    """Take the blocks of the range from the throttle; None if the table has none, or there is nothing to store."""
    if rate is None or wanted.stop <= wanted.start:
        return None
    found = broker.read(ingest.stream, StreamRange(wanted.start, wanted.stop))
    costs = (Cost.of(message, rate) for messages in found for message in messages)
    throttle = ThrottleLog(ingest.table.directory)
    try:
        return throttle.take(wanted, costs, partition=ingest.partition, rate=rate, time=time.time)
    finally:
        found.close()


def _replay(
    ingest: Ingest, last: Commit | None, request: ReplayRequest, bounds: StreamRange | None, broker: BlockingBroker
) -> Replay | None:
    """The range of a replay; None if the stream has no messages yet."""
    if bounds is None and last is None:
        return None
    found = bounds or StreamRange(0, 0)
    return plan_replay(
        last,
        request.begin,
        request.end,
        bounds=(found.start, found.stop),
        first_after=lambda when: broker.first_after(ingest.stream, found, taken_from(when)),
    )


def make_room(ingest: Ingest) -> int:
    """Remove events that are too old, and hours above the storage limit; return the rows of these hours. Raises
    `StorageLimitError` if the table is paused."""
    limit = ingest.settings.storage_limit
    # First: a paused table continues when its old events are removed.
    remove_old_events(ingest)
    check_limit(ingest.table, limit)
    return purge(ingest.table, limit, partition=ingest.partition)


def _purge_after_commit(ingest: Ingest) -> int:
    """Remove hours above the storage limit; return their rows. The next ingest removes what an error has left."""
    try:
        return purge(ingest.table, ingest.settings.storage_limit, partition=ingest.partition)
    except (StorageError, TableDamagedError) as error:
        log.warning("oldest hours not purged", table=ingest.name, partition=ingest.partition, error=error.message)
        return 0


def _usage(ingest: Ingest, *, committed: bool) -> dict[str, int]:
    """Rows and bytes of the whole table for the answer. If they are unknown, a request that has committed is answered
    without them."""
    try:
        usage = usage_of(ingest.table)
    except (StorageError, TableDamagedError) as error:
        if not committed:
            raise
        log.warning("usage of a table unknown", table=ingest.name, partition=ingest.partition, error=error.message)
        return {}
    return {"rows": usage.rows, "bytes": usage.bytes}


def remove_old_events(ingest: Ingest) -> None:
    """Remove events that are too old, once an hour. An error does not fail the ingest: the next attempt is an hour
    later."""
    days = ingest.settings.retention_days
    now = time.time()
    if now - ingest.expired_at < _EXPIRE_INTERVAL:
        return
    ingest.expired_at = now
    try:
        ingest.table.delete_removed(ingest.partition)
        if days is None:
            return
        commit = ingest.table.expire(ingest.partition, datetime.fromtimestamp(now, UTC) - timedelta(days=days))
    except (CommitConflictError, StorageError, TableDamagedError) as error:
        log.warning("old events not removed", table=ingest.name, partition=ingest.partition, error=error.message)
    else:
        if commit is not None:
            log.info("old events removed", table=ingest.name, partition=ingest.partition, files=len(commit.removed))


def compact_regularly(session: Any, ingest: Ingest, *, budget: float) -> None:
    """Compact if `compact_interval` has passed, for about `budget` seconds; the next ingest merges what is left. An
    error does not fail the ingest: the next attempt is after the interval."""
    interval = ingest.settings.compact_interval
    now = time.monotonic()
    if interval is None or (ingest.compacted_at is not None and now - ingest.compacted_at < interval):
        return
    ingest.compacted_at = now
    facts = {"table": ingest.name, "partition": ingest.partition}

    def merge(hours: int) -> int:
        remaining: int = _compact(session, ingest, hours)["remaining_hours"]
        return remaining

    try:
        left = compact_within(budget, merge, max_hours=ingest.config.tasks, time=time.monotonic)
    except Exception as error:
        log.warning("table not compacted", error=describe(error), **facts)
        return
    if left:
        ingest.compacted_at = None
        log.info("hours left to compact", hours=left, **facts)


def _compact(session: Any, ingest: Ingest, max_hours: int) -> dict[str, Any]:
    table, partition = ingest.table, ingest.partition
    plan = plan_compaction(table.live(partition), max_hours=max_hours)
    before = (*plan.files, *plan.invalid_files)
    after: tuple[DataFile, ...] = ()
    commit = plan.after
    if before:
        results = [
            *_sort(session, ingest, plan, plan.files, SORTED_BY, invalid=False),
            *_sort(session, ingest, plan, plan.invalid_files, INVALID_SORTED_BY, invalid=True),
        ]
        made = commit_compaction(table, plan, results, partition=partition)
        after, commit = (*made.files, *made.invalid_files), made.number
        log.info("telemetry compacted", table=ingest.name, partition=partition, files=len(before), hours=plan.hours)
    return {
        "table": ingest.name,
        "partition": partition,
        "hours": plan.hours,
        "remaining_hours": plan.remaining,
        "rows": sum(one.rows for one in after),
        "files": {"before": len(before), "after": len(after)},
        "bytes": {"before": sum(one.bytes for one in before), "after": sum(one.bytes for one in after)},
        "commit": commit or None,
    } | publish_delta(ingest)


def publish_delta(ingest: Ingest) -> dict[str, Any]:
    """Publish the commits as a Delta table, if the table has this format. An error does not fail the request, which has
    committed: the next request publishes them."""
    if ingest.settings.format != "delta":
        return {}
    ingest.delta_log = ingest.delta_log or DeltaLog(ingest.table)
    try:
        return {"delta_version": ingest.delta_log.publish()}
    except (StorageError, TableDamagedError) as error:
        log.warning("delta table not published", table=ingest.name, error=error.message)
        return {"delta_version": None}


def _sort(
    session: Any, ingest: Ingest, plan: Compaction, files: Sequence[DataFile], columns: Sequence[str], *, invalid: bool
) -> list[str]:
    """Let Spark sort the rows of some files by hour, and write them; it spills what does not fit into memory."""
    if not files:
        return []
    from pyspark.sql import functions
    from pyspark.sql.pandas.types import from_arrow_schema

    directory = ingest.table.directory
    hour = functions.floor(functions.unix_micros("enqueued") / 3_600_000_000)
    schema = INVALID if invalid else EVENTS
    rows = session.read.schema(from_arrow_schema(schema)).parquet(*(str(directory / one.path) for one in files))
    tasks = min(ingest.config.tasks, plan.hours)
    task = WriteSorted(str(directory), ingest.partition, plan.number, invalid)
    several = rows.select(*schema.names).repartition(tasks, hour).sortWithinPartitions(hour, *columns)
    return [row.result for row in several.mapInArrow(task, "result STRING").collect()]


def _messages(session: Any, ingest: Ingest, wanted: Range) -> Any:
    size = max(_SMALLEST_TASK, -(-(wanted.stop - wanted.start) // ingest.config.tasks))
    return (
        session.read.format("rabbitmq-stream")
        .options(
            **ingest.source,
            startingOffsets=str(wanted.start),
            endingOffsets=str(wanted.stop),
            maxOffsetsPerPartition=str(size),
        )
        .load()
        .select(*_COLUMNS)
    )


def _find_copies(session: Any, ingest: Ingest, wanted: Range) -> Copies | None:
    """Let Spark read the ids of the messages; None if copies are kept."""
    settings = ingest.settings
    if settings.copies == "keep":
        return None
    from pyspark.sql.pandas.types import from_arrow_schema

    ids = _messages(session, ingest, wanted).mapInArrow(message_ids, from_arrow_schema(IDS)).toArrow().cast(IDS)
    table = ingest.table
    return find_copies(
        table.directory, table.live(ingest.partition), ids, mode=settings.copies, window=settings.copies_window
    )


def _store(session: Any, ingest: Ingest, wanted: Range) -> tuple[Commit, int]:
    """Let Spark write the rows of a range, and commit them; also return how many events were old when they arrived."""
    copies: Copies | None = None
    results: list[str] = []
    if wanted.stop > wanted.start:
        with _lost_data_reported(ingest, wanted):
            copies = _find_copies(session, ingest, wanted)
            results = _write(session, ingest, wanted, copies)
    commit = store(ingest.table, wanted, results, partition=ingest.partition, copies=len(copies or ()))
    return commit, sum(json.loads(result).get("old", 0) for result in results)


def _write(session: Any, ingest: Ingest, wanted: Range, copies: Copies | None) -> list[str]:
    """Let Spark write the rows of a range; return what its tasks have returned."""
    change = None if copies is None or not len(copies) else copies.applied
    task = WriteRange(
        str(ingest.table.directory), ingest.partition, wanted.number, change, ingest.settings.event_mapping
    )
    return [row.result for row in _messages(session, ingest, wanted).mapInArrow(task, "result STRING").collect()]


@contextmanager
def _lost_data_reported(ingest: Ingest, wanted: Range) -> Iterator[None]:
    """Raise `StreamDataLostError` in place of Spark's error if the retention of the log has removed messages of the
    range."""
    try:
        yield
    except OsrdyneError:
        raise
    except Exception:
        if ingest.config.fail_on_data_loss:
            with BlockingBroker(parse_options(ingest.source)) as broker:
                bounds = broker.bounds()[ingest.stream]
            first = wanted.stop if bounds is None else bounds.start
            if first > wanted.start:
                raise data_lost(ingest.stream, wanted.start, min(first, wanted.stop)) from None
        raise


_REFUSALS: tuple[tuple[type[OsrdyneError], int, str], ...] = (
    (CommitConflictError, 409, "ingest_conflict"),
    (ReplayConflictError, 409, "replay_conflict"),
    (ReplayError, 400, "invalid_range"),
    (StorageLimitError, 507, "storage_limit"),
    (StorageError, 507, "storage_error"),
    (TableDamagedError, 500, "table_damaged"),
    (StreamDataLostError, 410, "data_lost"),
    (ConfigurationError, 500, "invalid_configuration"),
    (BrokerError, 503, "log_unavailable"),
)
"""Errors of the log and of the table with the code and error code of their answer; the first that fits counts."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Translate errors of the log and of the table into answers."""
    try:
        yield
    except OsrdyneError as error:
        for kind, code, error_code in _REFUSALS:
            if isinstance(error, kind):
                raise RequestError(error.message, code=code, error_code=error_code) from None
        raise


def _save_position(ingest: Ingest, *, is_last: bool) -> bool:
    """Store the positions of all partitions for `osrdyne telemetry lag`; True if they are stored. They are only shown,
    so the ingest does not fail if they cannot be read or stored."""
    path = ingest.config.management_uri_file
    if path is None:
        return False
    try:
        positions = ingest.table.positions()
        if positions == ingest.saved:
            return True
        # RabbitMQ writes them to disk on every node: a reader that catches up stores them every few seconds only.
        if not is_last and time.monotonic() - ingest.saved_at < _SAVE_INTERVAL:
            return False
        position = ReaderPosition(ingest.name, positions, time.time())
        _put_global_parameter(read_uri(path), *parameter_of(position, pool=ingest.pool))
    except (BrokerError, ConfigurationError, StorageError, TableDamagedError) as error:
        log.warning("position of a reader not stored", reader=ingest.name, error=error.message)
        return False
    ingest.saved, ingest.saved_at = positions, time.monotonic()
    return True


def _put_global_parameter(uri: str, name: str, value: object) -> None:
    """Store a global parameter of RabbitMQ over its HTTP API. Raises `BrokerError`."""
    parts = urlsplit(uri)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    url = f"{address}{parts.path.rstrip('/')}/api/global-parameters/{quote(name, safe='')}"
    auth = (unquote(parts.username or "guest"), unquote(parts.password or "guest"))
    try:
        with httpx.Client(auth=auth, timeout=_HTTP_TIMEOUT, trust_env=False) as client:
            answer = client.put(url, json={"name": name, "value": value})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BrokerUnavailableError(
            f"RabbitMQ's HTTP API at {address} cannot be used: {type(error).__name__}."
        ) from None
    if not answer.is_success:
        raise BrokerError(
            f"RabbitMQ's HTTP API at {address} refused to store a global parameter (status "
            f"{answer.status_code}): the user needs the tag policymaker."
        )
