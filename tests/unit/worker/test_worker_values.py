"""The small values of a worker: settings, control state, cancels, slots, the window of its reports, failures, and
deadlines that the controller has set by a clock that differs."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import psutil
import pytest

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Channel, Delivery, Message
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.activity import MAX_OUTCOMES, ActivityReport, Event, outcomes_of
from osrdyne.protocol.control import TERM_AHEAD, Command, ControlMessage, Generation
from osrdyne.protocol.deadlines import DEADLINE_HEADER, MAX_EXPIRATION_MS
from osrdyne.protocol.messages import HOPS_HEADER
from osrdyne.protocol.names import QueueName
from osrdyne.testing.clock import VirtualClock
from osrdyne_worker.app.errors import describe, describe_with_place
from osrdyne_worker.requests.cancellations import MAX_REMEMBERED, Cancellations
from osrdyne_worker.requests.controller_clock import MAX_KNOWN, ControllerClock
from osrdyne_worker.requests.intake import Share, more_for_batches, share_of
from osrdyne_worker.requests.scheduling.priorities import Slots
from osrdyne_worker.runtime.control import (
    NO_GENERATION,
    DesiredState,
    apply_control,
    is_plausible,
    without_implausible_generation,
)
from osrdyne_worker.runtime.reports import Completion, ReportWindow
from osrdyne_worker.runtime.settings import RuntimeSettings, runtime_settings
from osrdyne_worker.runtime.start_times import StartTimes, process_age

NOW = 1_800_000_000.0
Q, HIGH, LOW = QueueName("q"), QueueName("q_Pri0"), QueueName("q_Pri7")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("concurrency", value) for value in (0, 65, True, 1.5)),
        *(("stop_grace", value) for value in (-1, "10s", float("nan"))),
        ("processing_timeout", float("inf")),
        ("debug", "yes"),
        *(("statuses", value) for value in ("core_error", [])),
    ],
)
def test_wrong_setting_is_refused_by_name(name, value):
    with pytest.raises(ConfigurationError, match=rf"WORKER_CONFIG\.runtime\.{name}"):
        runtime_settings({"runtime": {name: value}})
    of_a_newer_controller = {"runtime": {"concurrency": 3, "shoe_size": 42}}
    assert runtime_settings(of_a_newer_controller) == RuntimeSettings(concurrency=3)


def message(command: Command, counter: int, **details: object) -> ControlMessage:
    return ControlMessage(command, Generation(1, counter), details)


@pytest.mark.parametrize(
    ("given", "queues"),
    [([HIGH, LOW, HIGH], (HIGH, LOW)), *((given, (Q,)) for given in (None, [], "q", [1], [""], {"q": 1}))],
)
def test_queues_replace_the_queues_unless_they_are_none(given, queues):
    assert apply_control(DesiredState((Q,)), message(Command.QUEUES, 1, queues=given)).queues == queues


def test_newest_command_of_the_newest_leader_wins_unless_the_clock_was_wrong():
    state = DesiredState((Q,))
    for command in (Command.PAUSE, Command.PAUSE, Command.RESUME):
        state = apply_control(state, message(command, 4))
    assert state == DesiredState((Q,), paused=False, generation=Generation(1, 4))
    of_another_leader = apply_control(state, ControlMessage(Command.RESUME, Generation(2, 1)))
    assert not apply_control(of_another_leader, message(Command.PAUSE, 99)).paused
    believed = DesiredState((Q,), paused=True, generation=Generation(int(NOW), 1))
    assert without_implausible_generation(believed, now=1000.0).generation == NO_GENERATION
    assert without_implausible_generation(believed, now=NOW) == believed


def test_share_of_a_queue_has_room_for_a_running_batch_and_the_next():
    assert share_of(Q, (Q,), 8) == Share(prefetch=8)
    assert share_of(HIGH, (HIGH, LOW), 8) == share_of(LOW, (HIGH, LOW), 8) == Share(prefetch=None)
    assert share_of(Q, (HIGH, LOW), 8) is share_of(Q, (), 8) is None, "of another worker, or paused"
    assert [more_for_batches(Share(8), 256), more_for_batches(Share(None), 256)] == [504, 512]
    assert [more_for_batches(Share(8), 2), more_for_batches(Share(1), 1)] == [0, 0]


async def test_cancel_needs_both_names_and_counts_once_within_a_minute(clock):
    memory = Cancellations(clock)
    memory.remember("c", "r")
    names = [("c", "other"), (None, "r"), ("c", "r"), ("c", "r")]
    assert [memory.take(*one) for one in names] == [False, False, True, False]
    memory.remember("c", "r")
    await clock.advance(61)
    assert not memory.take("c", "r")
    memory.completed("c", "r")
    for _ in range(2):  # of a completed request
        memory.remember("c", "r")
    assert not memory.take("c", "r")
    await clock.advance(61)
    memory.remember("c", "r")
    assert memory.take("c", "r")
    memory.remember("c", "r", keep_for=600.0)
    await clock.advance(61)
    assert not memory.take("c", "r"), "a new request of the name uses up the cancel of the one before"
    assert not memory.take("c", "r", tried_before=True)
    for number in range(MAX_REMEMBERED + 1):
        memory.remember(str(number), "r")
    assert not memory.take("0", "r"), "the memory is bounded"
    assert memory.take(str(MAX_REMEMBERED), "r")


async def test_slot_of_a_cancelled_waiter_is_passed_on():
    slots = Slots(1)
    await slots.acquire(0)
    gone, first, second = (asyncio.ensure_future(slots.acquire(0)) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    slots.release()  # the turn is that of `first`, which has not run yet
    first.cancel()
    await asyncio.wait_for(second, 120)
    assert first.cancelled()
    slots.release()
    assert slots.try_acquire()


def events(drafts: list[Any]) -> list[tuple[Event, Any]]:
    return [(draft.event, draft.details.get("count")) for draft in drafts]


OK = Completion("ok", "/sql", redelivered=False)


def completed(window: ReportWindow, outcome: Completion, duration: int = 1, request: str | None = None) -> None:
    window.received()
    window.completed(outcome, duration_ms=duration, request=request)


def test_requests_within_a_second_are_one_report_with_counts():
    window = ReportWindow()
    window.received()
    assert window.due_in(100.0) == 0, "the first request of a quiet worker is reported at once"
    assert events(window.take(100.0)) == [(Event.REQUEST_RECEIVED, 1)]
    assert window.due_in(100.25) == 0.75
    window.dropped()
    assert events(window.take(102.0)) == [(Event.IDLE, None)]
    assert window.take(103.0) == [], "idle follows only on a busy worker"
    window.busy_reported()
    assert events(window.take(104.0)) == [(Event.IDLE, None)]
    for duration in (10, 20, 60):
        completed(window, OK, duration)
    drafts = window.take(105.0)
    assert events(drafts) == [(Event.REQUEST_RECEIVED, 3), (Event.REQUEST_COMPLETED, 3), (Event.IDLE, None)]
    assert (drafts[1].headers["x-duration-ms"], drafts[1].details["duration_ms_max"]) == (30, 60)
    assert drafts[1].headers["x-status"] == bytearray(b"ok")
    completed(window, OK, 700)
    assert window.first_ms == 10
    reported = [draft.details.get("first_request_ms") for draft in [*drafts, *window.take(106.0)]]
    assert reported == [None, 10, None, None, None, None]


@pytest.mark.parametrize(
    ("header", "outcomes", "reports"),
    [
        ("x-status", [{}, {"status": "error"}, {}], [(bytearray(b"ok"), 2), (bytearray(b"error"), 1)]),
        ("x-probe", [{}, {"probe": "p"}, {}], [(None, 2), ("p", 1)]),
        ("x-route", [{"route": "a"}, {"route": "b"}], [("a", 1), ("b", 1)]),
        ("x-priority", [{"route": "a", "priority": 0}, {"route": "a"}], [(0, 1), (None, 1)]),
    ],
)
def test_different_outcomes_are_different_reports(header, outcomes, reports):
    window = ReportWindow()
    for changes in outcomes:
        completed(window, replace(OK, **changes), request="r")
    found = [(draft.headers.get(header), draft.details["count"]) for draft in window.take(1.0)[1:3]]
    assert found == reports


def test_parts_of_a_start_are_measured_in_their_order():
    now = 0.0
    times = StartTimes(lambda: now)
    times.note("process", 0.4)
    with times.part("python"):
        now = 0.75
    assert list(times.milliseconds().items()) == [("process", 400), ("python", 750)]
    assert abs(time.time() - (process_age() or 0.0) - psutil.Process().create_time()) < 5


def test_requests_of_an_outcome_are_named_with_its_code_until_the_report_is_full():
    window = ReportWindow()
    for number in range(MAX_OUTCOMES):
        assert not window.is_full
        completed(window, replace(OK, code=201), request=str(number))
    assert window.is_full
    draft = window.take(1.0)[1]
    report = ActivityReport("a", draft.event, "w", draft.details, draft.headers)
    assert outcomes_of(report) == tuple(map(str, range(MAX_OUTCOMES)))
    assert draft.headers["x-code"] == 201
    assert not window.is_full


def test_failure_is_one_line_with_its_place_and_without_a_password():
    with pytest.raises(ValueError) as caught:
        raise ValueError("no table\nof that name\n\tat Foo.java")
    text = describe_with_place(caught.value)
    assert text.startswith("ValueError: no table of that name (test_worker_values.py, line ")
    assert "secret" not in describe(ValueError("cannot reach jdbc://me:secret@db/x"))
    assert describe(KeyError()) == "KeyError"


def test_message_of_a_generation_that_no_leader_can_have_is_not_believed():
    def is_believed(term):
        return is_plausible(ControlMessage(Command.PAUSE, Generation(term, 1)), now=NOW)

    assert not any(is_believed(term) for term in (-1, int(NOW) + 2 * TERM_AHEAD, 2**60, 10**400))
    assert all(is_believed(term) for term in (0, 1, int(NOW), int(NOW) + 3600))


TTL_MS, SKEW_MS = 2_000, 5_000


class Worker:
    """Takes requests whose controller's clock is `behind` that of this worker, in seconds."""

    def __init__(self, behind: float) -> None:
        self.clock = VirtualClock()
        self.behind = behind
        self.controller = ControllerClock(self.clock, largest_skew=SKEW_MS / 1000)

    def take(self, *, waited: float = 0.0, expiration: int = TTL_MS, **headers: object) -> int:
        """The milliseconds that are left of a TTL of 2 s for a request that has waited in its queue."""
        published_ms = round((self.clock.time() - self.behind - waited) * 1000)
        headers = {HOPS_HEADER: 1, DEADLINE_HEADER: published_ms + TTL_MS, **headers}
        message = Message(headers=headers, expiration=str(expiration), timestamp=datetime.fromtimestamp(0, UTC))
        delivery = Delivery(cast(Channel, None), 1, "x", "k", False, b"", message.properties())
        now = now_ms(self.clock)
        deadline = delivery.to_request(now_ms=now, skew_ms=self.controller.skew_of(delivery)).deadline_ms
        assert deadline is not None
        return deadline - now


