"""A pooled process: each worker starts once whatever RabbitMQ does to questions; its memory and log lines."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from worker_environments import worker_environment

from osrdyne.logs import configure_events, get_logger
from osrdyne.protocol.control import Generation, control_from_wire
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import (
    MAX_LOG_LINES,
    Assign,
    AssignmentExit,
    AssignmentState,
    Forget,
    Question,
    Release,
    question_of_control,
    question_to_control,
)
from osrdyne_worker.pooled import assignments as module
from osrdyne_worker.pooled.assignments import Assignments
from osrdyne_worker.pooled.log_lines import LogLines, bind_worker
from osrdyne_worker.pooled.memory import memory_limit, process_memory

TERM = Generation(1, 1)
A, B = WorkerId("a"), WorkerId("b")


def assign(worker_id: str, *, key: str = "k", slot: int = 0) -> Assign:
    return Assign(f"assign {worker_id}", worker_environment(worker_id, key), slot, "hash", 1.0)


def release(worker_id: str) -> Release:
    return Release(f"release {worker_id}", WorkerId(worker_id), 1.0)


def forget(worker_id: str) -> Forget:
    return Forget(f"forget {worker_id}", WorkerId(worker_id))


def listed(assignments: Assignments) -> dict[str, AssignmentState]:
    return {one.worker_id: one.state for one in assignments.report(lambda one: one)}


class Process:
    """The table, and what its process does with the answers. `started` is every start that there ever was."""

    def __init__(self) -> None:
        self.table = Assignments()
        self.started: list[WorkerId] = []
        self.answered: set[str] = set()

    def receive(self, body: bytes) -> None:
        message = control_from_wire(body)
        assert message is not None
        question = question_of_control(message)
        match question:
            case Assign():
                if self.table.assign(question, message.generation, now=2.0):
                    self.started.append(question.environment.worker_id)
            case Release():
                self.table.release(question)
            case Forget():
                self.table.forget(question)
        assert question is not None
        self.answered.add(question.question)
        held = [(one.key, one.slot) for one in self.table.report(lambda one: one) if one.worker_id in self.table.active]
        assert len(held) == len(set(held)), "two live workers of a key and slot"

    def end(self, worker_id: WorkerId) -> None:
        self.table.exited(worker_id, AssignmentExit(0))


class Network:
    """Loses, doubles and reorders what is sent, as its `random` says."""

    def __init__(self, process: Process, random: Random) -> None:
        self.process = process
        self.random = random
        self.travelling: list[bytes] = []

    def send(self, question: Question) -> None:
        body = question_to_control(question, TERM).wire_body()
        self.travelling += [body] * self.random.choice((0, 1, 1, 2))

    def deliver(self) -> None:
        if self.travelling:
            self.process.receive(self.travelling.pop(self.random.randrange(len(self.travelling))))

    def ask(self, question: Question) -> None:
        """As the leader does: repeat the question until it is answered."""
        while question.question not in self.process.answered:
            self.send(question)
            for _ in range(self.random.randrange(4)):
                self.deliver()


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 1)), min_size=1, max_size=12), st.integers(0, 2**32))
@pytest.mark.proves("pooled/release-worker-reaches-process")
def test_lost_doubled_and_reordered_questions_converge(places, seed):
    process = Process()
    network = Network(process, Random(seed))
    wanted: dict[tuple[str, int], WorkerId] = {}
    for number, (key, slot) in enumerate(places):
        worker_id = WorkerId(f"w{number}")
        if (holder := wanted.pop((key, slot), None)) is not None:
            network.ask(release(holder))
            if holder in process.table.active:
                process.end(holder)
            network.ask(forget(holder))
        network.ask(assign(worker_id, key=key, slot=slot))
        wanted[key, slot] = worker_id
    while network.travelling:
        network.deliver()
    assert set(process.table.active) == set(wanted.values())
    assert len(process.started) == len(set(process.started)) == len(places)
    assert listed(process.table) == dict.fromkeys(wanted.values(), AssignmentState.RUNNING)


@pytest.mark.proves("pooled/release-worker-reaches-process")
@given(st.permutations(["assign", "assign", "release", "release", "forget"]))
def test_worker_that_was_released_never_starts_afterwards(order):
    process, released = Process(), False
    for name in order:
        question = {"assign": assign("a"), "release": release("a"), "forget": forget("a")}[name]
        before = len(process.started)
        process.receive(question_to_control(question, TERM).wire_body())
        assert not (released and len(process.started) > before)
        released |= name in {"release", "forget"}
        if name == "release" and A in process.table.active:
            process.end(A)
    assert process.table.active == []
    assert len(process.started) <= 1


def test_worker_that_is_refused_knows_the_reason_and_stays_refused(monkeypatch):
    assignments = Assignments()

    def ask(worker_id, **options):
        closed = options.pop("closed", None)
        return assignments.assign(assign(worker_id, **options), TERM, now=1.0, closed=closed)

    assert ask("a") and ask("c", slot=1) and ask("d", key="other")
    assert not ask("b")
    assert [(one.worker_id, one.taken_by) for one in assignments.refused] == [(B, A)]
    assert not ask("e", slot=2, closed="the process ends")
    assert (assignments.refused[-1].taken_by, assignments.refused[-1].reason) == (None, "the process ends")
    assignments.exited(A, AssignmentExit(0))
    assert not ask("b"), "the leader has the refusal, and has gone on"
    assert ask("f")
    assignments.forget(forget("b"))
    assert [one.worker_id for one in assignments.refused] == ["e"]
    assert not ask("b")
    monkeypatch.setattr(module, "MAX_USED", 3)
    for number in range(10):
        assignments.refuse(WorkerId(f"w{number}"), "no")
    assert [one.worker_id for one in assignments.refused] == ["w7", "w8", "w9"]


def test_worker_that_has_not_exited_is_not_forgotten():
    assignments = Assignments()
    assignments.assign(assign("a"), TERM, now=1.0)
    assignments.forget(forget("a"))
    assert assignments.release(release("a"))
    assignments.forget(forget("a"))
    assert listed(assignments) == {A: AssignmentState.STOPPING}
    assignments.exited(A, AssignmentExit(1, "no data"), tuple(f"line {number}" for number in range(50)))
    assert not assignments.release(release("a"))
    [exited] = assignments.report(lambda one: one)
    assert exited.exit == AssignmentExit(1, "no data")
    assert (len(exited.log_lines), exited.log_lines[-1]) == (MAX_LOG_LINES, "line 49")


HUNGRY = "import sys; data = bytearray(b'x') * (64 << 20); print('ready', flush=True); sys.stdin.read()"


def test_memory_contains_that_of_children():
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
def test_tightest_of_host_and_cgroups_is_the_memory_limit(tmp_path, membership):
    machine, v1 = Machine(tmp_path, membership), "memory" in membership
    none = 2**63 - 4096 if v1 else "max"
    machine.group("a/b", limit=none, used=300 << 10, v1=v1)
    assert machine.read() == (400, 1000, "host")
    machine.group("a", limit=500 << 10, used=350 << 10, cache=50 << 10, v1=v1)
    assert machine.read() == (300, 500, "cgroup")
    machine.group("a/b", limit=200 << 10, used=180 << 10, v1=v1)
    assert machine.read() == (180, 200, "cgroup")
    machine = Machine(tmp_path / "root", "8:memory:/docker/0123\n")  # only its root is visible
    machine.group("", limit=500 << 10, used=450 << 10, v1=True)
    assert machine.read() == (450, 500, "cgroup")
    assert Machine(tmp_path / "without", "").read() == (400, 1000, "host")
    assert memory_limit(proc=tmp_path / "missing", cgroups=tmp_path) is None
    assert process_memory(1, proc=tmp_path / "missing") == (None, None)


async def test_last_lines_belong_to_the_worker_that_logs_them():
    configure_events("info", as_json=True)
    lines, log = LogLines(), get_logger("test")
    lines.install()

    async def work(worker_id, text):
        bind_worker(WorkerId(worker_id), f"key of {worker_id}")
        with ThreadPoolExecutor(1, initializer=bind_worker, initargs=(WorkerId(worker_id), "k")) as threads:
            await asyncio.create_task(asyncio.to_thread(log.info, f"{text} task"))
            await asyncio.get_running_loop().run_in_executor(threads, log.info, f"{text} thread")
        log.info("connected", uri="amqp://user:s3cret@host", text=text)

    for name in ("a", "b", "last"):
        lines.begin(WorkerId(name))
    log.info("of the process")
    await asyncio.gather(work("a", "first"), work("b", "second"), work("c", "third"))
    for name, text in (("a", "first"), ("b", "second")):
        found = lines.end(WorkerId(name))
        assert [text in line for line in found] == [True] * 3
        assert f'"key": "key of {name}"' in found[0]
        assert "s3cret" not in "".join(found)
    assert lines.end(WorkerId("a")) == lines.end(WorkerId("c")) == ()
    with structlog.contextvars.bound_contextvars(worker_id="last"):
        for number in range(100):
            lines(None, "info", f"line {number}")
    last = lines.end(WorkerId("last"))
    assert (len(last), last[-1]) == (MAX_LOG_LINES, "line 99")
