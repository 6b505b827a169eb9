"""The last-value reader on a real RabbitMQ: every value arrives, whatever ends meanwhile."""

import asyncio
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from broker_api import close_connections, until
from filled_streams import SMALL_SEGMENTS, fill
from postgresql_server import running_postgresql
from pydantic import SecretStr
from structlog.testing import capture_logs
from test_telemetry import KEYS, ROUTES, telemetry_settings
from test_term import SOON, daemon_of
from typer.testing import CliRunner

from osrdyne.amqp import Message
from osrdyne.cli.main import full_command_line
from osrdyne.config.models import LastValueSettings, Settings
from osrdyne.errors import LastValueStoreError
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.telemetry import ENQUEUED_HEADER, KEY_HEADER
from osrdyne.telemetry.last_values.query import LastValues
from osrdyne.telemetry.last_values.reader import run_reader
from osrdyne.telemetry.last_values.values import Counts
from osrdyne.telemetry.positions import PositionStore

pytestmark = pytest.mark.usefixtures("processes")

OSRDYNE = Path(sys.executable).with_name("osrdyne")
START = 1_795_341_600_000
SERIES = 5


def in_file(directory: Path) -> LastValueSettings:
    return LastValueSettings(file=str(directory / "last-values.db"))


@asynccontextmanager
async def reading(settings: Settings) -> AsyncIterator[asyncio.Task[None]]:
    task: asyncio.Task[None] = asyncio.create_task(run_reader(settings))
    try:
        yield task
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


def events(numbers: Iterable[int]) -> list[Message]:
    """One event each: the number is the value, and the time."""
    return [
        Message(
            json.dumps({"series": f"s{number % SERIES}", "ts": START + number, "value": number}).encode(),
            headers={KEY_HEADER: "k", ENQUEUED_HEADER: START},
        )
        for number in numbers
    ]


async def shown(values: LastValues, key: str = "k") -> dict[str, float | None]:
    """The values by series; none before there is a store."""
    try:
        page = await values.page(key, series=None, after=None, limit=1_000)
    except LastValueStoreError:
        return {}
    return {one.series: one.value for one in page.values}


async def counted(values: LastValues) -> Counts:
    try:
        return await values.totals() or Counts()
    except LastValueStoreError:
        return Counts()


async def until_logged(logs: list[dict[str, object]], text: str) -> None:
    await until(lambda: [one for one in logs if text in str(one.get("error"))])


@dataclass
class Log:
    """A log with one stream, and where its last values go."""

    settings: Settings
    stream: str

    def __post_init__(self) -> None:
        self.uri = self.settings.broker.uri.get_secret_value()
        self.values = LastValues(self.settings)

    async def fill(self, *numbers: int, **options: object) -> None:
        """Write the events of this range."""
        await fill(self.uri, self.stream, events(range(*numbers)), **options)

    async def until_newest(self, last: int) -> None:
        await until(lambda: shown(self.values), equals=newest(last))


@pytest.fixture
def log(broker_settings, pool_id, tmp_path):
    broker = broker_settings.model_copy(update={"retry_interval": 0.5})
    settings = telemetry_settings(broker, pool_id, last_values=in_file(tmp_path), partitions=1)
    return Log(settings, PoolNames(pool_id).log_stream(0))


def newest(last: int) -> dict[str, float]:
    """The values after all events up to this number."""
    return {f"s{number % SERIES}": float(number) for number in range(last - SERIES + 1, last + 1)}


async def printed(*command: str) -> str:
    return (await asyncio.to_thread(CliRunner().invoke, full_command_line(), command)).output


