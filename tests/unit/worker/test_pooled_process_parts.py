"""What a pooled process knows of itself: the memory of its processes, and the last log lines of each worker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog

from osrdyne.logs import configure_events, get_logger
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import MAX_LOG_LINES
from osrdyne_worker.pooled.log_lines import LogLines, bind_worker
from osrdyne_worker.pooled.memory import memory_limit, process_memory

HUNGRY = "import sys; data = bytearray(b'x') * (64 << 20); print('ready', flush=True); sys.stdin.read()"


def test_memory_contains_that_of_children() -> None:
    before, _ = process_memory()
    child = subprocess.Popen([sys.executable, "-c", HUNGRY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        rss, pss = process_memory()
        assert before is not None and rss is not None and pss is not None
        assert rss - before > 60 << 20
        assert 60 << 20 < pss <= rss
        child.communicate()


class Machine:
    """The files of a machine of 1,000 KiB, of which 400 KiB are used, and of the cgroups of the process."""

    def __init__(self, directory: Path, membership: str) -> None:
        self.proc, self.cgroups = directory / "proc", directory / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
        self.write(self.proc / "sys/kernel/random/boot_id", "boot\n")
        self.write(self.proc / "self/cgroup", membership)

    def write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path: str, *, limit: object, used: int, cache: int = 0, v1: bool = False) -> None:
        directory = self.cgroups / ("memory" if v1 else "") / path
        names = ("limit_in_bytes", "usage_in_bytes", "total_") if v1 else ("max", "current", "")
        self.write(directory / f"memory.{names[0]}", f"{limit}\n")
        self.write(directory / f"memory.{names[1]}", f"{used}\n")
        self.write(directory / "memory.stat", f"anon 1\n{names[2]}inactive_file {cache}\n")

    def read(self) -> tuple[int, int, str]:
        limit = memory_limit(proc=self.proc, cgroups=self.cgroups)
        assert limit is not None
        return limit.used >> 10, limit.total >> 10, limit.scope.split()[0]


@pytest.mark.parametrize("membership", ["0::/a/b\n", "9:name=x:/\n8:cpu,memory:/a/b\n"], ids=["v2", "v1"])
def test_tightest_of_host_and_cgroups_is_the_memory_limit(tmp_path: Path, membership: str) -> None:
    machine, v1 = Machine(tmp_path, membership), "memory" in membership
    none = 2**63 - 4096 if v1 else "max"
    machine.group("a/b", limit=none, used=300 << 10, v1=v1)
    assert machine.read() == (400, 1000, "host")
    machine.group("a", limit=500 << 10, used=350 << 10, cache=50 << 10, v1=v1)
    assert machine.read() == (300, 500, "cgroup")
    machine.group("a/b", limit=200 << 10, used=180 << 10, v1=v1)
    assert machine.read() == (180, 200, "cgroup")


def test_cgroup_is_found_where_only_its_root_is_visible_and_none_or_no_proc_is_no_error(tmp_path: Path) -> None:
    assert Machine(tmp_path / "without", "").read() == (400, 1000, "host")
    assert memory_limit(proc=tmp_path / "missing", cgroups=tmp_path) is None
    assert process_memory(1, proc=tmp_path / "missing") == (None, None)
    machine = Machine(tmp_path, "8:memory:/docker/0123\n")
    machine.group("", limit=500 << 10, used=450 << 10, v1=True)
    assert machine.read() == (450, 500, "cgroup")


async def test_last_lines_belong_to_the_worker_that_logs_them() -> None:
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

    for name in ("a", "b", "last"):
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
    with structlog.contextvars.bound_contextvars(worker_id="last"):
        for number in range(100):
            lines(None, "info", f"line {number}")
    last = lines.end(WorkerId("last"))
    assert (len(last), last[-1]) == (MAX_LOG_LINES, "line 99")
