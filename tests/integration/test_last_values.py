"""The last-value reader on a real RabbitMQ: every value arrives, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from broker_api import close_connections
from filled_streams import SMALL_SEGMENTS, fill
from postgresql_server import running_postgresql
from pydantic import SecretStr
from structlog.testing import capture_logs
from test_telemetry import KEYS, ROUTES, telemetry_settings
from test_term import SOON, daemon_of
from typer.testing import CliRunner

from osrdyne.amqp import Message
from osrdyne.cli.main import full_command_line
from osrdyne.config.models import BrokerSettings, LastValueSettings, Settings
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


def settings_with(broker: BrokerSettings, pool: str, last_values: LastValueSettings, **telemetry: object) -> Settings:
    return telemetry_settings(broker, pool, last_values=last_values, **telemetry)


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


async def until_shown(values: LastValues, expected: dict[str, float]) -> None:
    async with asyncio.timeout(SOON):
        while await shown(values) != expected:
            await asyncio.sleep(0.02)


async def counted(values: LastValues) -> Counts:
    try:
        return await values.totals() or Counts()
    except LastValueStoreError:
        return Counts()


def newest(last: int) -> dict[str, float]:
    """The values after all events up to this number."""
    return {f"s{number % SERIES}": float(number) for number in range(last - SERIES + 1, last + 1)}


async def test_last_values_of_requests_are_in_api_metrics_and_lag(
    broker_settings, pool_id, channel, management, tmp_path
):
    names, settings = PoolNames(pool_id), settings_with(broker_settings, pool_id, in_file(tmp_path), partitions=2)
    body = b'[{"series": "t", "value": 1}, {"series": "t", "value": 2}, {"series": "u", "value": "on"}, 7]'
    async with daemon_of(settings) as running:
        await running.term.routing.routes.change(load_manifest(json.dumps({"routes": ROUTES})), author="me")
        async with httpx.AsyncClient(base_url=running.daemon.api.announced_url, trust_env=False, timeout=SOON) as http:
            before = await http.get("/v1/last", params={"key": KEYS[0]})
            assert (before.status_code, before.json()["code"]) == (503, "last-values-unavailable")
            async with reading(settings):
                for key in KEYS:
                    await channel.publish(Message(body), exchange=names.requests_exchange, routing_key=key)

                async def all_written() -> bool:
                    text = (await http.get("/metrics")).text
                    return f'osrdyne_last_value_events{{outcome="written"}} {2 * len(KEYS):.1f}' in text

                async def position_is_stored() -> bool:
                    found = await PositionStore(management, pool=pool_id).load()
                    return [one.reader for one in found if sum(one.offsets.values()) == len(KEYS)] == ["last-value"]

                async with asyncio.timeout(SOON):
                    while not (await all_written() and await position_is_stored()):
                        await asyncio.sleep(0.1)
            for key in KEYS:
                answer = (await http.get("/v1/last", params={"key": key})).json()
                assert [(one["series"], one["value"], one["value_text"]) for one in answer["values"]] == [
                    ("t", 2.0, None),
                    ("u", None, "on"),
                ]
            page = (await http.get("/v1/last", params={"key": KEYS[0], "limit": 1})).json()
            assert ([one["series"] for one in page["values"]], page["next"]) == (["t"], "t")
            page = (await http.get("/v1/last", params={"key": KEYS[0], "limit": 1, "after": "t"})).json()
            assert ([one["series"] for one in page["values"]], page["next"]) == (["u"], None)
            assert f'outcome="invalid"}} {len(KEYS):.1f}' in (await http.get("/metrics")).text
            command = ["last", KEYS[0], "--api", running.daemon.api.announced_url]
            shown = await asyncio.to_thread(CliRunner().invoke, full_command_line(), command)
            lines = [line.split()[:4] for line in shown.stdout.splitlines()]
            assert [line for line in lines if line and line[0] in {"t", "u"}] == [
                ["t", "2", "telemetry", "-"],
                ["u", "on", "telemetry", "-"],
            ]
            one = await asyncio.to_thread(CliRunner().invoke, full_command_line(), [*command, "u", "--json"])
            assert [value["value_text"] for value in json.loads(one.stdout)] == ["on"]
            none = await asyncio.to_thread(CliRunner().invoke, full_command_line(), ["last", "other", *command[2:]])
            assert none.output == "There is no last value of this key.\n"


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)])
@pytest.mark.proves("last-values/last-value-reader-killed")
async def test_reader_that_is_killed_again_and_again_loses_no_value(broker_settings, pool_id, tmp_path, store, request):
    chosen = in_file(tmp_path)
    if store == "postgresql":
        chosen = LastValueSettings(store="postgresql", uri=SecretStr(request.getfixturevalue("database")))
    settings = settings_with(broker_settings, pool_id, chosen, partitions=1)
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
    numbers = list(range(24_000))
    generator.shuffle(numbers)  # events of all ages arrive at all times
    share = len(numbers) // 6
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
        await until_shown(values, newest(len(numbers) - 1))
        async with asyncio.timeout(SOON):
            while (total := await counted(values)).events < len(numbers):
                await asyncio.sleep(0.02)
    # Each transaction counts its events, with its position: none was skipped, and none counted twice.
    assert total.events == len(numbers)
    await values.close()


@pytest.mark.proves("last-values/retention-removes-messages-last")
async def test_truncated_stream_is_read_from_its_first_message(broker_settings, pool_id, tmp_path):
    settings = settings_with(broker_settings, pool_id, in_file(tmp_path), partitions=1)
    values, stream = LastValues(settings), PoolNames(pool_id).log_stream(0)
    uri = broker_settings.uri.get_secret_value()
    await fill(uri, stream, events(range(SERIES)), arguments=SMALL_SEGMENTS)
    async with reading(settings):
        await until_shown(values, newest(SERIES - 1))
    await fill(uri, stream, events(range(SERIES, 3_000)), arguments=SMALL_SEGMENTS)
    with capture_logs() as logs:
        async with reading(settings):
            await until_shown(values, newest(2_999))
    [warning] = [one for one in logs if one["event"].startswith("messages were removed")]
    assert warning["first"] == SERIES
    assert (await counted(values)).lost == warning["last"] + 1 - SERIES


@pytest.mark.proves("last-values/stream-deleted-declared-again")
async def test_stream_that_is_declared_again_is_read_from_its_first_message(
    broker_settings, pool_id, channel, tmp_path
):
    settings = settings_with(broker_settings, pool_id, in_file(tmp_path), partitions=2)
    values, names = LastValues(settings), PoolNames(pool_id)
    uri = broker_settings.uri.get_secret_value()
    for partition in (0, 1):
        await fill(uri, names.log_stream(partition), [])
    async with reading(settings):
        await fill(uri, names.log_stream(1), events(range(100)))
        await until_shown(values, newest(99))
        await channel.delete_queue(names.log_stream(1))
        # The other partition is read meanwhile.
        await fill(uri, names.log_stream(0), events(range(100, 110)))
        await until_shown(values, newest(109))
        await fill(uri, names.log_stream(1), events(range(110, 120)))
        await until_shown(values, newest(119))
    assert (await counted(values)).lost == 0


@pytest.mark.proves("last-values/rabbitmq-closes-connection-last")
async def test_lost_connection_is_opened_again(broker_settings, pool_id, tmp_path):
    settings = settings_with(broker_settings, pool_id, in_file(tmp_path), partitions=1)
    values, stream = LastValues(settings), PoolNames(pool_id).log_stream(0)
    uri = broker_settings.uri.get_secret_value()
    await fill(uri, stream, [])
    async with reading(settings):
        await fill(uri, stream, events(range(10)))
        await until_shown(values, newest(9))

        management_uri = broker_settings.effective_management_uri()
        await close_connections(management_uri, name=f"osrdyne {pool_id} last-value")
        await fill(uri, stream, events(range(10, 20)))
        await until_shown(values, newest(19))


@pytest.mark.proves("last-values/database-last-values-deleted", "last-values/database-last-values-locked")
async def test_locked_and_replaced_file_delay_values_and_lose_none(broker_settings, pool_id, tmp_path):
    broker = broker_settings.model_copy(update={"retry_interval": 0.5})
    settings = settings_with(broker, pool_id, in_file(tmp_path), partitions=1)
    values, stream = LastValues(settings), PoolNames(pool_id).log_stream(0)
    uri, file = broker_settings.uri.get_secret_value(), tmp_path / "last-values.db"
    await fill(uri, stream, events(range(10)))
    with capture_logs() as logs:
        async with reading(settings):
            await until_shown(values, newest(9))
            assert file.stat().st_mode & 0o777 == 0o600
            other = sqlite3.connect(file, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            await fill(uri, stream, events(range(10, 20)))
            async with asyncio.timeout(SOON):
                while not [one for one in logs if "another program has locked it" in str(one.get("error"))]:
                    await asyncio.sleep(0.1)
            assert await shown(values) == newest(9)
            other.execute("ROLLBACK")
            other.close()
            await until_shown(values, newest(19))
            # The position goes with the file: the log is read again.
            for one in tmp_path.glob("last-values.db*"):
                one.unlink()
            await fill(uri, stream, events(range(20, 30)))
            await until_shown(values, newest(29))
    assert (await counted(values)).events == 30


@pytest.mark.proves("last-values/database-last-values-locked")
async def test_postgresql_that_restarts_delays_values_and_shows_no_password(broker_settings, pool_id):
    broker = broker_settings.model_copy(update={"retry_interval": 0.5})
    with running_postgresql() as server:
        chosen = LastValueSettings(store="postgresql", uri=SecretStr(server.new_database()))
        settings = settings_with(broker, pool_id, chosen, partitions=1)
        values, stream = LastValues(settings), PoolNames(pool_id).log_stream(0)
        uri = broker_settings.uri.get_secret_value()
        await fill(uri, stream, events(range(10)))
        with capture_logs() as logs:
            async with reading(settings):
                await until_shown(values, newest(9))
                await asyncio.to_thread(server.stop)
                await fill(uri, stream, events(range(10, 20)))
                async with asyncio.timeout(SOON):
                    while not [one for one in logs if "PostgreSQL cannot be used" in str(one.get("error"))]:
                        await asyncio.sleep(0.1)
                with pytest.raises(LastValueStoreError, match=r"Check the server, and telemetry\.last_values\.uri"):
                    await values.totals()
                await asyncio.to_thread(server.start)
                await until_shown(values, newest(19))
                await values.close()
    assert (chosen.uri or SecretStr("")).get_secret_value().split("@")[0].rpartition(":")[2] not in str(logs)
