"""The assignments of a pooled process: whatever RabbitMQ does to the leader's questions, each worker starts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_environments import worker_environment

from osrdyne.protocol.control import Generation, control_from_wire
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import (
    MAX_LOG_LINES,
    Assign,
    Assignment,
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


@pytest.fixture
def assignments() -> Assignments:
    return Assignments()


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
def test_lost_doubled_and_reordered_questions_converge(places: Sequence[tuple[str, int]], seed: int) -> None:
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


@given(st.permutations(["assign", "assign", "release", "release", "forget"]))
def test_worker_that_was_released_never_starts_afterwards(order: Sequence[str]) -> None:
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


def test_slot_that_is_taken_and_a_process_that_ends_refuse_with_the_reason(assignments: Assignments) -> None:
    assert assignments.assign(assign("a"), TERM, now=1.0)
    assert not assignments.assign(assign("b"), TERM, now=1.0)
    assert [(one.worker_id, one.taken_by) for one in assignments.refused] == [(B, A)]
    assert assignments.assign(assign("c", slot=1), TERM, now=1.0)
    assert assignments.assign(assign("d", key="other"), TERM, now=1.0)
    assert not assignments.assign(assign("e", slot=2), TERM, now=1.0, closed="the process ends")
    assert (assignments.refused[-1].taken_by, assignments.refused[-1].reason) == (None, "the process ends")


def test_refused_worker_stays_refused_when_the_slot_is_free(assignments: Assignments) -> None:
    assignments.assign(assign("a"), TERM, now=1.0)
    assignments.assign(assign("b"), TERM, now=1.0)
    assignments.exited(A, AssignmentExit(0))
    assert not assignments.assign(assign("b"), TERM, now=1.0)  # the leader has the refusal, and has gone on
    assert assignments.assign(assign("c"), TERM, now=1.0)
    assignments.forget(forget("b"))
    assert assignments.refused == ()
    assert not assignments.assign(assign("b"), TERM, now=1.0)


def test_worker_that_has_not_exited_is_not_forgotten(assignments: Assignments) -> None:
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


def test_figures_are_those_of_now_until_a_worker_exits() -> None:
    def busy(assignment: Assignment) -> Assignment:
        return replace(assignment, in_flight=3)

    assignments = Assignments()
    for name in ("a", "b"):
        assignments.assign(assign(name, key=name), TERM, now=7.0)
    assignments.exited(A, AssignmentExit(0))
    assert [(one.in_flight, one.last_used) for one in assignments.report(busy)] == [(0, 7.0), (3, 7.0)]


def test_used_worker_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_USED", 3)
    assignments = Assignments()
    for number in range(10):
        assignments.refuse(WorkerId(f"w{number}"), "no")
    assert [one.worker_id for one in assignments.refused] == ["w7", "w8", "w9"]
