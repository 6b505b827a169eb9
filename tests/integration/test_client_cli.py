"""`osrdyne call` as a process of its own, against real RabbitMQ."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from client_responder import echo, responder_in_a_thread, silence

from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.messages import Request, Response

PATIENCE = 120.0
"""Seconds for anything that must happen; a test that needs them has failed."""
ROWS = {"columns": [{"name": "n", "type": "bigint"}], "rows": [[42]], "truncated": False}


def start(uri: str, pool: str, *arguments: str, directory: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OSRDYNE__BROKER__URI": uri, "OSRDYNE__POOL__ID": pool}
    command = [sys.executable, "-m", "osrdyne.cli.main", "call", *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def call(uri: str, pool: str, *arguments: str, directory: Path) -> tuple[int, str, str]:
    with start(uri, pool, *arguments, directory=directory) as process:
        out, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, out, errors


def test_rows_are_printed_as_a_table(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    with responder_in_a_thread(broker.amqp_uri, pool_id):
        code, out, errors = call(broker.amqp_uri, pool_id, "k", "/sql", "-d", json.dumps(ROWS), directory=tmp_path)
    assert (code, errors, out.split()) == (0, "1 row\n", ["n", "──", "42"])


def test_json_output_is_the_body_and_nothing_else(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    with responder_in_a_thread(broker.amqp_uri, pool_id):
        printed = call(broker.amqp_uri, pool_id, "k", "/sql", "-d", "[1, 2]", "-o", "json", directory=tmp_path)
    assert printed == (0, "[1, 2]\n", "")


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
    assert "asked to cancel" in errors
    assert cancel.routing_key == "k"


def test_header_and_no_activate_reach_the_request(broker: EmbeddedBroker, pool_id: str, tmp_path: Path) -> None:
    seen: list[Request] = []

    def note(request: Request) -> list[Response]:
        seen.append(request)
        return echo(request)

    with responder_in_a_thread(broker.amqp_uri, pool_id, note):
        call(broker.amqp_uri, pool_id, "k", "/p", "-H", "mine=1", "--no-activate", directory=tmp_path)
    assert (seen[0].path, seen[0].headers["mine"], seen[0].no_activate, seen[0].body) == ("/p", "1", True, b"")