async def test_last_values_of_requests_are_in_api_metrics_and_lag(
    broker_settings, pool_id, channel, management, tmp_path
):
    names, settings = (
        PoolNames(pool_id),
        telemetry_settings(broker_settings, pool_id, last_values=in_file(tmp_path), partitions=2),
    )
    body = b'[{"series": "t", "value": 1}, {"series": "t", "value": 2}, {"series": "u", "value": "on"}, 7]'
    async with daemon_of(settings) as running:
        await running.term.routing.routes.change(load_manifest(json.dumps({"routes": ROUTES})), author="me")
        async with httpx.AsyncClient(base_url=running.daemon.api.announced_url, trust_env=False, timeout=SOON) as http:
            before = await http.get("/v1/last", params={"key": KEYS[0]})
            assert (before.status_code, before.json()["code"]) == (503, "last-values-unavailable")
            async with reading(settings):
                for key in KEYS:
                    await channel.publish(Message(body), exchange=names.requests_exchange, routing_key=key)

                async def all_written():
                    text = (await http.get("/metrics")).text
                    return f'osrdyne_last_value_events{{outcome="written"}} {2 * len(KEYS):.1f}' in text

                async def position_is_stored():
                    found = await PositionStore(management, pool=pool_id).load()
                    return [one.reader for one in found if sum(one.offsets.values()) == len(KEYS)] == ["last-value"]

                await until(all_written)
                await until(position_is_stored)
            for key in KEYS:
                answer = (await http.get("/v1/last", params={"key": key})).json()
                shown = [(one["series"], one["value"], one["value_text"]) for one in answer["values"]]
                assert shown == [("t", 2.0, None), ("u", None, "on")]
            for after, series, following in ((None, "t", "t"), ("t", "u", None)):
                params = {"key": KEYS[0], "limit": 1} | ({"after": after} if after else {})
                page = (await http.get("/v1/last", params=params)).json()
                assert ([one["series"] for one in page["values"]], page["next"]) == ([series], following)
            assert f'outcome="invalid"}} {len(KEYS):.1f}' in (await http.get("/metrics")).text
            command = ["last", KEYS[0], "--api", running.daemon.api.announced_url]
            lines = [line.split()[:4] for line in (await printed(*command)).splitlines()]
            assert [line for line in lines if line and line[0] == "t"] == [["t", "2", "telemetry", "-"]]
            assert [value["value_text"] for value in json.loads(await printed(*command, "u", "--json"))] == ["on"]
            assert (await printed("last", "other", *command[2:])).count("\n") == 1


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
@pytest.mark.proves("last-values/last-value-reader-killed")
async def test_reader_that_is_killed_again_and_again_loses_no_value(broker_settings, pool_id, tmp_path, store, request):
    chosen = in_file(tmp_path)
    if store == "postgresql":
        chosen = LastValueSettings(store="postgresql", uri=SecretStr(request.getfixturevalue("database")))
    settings = telemetry_settings(broker_settings, pool_id, last_values=chosen, partitions=1)
    values, stream = LastValues(settings), PoolNames(pool_id).log_stream(0)
    location = {"FILE": chosen.file} if chosen.uri is None else {"URI": chosen.uri.get_secret_value()}
    environment = {
        "POOL__ID": pool_id,
        "POOL__KIND": "managed",
        "BROKER__URI": broker_settings.uri.get_secret_value(),
        "BROKER__MANAGEMENT_URI": broker_settings.effective_management_uri(),
        "TELEMETRY__NAME": "plant",
        "TELEMETRY__PARTITIONS": "1",
        "TELEMETRY__LAST_VALUES__STORE": store,
        **{f"TELEMETRY__LAST_VALUES__{name}": str(value) for name, value in location.items()},
    }
    environment = os.environ | {f"OSRDYNE__{name}": value for name, value in environment.items()}
    generator = random.Random(7)
    numbers = list(range(12_000))
    generator.shuffle(numbers)  # events of all ages arrive at all times
    share = len(numbers) // 4
    for start in range(0, len(numbers), share):
        seen = await counted(values)
        with (tmp_path / "reader.log").open("ab") as log:
            reader = subprocess.Popen([OSRDYNE, "last-value"], stdout=log, stderr=log, env=environment, cwd=tmp_path)
        try:
            await fill(broker_settings.uri.get_secret_value(), stream, events(numbers[start : start + share]))
            async with asyncio.timeout(SOON):
                while (await counted(values)) == seen:  # it has begun: what follows is killed on its way
                    assert reader.poll() is None, (tmp_path / "reader.log").read_text()
                    await asyncio.sleep(generator.random() / 50)
        finally:
            reader.kill()
            await asyncio.to_thread(reader.wait)
    async with reading(settings):
        await until(lambda: shown(values), equals=newest(len(numbers) - 1))
        while (total := await counted(values)).events < len(numbers):
            await asyncio.sleep(0.02)
    # Each transaction counts its events, with its position: none was skipped, and none counted twice.
    assert total.events == len(numbers)
    await values.close()


