"""What a pooled process knows of itself: the memory of its processes, and the last log lines of each worker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from osrdyne.logs import configure_events, get_logger
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import MAX_LOG_LINES
from osrdyne_worker.pooled.log_lines import LogLines, bind_worker
from osrdyne_worker.pooled.memory import process_memory

HUNGRY = "import sys; data = bytearray(b'x') * (64 << 20); print('ready', flush=True); sys.stdin.read()"


def test_memory_contains_that_of_children() -> None:
    before, _ = process_memory()
    child = subprocess.Popen([sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        rss, pss = process_memory()
        assert before is not None
        assert rss is not None
        assert pss is not None
        assert rss - before > 60 << 20
        assert 60 << 20 < pss <= rss
        child.communicate()


def test_memory_is_unknown_without_proc(tmp_path: Path) -> None:
    assert process_memory(1, proc=tmp_path) == (None, None)


async def test_lines_belong_to_the_worker_that_logs_them() -> None:
    configure_events("info", as_json=True)
    lines = LogLines()
    lines.install()
    log = get_logger("test")

    async def work(worker_id: WorkerId, text: str) -> None:
        bind_worker(worker_id, f"key of {worker_id}")
        with ThreadPoolExecutor(1, initializer=bind_worker, initargs=(worker_id, "k")) as threads:
            await asyncio.create_task(asyncio.to_thread(log.info, f"{text} task"))
            await asyncio.get_running_loop().run_in_executor(threads, log.info, f"{text} thread")
        log.info("connected", uri="amqp://user:s3cret@host", text=text)

    for name in ("a", "b"):
        lines.begin(WorkerId(name))
    log.info("of the process")
    await asyncio.gather(work(WorkerId("a"), "first"), work(WorkerId("b"), "second"), work(WorkerId("c"), "third"))
    first, second = lines.end(WorkerId("a")), lines.end(WorkerId("b"))
    assert len(first) == len(second) == 3
    assert all("first" in line for line in first)
    assert all("second" in line for line in second)
    assert '"key": "key of a"' in first[0]
    assert "s3cret" not in "".join(first)
    assert lines.end(WorkerId("a")) == lines.end(WorkerId("c")) == ()


def test_only_the_last_lines_are_collected() -> None:
    lines = LogLines()
    lines.begin(WorkerId("a"))
    with structlog.contextvars.bound_contextvars(worker_id="a"):
        for number in range(100):
            lines(None, "info", f"line {number}")
    found = lines.end(WorkerId("a"))
    assert (len(found), found[-1]) == (MAX_LOG_LINES, "line 99")
