"""`osrdyne call`, `telemetry replay`, `telemetry resend` and `telemetry simulate` against real RabbitMQ."""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import structlog
from broker_api import PATIENCE
from client_responder import Answer, echo, responder_in_a_thread, silence, waiting
from filled_streams import fill

from osrdyne.amqp import Message
from osrdyne.cli.main import execute
from osrdyne.protocol.messages import ARROW_TYPE, PATH_HEADER, Request, Response
from osrdyne.protocol.names import PoolNames
from osrdyne.telemetry.simulator import Simulation, simulate

pytestmark = pytest.mark.one_rabbitmq

ROWS = {"columns": [{"name": "n", "type": "bigint"}], "rows": [[42]], "truncated": False}


@dataclass
class Cli:
    """`osrdyne call` and `osrdyne telemetry` in this process, for one pool."""

    uri: str
    pool: str
    environment: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        self.environment.setenv("OSRDYNE__BROKER__URI", self.uri)
        self.environment.setenv("OSRDYNE__POOL__ID", self.pool)
        code = execute([*([] if arguments[0] == "telemetry" else ["call"]), *arguments], debug=False)
        return code, *self.captured.readouterr()

    def answered(self, answer: Answer = echo, keys: Iterable[str] = ("k",)) -> AbstractContextManager[Any]:
        return responder_in_a_thread(self.uri, self.pool, answer, keys=keys)