@pytest.mark.proves("last-values/retention-removes-messages-last")
async def test_truncated_stream_is_read_from_its_first_message(log):
    await log.fill(0, SERIES, arguments=SMALL_SEGMENTS)
    async with reading(log.settings):
        await log.until_newest(SERIES - 1)
    await log.fill(SERIES, 3_000, arguments=SMALL_SEGMENTS)
    with capture_logs() as logs:
        async with reading(log.settings):
            await log.until_newest(2_999)
    [warning] = [one for one in logs if one["event"].startswith("messages were removed")]
    assert warning["first"] == SERIES
    assert (await counted(log.values)).lost == warning["last"] + 1 - SERIES


@pytest.mark.proves("last-values/stream-deleted-declared-again", "last-values/rabbitmq-closes-connection-last")
async def test_stream_declared_again_and_a_lost_connection_cost_no_value(broker_settings, pool_id, channel, tmp_path):
    settings = telemetry_settings(broker_settings, pool_id, last_values=in_file(tmp_path), partitions=2)
    first, second = (Log(settings, PoolNames(pool_id).log_stream(partition)) for partition in (0, 1))
    for log in (first, second):
        await log.fill(0)
    async with reading(settings):
        await second.fill(100)
        await second.until_newest(99)
        await channel.delete_queue(second.stream)
        # The other partition is read meanwhile.
        await first.fill(100, 110)
        await first.until_newest(109)
        await second.fill(110, 120)
        await second.until_newest(119)
        await close_connections(broker_settings.effective_management_uri(), name=f"osrdyne {pool_id} last-value")
        await second.fill(120, 130)
        await second.until_newest(129)
    assert (await counted(first.values)).lost == 0


@pytest.mark.proves("last-values/database-last-values-deleted", "last-values/database-last-values-locked")
async def test_locked_and_replaced_file_delay_values_and_lose_none(log, tmp_path):
    file = tmp_path / "last-values.db"
    await log.fill(10)
    with capture_logs() as logs:
        async with reading(log.settings):
            await log.until_newest(9)
            assert file.stat().st_mode & 0o777 == 0o600
            other = sqlite3.connect(file, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            await log.fill(10, 20)
            await until_logged(logs, "another program has locked it")
            assert await shown(log.values) == newest(9)
            other.execute("ROLLBACK")
            other.close()
            await log.until_newest(19)
            # The position goes with the file: the log is read again.
            for one in tmp_path.glob("last-values.db*"):
                one.unlink()
            await log.fill(20, 30)
            await log.until_newest(29)
    assert (await counted(log.values)).events == 30


@pytest.mark.proves("last-values/database-last-values-locked")
async def test_postgresql_that_restarts_delays_values_and_shows_no_password(log):
    with running_postgresql() as server, capture_logs() as logs:
        uri = server.new_database()
        chosen = LastValueSettings(store="postgresql", uri=SecretStr(uri))
        telemetry = log.settings.telemetry.model_copy(update={"last_values": chosen})
        log = Log(log.settings.model_copy(update={"telemetry": telemetry}), log.stream)
        await log.fill(10)
        async with reading(log.settings):
            await log.until_newest(9)
            await asyncio.to_thread(server.stop)
            await log.fill(10, 20)
            await until_logged(logs, "PostgreSQL cannot be used")
            with pytest.raises(LastValueStoreError, match=r"Check the server, and telemetry\.last_values\.uri"):
                await log.values.totals()
            await asyncio.to_thread(server.start)
            await log.until_newest(19)
            await log.values.close()
    assert uri.split("@")[0].rpartition(":")[2] not in str(logs)
