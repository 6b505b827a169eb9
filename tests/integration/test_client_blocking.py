"""The blocking client against real RabbitMQ: threads, a running loop, Ctrl-C, and a clean end of the interpreter."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from broker_api import PATIENCE
from client_responder import JOBS, responder_in_a_thread, waiting, with_progress

from osrdyne.client import Client, ClientClosedError, ConnectionLostError, Reply
from osrdyne.protocol.messages import ARROW_TYPE, JSON_TYPE, Request, Response
from osrdyne.protocol.progress import JobProgress


def test_calls_from_several_threads_get_their_own_answers(broker, pool_id):
    with (
        responder_in_a_thread(broker.amqp_uri, pool_id),
        Client(broker.amqp_uri, pool_id) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        replies = list(threads.map(lambda number: client.call("k", "/echo", number, timeout=PATIENCE), range(64)))
    assert [reply.json() for reply in replies] == list(range(64))


def in_child(body: Callable[[], None]) -> int:
    """Run it in a forked process; its exit code, 0 unless it has raised. The process ends after two minutes."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_process_connects_anew_and_the_parent_goes_on(broker, pool_id):
    """As in gunicorn with `preload_app`."""
    with responder_in_a_thread(broker.amqp_uri, pool_id), Client(broker.amqp_uri, pool_id) as client:

        def ask(text):
            assert client.call("k", "/echo", text, timeout=PATIENCE).body == text

        ask(b"parent")
        assert in_child(lambda: ask(b"child")) == 0
        assert in_child(client.close) == 0, "a child that has not used it"
        ask(b"parent again")

    def is_refused():
        with pytest.raises(ClientClosedError):
            ask(b"closed")

    is_refused()
    assert in_child(is_refused) == 0


async def test_progress_and_stream_run_in_the_callers_thread_also_where_a_loop_runs(broker, pool_id):
    seen: list[Reply] = []
    with responder_in_a_thread(broker.amqp_uri, pool_id, with_progress), Client(broker.amqp_uri, pool_id) as client:

        def ask_again(reply):
            seen.append(client.call("k", timeout=PATIENCE))  # would wait for itself in the client's own thread

        assert client.call("k", on_progress=ask_again, timeout=PATIENCE).text == "last"
        jobs: list[tuple[JobProgress, int]] = []

        def note(progress):
            jobs.append((progress, threading.get_ident()))

        assert client.call("k", on_jobs=note, timeout=PATIENCE).text == "last"
        assert jobs == [(JOBS, threading.get_ident())]
        assert [reply.text for reply in client.stream("k", timeout=PATIENCE)] == ["0", "1", "2", "last"]
    assert [reply.text for reply in seen] == ["last"] * 3


def test_closing_ends_the_calls_of_other_threads(broker, pool_id):
    arrived = threading.Event()
    client = Client(broker.amqp_uri, pool_id).open()
    with responder_in_a_thread(broker.amqp_uri, pool_id, waiting(arrived)), ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.call, "k", timeout=PATIENCE)
        assert arrived.wait(PATIENCE)
        client.close()
        with pytest.raises(ConnectionLostError):
            call.result(PATIENCE)


_FORGETS_TO_CLOSE = """
import sys
from osrdyne.client import Client
client = Client(sys.argv[1], sys.argv[2]).open()
print(client.call("k", "/echo", "hello", timeout=120).json(), flush=True)
"""


def test_interpreter_ends_cleanly_with_an_unclosed_client(broker, pool_id):
    with responder_in_a_thread(broker.amqp_uri, pool_id):
        command = [sys.executable, "-W", "error", "-c", _FORGETS_TO_CLOSE, broker.amqp_uri, pool_id]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


_WAITS = """
import sys
from osrdyne.client import Client
with Client(sys.argv[1], sys.argv[2]) as client:
    client.call("k", timeout=120)
"""


def test_ctrl_c_ends_a_blocking_call(broker, pool_id):
    arrived = threading.Event()
    with responder_in_a_thread(broker.amqp_uri, pool_id, waiting(arrived)):
        command = [sys.executable, "-c", _WAITS, broker.amqp_uri, pool_id]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert arrived.wait(PATIENCE)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python-client.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def _answer(request: Request) -> list[Response]:
    if b"drop" in request.body:
        return [Response("error", body=b'{"error": {"code": "refused", "message": "only SELECT"}}')]
    if request.accept == ARROW_TYPE:
        table, sink = pa.table({"n": [1, 2]}), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return [Response(body=sink.getvalue().to_pybytes(), content_type=ARROW_TYPE)]
    return [Response(body=b"half", progress=True), Response(body=b'{"rows": [[42]]}', content_type=JSON_TYPE)]


@pytest.mark.one_rabbitmq
def test_examples_of_the_client_page_run(broker, pool_id):
    assert len(EXAMPLES) >= 5
    page = "".join(f"exec({code!r}, {{}})\nprint('--')\n" for code in EXAMPLES)
    page = page.replace("amqp://guest:guest@localhost:5672/", broker.amqp_uri).replace('"osrdyne")', f'"{pool_id}")')
    with responder_in_a_thread(broker.amqp_uri, pool_id, _answer, keys=("tpch/sf=0.01", "tpch/sf=0.1")):
        done = subprocess.run([sys.executable, "-W", "error", "-c", page], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(re.search(r"42|2|refused", shown) for shown in done.stdout.split("--")[:-1])