@pytest.fixture
def cli(broker, pool_id, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    yield Cli(broker.amqp_uri, pool_id, monkeypatch, capfd)
    structlog.reset_defaults()


def test_rows_are_a_table_and_json_is_the_body_alone(cli):
    with cli.answered():
        code, out, errors = cli.run("k", "/sql", "-d", json.dumps(ROWS))
        assert (code, errors, out.split()) == (0, "1 row\n", ["n", "──", "42"])
        assert cli.run("k", "/sql", "-d", "[1, 2]", "-o", "json") == (0, "[1, 2]\n", "")


def _stream(request: Request) -> list[Response]:
    """Two parts and an end if the caller asks for a stream; the second one is lost if the body says so."""
    if request.headers.get("x-stream-credit") != 4 or request.accept != ARROW_TYPE:
        return [Response("error")]
    headers: dict[str, object] = {"x-stream-id": "a" * 32, "x-stream-attempt": 1}
    parts = [Response(body=b"part", progress=True, headers={**headers, "x-stream-part": number}) for number in (1, 2)]
    end = Response(body=b" end", content_type=ARROW_TYPE, headers={**headers, "x-stream-parts": 2})
    return [*parts[: 1 if b"lost" in request.body else 2], end]


def test_streamed_answer_is_written_part_by_part(cli):
    with cli.answered(_stream):
        assert cli.run("k", "/sql", "--stream") == (0, "partpart end", "")
        code, out, errors = cli.run("k", "/sql", "--stream", "-d", '"lost"')
    assert (code, out, "lost" in errors) == (1, "part", True)
    code, _, errors = cli.run("k", "/sql", "--stream", "-o", "json")
    assert (code, "-o json" in errors) == (2, True)


def _fail(request: Request) -> list[Response]:
    step = [Response(body=b'{"step": 1, "of": 2}', progress=True)] if request.wants_progress else []
    return [*step, Response("start-failed", detail="It died.\nlast words")]


def test_error_answer_and_progress_go_to_standard_error(cli):
    with cli.answered(_fail):
        code, out, errors = cli.run("k", "/sql", "--progress")
    assert (code, out) == (1, "")
    assert [part in errors for part in ("1 of 2", "It died.", "  last words", "503")] == [True] * 4


def test_no_answer_in_time_and_unreachable_broker_have_exit_codes(cli, unused_tcp_port):
    with cli.answered(silence):
        code, out, errors = cli.run("k", "/sql", "--timeout", "2s", "--set", "requests.max_clock_skew=0s")
    assert (code, out, len(errors.splitlines())) == (3, "", 1)
    cli.uri = f"amqp://me:s3cret@127.0.0.1:{unused_tcp_port}/"
    code, out, errors = cli.run("k", "/sql")
    assert (code, out, len(errors.splitlines()), "s3cret" in errors) == (4, "", 1, False)


def test_wrong_use_is_exit_code_2_without_a_traceback(cli):
    """No path, a bad key, a bad pool, and an unknown pool."""
    for arguments in (["k"], ["x" * 256, "/sql"], ["k", "/sql", "--pool", "No"], ["k", "/sql"]):
        code, out, errors = cli.run(*arguments)
        assert (code, out, "Traceback" in errors, bool(errors)) == (2, "", False, True), arguments


@pytest.mark.usefixtures("processes")
def test_ctrl_c_cancels_the_request_and_reports_it(cli):
    arrived = threading.Event()
    command = [sys.executable, "-m", "osrdyne.cli.main", "call", "k", "/sql"]
    options = {"env": {**os.environ, "OSRDYNE__BROKER__URI": cli.uri, "OSRDYNE__POOL__ID": cli.pool}, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with cli.answered(waiting(arrived)) as cancels, subprocess.Popen(command, **options) as process:
        assert arrived.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE)
        cancel = cancels.get(timeout=PATIENCE)
    assert (process.returncode, out, "Traceback" in errors, "cancellation" in errors) == (130, "", False, True)
    assert cancel.routing_key == "k"


def test_replay_requests_each_partition_until_its_end(cli):
    requests = []

    def answer(request: Request) -> list[Response]:
        body = json.loads(request.body)
        stop = 30 + 20 * sum(one == (request.key, request.path, body) for one in requests)
        requests.append((request.key, request.path, body))
        offsets = {"start": stop - 20, "stop": stop, "end": 70}
        document = {"rows": 40, "invalid": 1, "offsets": offsets}
        return [Response(body=json.dumps(document).encode(), content_type="application/json")]

    command = ["telemetry", "replay", "again", "--from", "10", "--to", "2026-11-22T10:00:00Z", "-o", "json"]
    with cli.answered(answer, keys=["again/0", "again/1"]):
        code, out, errors = cli.run(*command, "--set", "telemetry.partitions=2")
    assert code == 0, errors
    found = [(one["partition"], one["rows"], one["invalid"], one["offset"]) for one in json.loads(out)]
    assert found == [(0, 120, 3, 70), (1, 120, 3, 70)]
    body = {"from": 10, "to": "2026-11-22T10:00:00Z"}
    assert requests == [(f"again/{partition}", "/replay", body) for partition in (0, 0, 0, 1, 1, 1)]
    assert "partition 1: 50 of 70" in errors


@pytest.mark.proves("telemetry/osrdyne-telemetry-resend-interrupted")
def test_resend_sends_a_range_of_the_log_to_another_pool(cli):
    received: queue.SimpleQueue[tuple[object, ...]] = queue.SimpleQueue()

    def answer(request: Request) -> list[Response]:
        received.put((request.key, request.path, request.body, request.headers["x-telemetry-replay"]))
        return []

    def messages(partition):
        headers = {"x-osrdyne-key": f"k{partition}", PATH_HEADER: "/alarm"}
        return [
            Message(b"%d" % number, headers={**headers, "x-osrdyne-enqueued": 1_000 * number}, message_id=f"m{number}")
            for number in range(10)
        ]

    streams = [PoolNames(cli.pool).log_stream(partition) for partition in (0, 1)]
    for partition, stream in enumerate(streams):
        asyncio.run(fill(cli.uri, stream, messages(partition)))
    other, state = f"{cli.pool}x"[:32], "state"
    command = ["telemetry", "resend", "--to-pool", other, "--from", "1970-01-01T00:00:02.5Z", "--to", "7"]
    command += ["--rate", "0", "--state", state, "--set", "telemetry.partitions=2"]
    code, _, errors = cli.run(*command)
    assert (code, other in errors) == (2, True)
    with responder_in_a_thread(cli.uri, other, answer, keys=["k0", "k1"]):
        code, out, errors = cli.run(*command)
        assert (code, out) == (0, f"8 messages sent to {other}.\n"), errors
        code, out, errors = cli.run(*command)
        assert (code, out) == (0, f"0 messages sent to {other}.\n"), errors
        found = sorted(received.get(timeout=PATIENCE) for _ in range(8))
    places = [(one, number) for one in (0, 1) for number in range(3, 7)]
    assert found == [(f"k{one}", "/alarm", b"%d" % number, f"{streams[one]}/{number}") for one, number in places]
    assert received.empty()
    code, _, errors = cli.run("telemetry", "resend", "--to-pool", cli.pool)
    assert (code, bool(errors)) == (2, True)


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