@pytest.mark.parametrize("behind", [0.0, 3.0, -3.0])
def test_request_lives_as_long_as_the_clock_of_the_controller_says(behind):
    worker = Worker(behind)
    assert worker.take() == TTL_MS
    assert [worker.take(waited=seconds) for seconds in (1.5, 1.9, 2.5)] == [500, 100, -500]
    assert Worker(0.0).take(waited=1.5) == TTL_MS, "the first one lives no longer than its lifetime"
    worker = Worker(0.0)  # the longest expiration says nothing about the clocks
    far = round(worker.clock.time() * 1000) + 10 * MAX_EXPIRATION_MS
    worker.take(expiration=MAX_EXPIRATION_MS, **{DEADLINE_HEADER: far})
    assert worker.take() == TTL_MS


@pytest.mark.parametrize(("behind", "left"), [(9.0, -2_000), (-9.0, TTL_MS)])
def test_difference_above_the_allowed_one_changes_deadlines(behind, left):
    assert Worker(behind).take() == left


def test_difference_is_learned_anew_after_a_change_of_the_leader():
    worker = Worker(0.0)
    worker.take()
    worker.behind = 3.0
    left = [worker.take() for _ in range(MAX_KNOWN)]
    assert (left[0], left[-1]) == (TTL_MS - 3_000, TTL_MS)


@pytest.mark.proves("controller/wall-clock-jumps")
def test_jump_of_the_own_wall_clock_changes_no_deadline(monkeypatch):
    worker, time = Worker(0.0), VirtualClock.time
    worker.take()
    monkeypatch.setattr(VirtualClock, "time", lambda clock: time(clock) + 4.0)
    worker.behind = 4.0
    assert worker.take(waited=1.5) == 500
