"""`osrdyne telemetry simulate`: its options, what it prints, and Ctrl-C."""

import asyncio
import json
import os
import signal
import sys
from fractions import Fraction

import pytest
from client_responder import Responder, silence

from osrdyne.cli.main import execute
from osrdyne.telemetry.simulator import Simulation, simulate

PATIENCE = 300.0
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
    *("--start", "2026-11-23T08:00:00Z", "--alarms", "10/min", "--duplicates", "0.1", "--invalid", "0.1"),
    *("--oversized", "0.01"),
]


@pytest.mark.usefixtures("processes")
async def test_second_ctrl_c_does_not_wait_for_answers(broker_settings, pool_id, tmp_path):
    uri = broker_settings.uri.get_secret_value()
    endless = ("--key", "plant", "--rate", "1/h", "--duration", "9h", "--timeout", "9h")
    async with Responder(uri, pool_id, ["plant"], silence) as responder, asyncio.timeout(PATIENCE):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "osrdyne.cli.main", "telemetry", "simulate", "--json", *endless),
            env={**os.environ, "OSRDYNE__BROKER__URI": uri, "OSRDYNE__POOL__ID": pool_id},
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        await responder.requests.get()
        process.send_signal(signal.SIGINT)
        assert b"Ctrl-C" in await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    summary = json.loads(out)
    assert (process.returncode, summary["interrupted"], summary["sent"], summary["confirmed"]) == (130, True, 1, 0)


def test_wrong_options_are_named(capsys):
    wrong = {"--rate": "7/week", "--size": "100", "--late": "2", "--out-of-order": "-1", "--start": "soon"}
    wrong |= {"--speed": "-1", "--events": "inf", "--key": "x" * 300, "--timeout": "0s"}
    for option, value in wrong.items():
        assert execute(["telemetry", "simulate", option, value], debug=False) == 2
        assert option in capsys.readouterr().err


def test_messages_are_printed_as_they_would_be_sent(capsys):
    assert execute(["telemetry", "simulate", *OPTIONS, "--print"], debug=False) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [(one.key, one.message_id, one.body.decode()) for one in simulate(SIMULATION)]
    assert [(one["key"], one["message_id"], one["body"]) for one in printed] == expected
