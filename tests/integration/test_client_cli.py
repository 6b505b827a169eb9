"""`osrdyne call` as a process of its own, against real RabbitMQ."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from client_responder import echo, responder_in_a_thread, silence
from filled_streams import fill

from osrdyne.amqp import Message
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.messages import ARROW_TYPE, PATH_HEADER, Request, Response
from osrdyne.protocol.names import PoolNames

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("processes")]

PATIENCE = 120.0
"""Seconds for anything that must happen; a test that needs them has failed."""
ROWS = {"columns": [{"name": "n", "type": "bigint"}], "rows": [[42]], "truncated": False}


def start(uri: str, pool: str, *arguments: str, directory: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OSRDYNE__BROKER__URI": uri, "OSRDYNE__POOL__ID": pool}
    arguments = arguments if arguments[0] == "telemetry" else ("call", *arguments)
    command = [sys.executable, "-m", "osrdyne.cli.main", *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def call(uri: str, pool: str, *arguments: str, directory: Path) -> tuple[int, str, str]:
    with start(uri, pool, *arguments, directory=directory) as process:
        out, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, out, errors


@pytest.mark.nightly
def test_rows_are_printed_as_a_table(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    with responder_in_a_thread(broker.amqp_uri, pool_id):
        code, out, errors = call(broker.amqp_uri, pool_id, "k", "/sql", "-d", json.dumps(ROWS), directory=tmp_path)
    assert (code, errors, out.split()) == (0, "1 row\n", ["n", "──", "42"])


def test_json_output_is_the_body_and_nothing_else(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    with responder_in_a_thread(broker.amqp_uri, pool_id):
        printed = call(broker.amqp_uri, pool_id, "k", "/sql", "-d", "[1, 2]", "-o", "json", directory=tmp_path)
    assert printed == (0, "[1, 2]\n", "")


def _stream(request: Request) -> list[Response]:
    """Two parts and an end if the caller asks for a stream; the second one is lost if the body says so."""
    if request.headers.get("x-stream-credit") != 4 or request.accept != ARROW_TYPE:
        return [Response("error")]
    headers: dict[str, object] = {"x-stream-id": "a" * 32, "x-stream-attempt": 1}
    parts = [Response(body=b"part", progress=True, headers={**headers, "x-stream-part": number}) for number in (1, 2)]
    end = Response(body=b" end", content_type=ARROW_TYPE, headers={**headers, "x-stream-parts": 2})
    return [*parts[: 1 if b"lost" in request.body else 2], end]


def test_streamed_answer_is_written_part_by_part(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    with responder_in_a_thread(broker.amqp_uri, pool_id, _stream):
        printed = call(broker.amqp_uri, pool_id, "k", "/sql", "--stream", directory=tmp_path)
        code, out, errors = call(broker.amqp_uri, pool_id, "k", "/sql", "--stream", "-d", '"lost"', directory=tmp_path)
    assert printed == (0, "partpart end", "")
    assert (code, out) == (1, "part")
    assert "part of the streamed answer was lost" in errors
    code, _, errors = call(broker.amqp_uri, pool_id, "k", "/sql", "--stream", "-o", "json", directory=tmp_path)
    assert (code, "leave out -o json" in errors) == (2, True)


def _fail(request: Request) -> list[Response]:
    step = [Response(body=b'{"step": 1, "of": 2}', progress=True)] if request.wants_progress else []
    return [*step, Response("start-failed", detail="It died.\nlast words")]


def test_error_answer_and_progress_go_to_standard_error(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    with responder_in_a_thread(broker.amqp_uri, pool_id, _fail):
        code, out, errors = call(broker.amqp_uri, pool_id, "k", "/sql", "--progress", directory=tmp_path)
    assert (code, out) == (1, "")
    assert errors.splitlines() == [
        "1 of 2",
        "The worker could not be started: It died.",
        "The last lines of its log:",
        "  last words",
        "Code 503.",
    ]


@pytest.mark.nightly
def test_no_answer_in_time_is_exit_code_3(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    no_skew = ("--set", "requests.max_clock_skew=0s")
    with responder_in_a_thread(broker.amqp_uri, pool_id, silence):
        code, out, errors = call(broker.amqp_uri, pool_id, "k", "/sql", "--timeout", "2s", *no_skew, directory=tmp_path)
    assert (code, out, errors) == (3, "", "The request was given up after 2 s; there was no answer.\n")


def test_unreachable_broker_is_exit_code_4(unused_tcp_port: int, tmp_path: Path) -> None:
    uri = f"amqp://me:s3cret@127.0.0.1:{unused_tcp_port}/"
    code, out, errors = call(uri, "pool", "k", "/sql", directory=tmp_path)
    assert (code, out, len(errors.splitlines()), "s3cret" in errors) == (4, "", 1, False)


@pytest.mark.parametrize(
    "arguments",
    [("k",), ("k", "/sql", "-d", "{"), ("x" * 256, "/sql"), ("k", "/sql", "--pool", "No"), ("k", "/sql")],
    ids=["no path", "bad body", "bad key", "bad pool", "unknown pool"],
)
def test_wrong_use_is_exit_code_2_without_a_traceback(
    broker: EmbeddedBroker, pool_id: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    code, out, errors = call(broker.amqp_uri, pool_id, *arguments, directory=tmp_path)
    assert (code, out, "Traceback" in errors, bool(errors)) == (2, "", False, True)


def test_ctrl_c_cancels_the_request_and_reports_it(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    arrived = threading.Event()

    def keep_waiting(request: Request) -> list[Response]:
        arrived.set()
        return []

    with (
        responder_in_a_thread(broker.amqp_uri, pool_id, keep_waiting) as cancels,
        start(broker.amqp_uri, pool_id, "k", "/sql", directory=tmp_path) as process,
    ):
        assert arrived.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE)
        cancel = cancels.get(timeout=PATIENCE)
    assert (process.returncode, out, "Traceback" in errors) == (130, "", False)
    assert "a cancellation was sent" in errors
    assert cancel.routing_key == "k"


@pytest.mark.nightly
def test_header_and_no_activate_reach_the_request(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    seen: list[Request] = []

    def note(request: Request) -> list[Response]:
        seen.append(request)
        return echo(request)

    with responder_in_a_thread(broker.amqp_uri, pool_id, note):
        call(
            broker.amqp_uri,
            pool_id,
            "k",
            "/p",
            "-H",
            "mine=1",
            "--no-activate",
            "--data-version",
            "7",
            directory=tmp_path,
        )
    assert (seen[0].path, seen[0].headers["mine"], seen[0].no_activate, seen[0].body) == ("/p", "1", True, b"")
    assert seen[0].headers["x-data-version"] == 7


def test_replay_requests_each_partition_until_its_end(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    requests = []

    def answer(request: Request) -> list[Response]:
        body = json.loads(request.body)
        stop = 30 + 20 * sum(one == (request.key, request.path, body) for one in requests)
        requests.append((request.key, request.path, body))
        offsets = {"start": stop - 20, "stop": stop, "end": 70}
        document = {"rows": 40, "invalid": 1, "offsets": offsets}
        return [Response(body=json.dumps(document).encode(), content_type="application/json")]

    command = ["telemetry", "replay", "again", "--from", "10", "--to", "2026-11-22T10:00:00Z", "-o", "json"]
    with (
        responder_in_a_thread(broker.amqp_uri, pool_id, answer, keys=["again/0", "again/1"]),
        start(broker.amqp_uri, pool_id, *command, "--set", "telemetry.partitions=2", directory=tmp_path) as one,
    ):
        out, errors = one.communicate(timeout=PATIENCE)
    assert one.returncode == 0, errors
    assert [(one["partition"], one["rows"], one["invalid"], one["offset"]) for one in json.loads(out)] == [
        (0, 120, 3, 70),
        (1, 120, 3, 70),
    ]
    body = {"from": 10, "to": "2026-11-22T10:00:00Z"}
    assert requests == [(f"again/{partition}", "/replay", body) for partition in (0, 0, 0, 1, 1, 1)]
    assert "partition 1: 50 of 70" in errors


@pytest.mark.nightly
def test_replay_names_the_pool_whose_workers_are_not_those_of_the_ingest(
    broker: EmbeddedBroker, pool_id: str, tmp_path: Path
) -> None:
    with responder_in_a_thread(broker.amqp_uri, pool_id, lambda request: [Response(body=b"[1]")], keys=["again/0"]):
        code, out, errors = call(
            broker.amqp_uri, pool_id, "telemetry", "replay", "again", "--partition", "0", directory=tmp_path
        )
    assert (code != 0, out, "Traceback" in errors) == (True, "", False)
    assert f"The workers of the pool {pool_id} must run" in errors


@pytest.mark.proves("telemetry/osrdyne-telemetry-resend-interrupted")
def test_resend_sends_a_range_of_the_log_to_another_pool(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    received: queue.SimpleQueue[tuple[object, ...]] = queue.SimpleQueue()

    def answer(request: Request) -> list[Response]:
        received.put((request.key, request.path, request.body, request.headers["x-telemetry-replay"]))
        return []

    def messages(partition: int) -> list[Message]:
        return [
            Message(
                b"%d" % number,
                headers={"x-osrdyne-key": f"k{partition}", "x-osrdyne-enqueued": 1_000 * number, PATH_HEADER: "/alarm"},
                message_id=f"m{partition}-{number}",
            )
            for number in range(10)
        ]

    streams = [PoolNames(pool_id).log_stream(partition) for partition in (0, 1)]
    for partition, stream in enumerate(streams):
        asyncio.run(fill(broker.amqp_uri, stream, messages(partition)))
    other, state = f"{pool_id}x"[:32], tmp_path / "state"
    command = ["telemetry", "resend", "--to-pool", other, "--from", "1970-01-01T00:00:02.5Z", "--to", "7"]
    command += ["--rate", "0", "--state", str(state), "--set", "telemetry.partitions=2"]
    code, _, errors = call(broker.amqp_uri, pool_id, *command, directory=tmp_path)
    assert (code, f"RabbitMQ has no pool {other}" in errors) == (2, True)
    with responder_in_a_thread(broker.amqp_uri, other, answer, keys=["k0", "k1"]):
        code, out, errors = call(broker.amqp_uri, pool_id, *command, directory=tmp_path)
        assert (code, out) == (0, f"8 messages sent to {other}.\n"), errors
        code, out, errors = call(broker.amqp_uri, pool_id, *command, directory=tmp_path)
        assert (code, out) == (0, f"0 messages sent to {other}.\n"), errors
        found = sorted(received.get(timeout=PATIENCE) for _ in range(8))
    expected = [
        (f"k{one}", "/alarm", b"%d" % number, f"{streams[one]}/{number}") for one in (0, 1) for number in range(3, 7)
    ]
    assert found == sorted(expected)
    assert received.empty()
    code, _, errors = call(broker.amqp_uri, pool_id, "telemetry", "resend", "--to-pool", pool_id, directory=tmp_path)
    assert (code, "would write the messages to its log again" in errors) == (2, True)
