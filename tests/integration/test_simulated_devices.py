"""`osrdyne telemetry simulate` as a process of its own: its messages are in the log of a daemon on a real RabbitMQ."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from client_responder import Responder, silence
from test_telemetry import ROUTES, telemetry_settings
from test_term import daemon_of

from osrdyne.amqp import ConnectionOptions
from osrdyne.amqp.streams import StreamConnection
from osrdyne.cli.main import execute
from osrdyne.config.models import BrokerSettings
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.telemetry import KEY_HEADER
from osrdyne.telemetry.simulator import Simulation, simulate

pytestmark = pytest.mark.usefixtures("processes")

PATIENCE = 300.0
START = "2026-11-23T08:00:00Z"
SIMULATION = Simulation(
    devices=7,
    sites=2,
    messages_a_minute=Fraction(277),
    events=Fraction(5, 2),
    event_bytes=500,
    seed=3,
    start_ms=1_795_420_800_000,
    alarms_a_minute=Fraction(10),
    duplicates=0.1,
    invalid=0.1,
    oversized=0.01,
)
OPTIONS = [
    *("--devices", "7", "--sites", "2", "--rate", "277", "--events", "2.5", "--size", "500", "--seed", "3"),
    *("--start", START, "--alarms", "10/min", "--duplicates", "0.1", "--invalid", "0.1", "--oversized", "0.01"),
]


async def start(
    broker: BrokerSettings, pool: str, *options: str, directory: Path, stderr: int | None = None
) -> asyncio.subprocess.Process:
    uri = broker.uri.get_secret_value()
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "osrdyne.cli.main", "telemetry", "simulate", "--json", *options),
        env={**os.environ, "OSRDYNE__BROKER__URI": uri, "OSRDYNE__POOL__ID": pool},
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, dict[str, Any]]:
    async with asyncio.timeout(PATIENCE):
        out, _ = await process.communicate()
    return process.returncode, json.loads(out)


@pytest.mark.nightly
async def test_messages_are_in_the_log_to_the_byte(
    broker_settings: BrokerSettings, pool_id: str, tmp_path: Path
) -> None:
    names = PoolNames(pool_id)
    async with daemon_of(telemetry_settings(broker_settings, pool_id, partitions=2)) as running:
        await running.term.routing.routes.change(load_manifest(json.dumps({"routes": ROUTES})), author="me")
        process = await start(broker_settings, pool_id, *OPTIONS, "--speed", "0", directory=tmp_path)
        code, summary = await finish(process)
        options = ConnectionOptions(uri=broker_settings.uri.get_secret_value())
        found = []
        async with await StreamConnection.open(options, silence=PATIENCE) as streams:
            for partition in (0, 1):
                bounds = await streams.bounds(names.log_stream(partition))
                assert bounds is not None
                async for several in streams.read(names.log_stream(partition), bounds):
                    found += [(one.headers[KEY_HEADER], one.message_id, one.body) for one in several]
    messages = list(simulate(SIMULATION))
    assert (code, summary["sent"], summary["confirmed"]) == (0, len(messages), len(messages))
    assert summary["kinds"]["alarm"]["confirmed"] == 10
    assert sorted(found) == sorted((one.key, one.message_id, one.body) for one in messages)


@pytest.mark.nightly
async def test_ctrl_c_prints_the_summary(broker_settings: BrokerSettings, pool_id: str, tmp_path: Path) -> None:
    async with Responder(broker_settings.uri.get_secret_value(), pool_id, ["plant"]) as responder:
        endless = ("--key", "plant", "--rate", "1/h", "--duration", "9h", "--alarms", "1/h")
        process = await start(broker_settings, pool_id, *endless, directory=tmp_path)
        async with asyncio.timeout(PATIENCE):
            requests = [(await responder.requests.get()).to_request(now_ms=0) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        code, summary = await finish(process)
    assert (code, summary["interrupted"], summary["sent"], summary["confirmed"]) == (130, True, 2, 2)
    assert [(one.path, one.headers.get("level")) for one in requests] == [("/telemetry", None), ("/alarm", "alarm")]


async def test_second_ctrl_c_does_not_wait_for_answers(
    broker_settings: BrokerSettings, pool_id: str, tmp_path: Path
) -> None:
    async with Responder(broker_settings.uri.get_secret_value(), pool_id, ["plant"], silence) as responder:
        endless = ("--key", "plant", "--rate", "1/h", "--duration", "9h", "--timeout", "9h")
        process = await start(broker_settings, pool_id, *endless, directory=tmp_path, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            await responder.requests.get()
            process.send_signal(signal.SIGINT)
            assert b"Ctrl-C" in await process.stderr.readline()
            process.send_signal(signal.SIGINT)
        code, summary = await finish(process)
    assert (code, summary["interrupted"], summary["sent"], summary["confirmed"]) == (130, True, 1, 0)


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"--rate": "7/week", "--size": "100", "--late": "2", "--out-of-order": "-1", "--start": "soon"}
    wrong |= {"--speed": "-1", "--events": "inf", "--key": "x" * 300, "--timeout": "0s"}
    for option, value in wrong.items():
        assert execute(["telemetry", "simulate", option, value], debug=False) == 2
        assert option in capsys.readouterr().err


def test_messages_are_printed_as_they_would_be_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["telemetry", "simulate", *OPTIONS, "--print"], debug=False) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [(one.key, one.message_id, one.body.decode()) for one in simulate(SIMULATION)]
    assert [(one["key"], one["message_id"], one["body"]) for one in printed] == expected
