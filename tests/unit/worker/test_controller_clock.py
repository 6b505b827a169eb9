"""Deadlines that the controller has set by its clock, in a worker whose clock differs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import cast

import pytest

from osrdyne.aio.clock import now_ms
from osrdyne.amqp import Channel, Delivery, Message
from osrdyne.protocol.deadlines import DEADLINE_HEADER, MAX_EXPIRATION_MS
from osrdyne.protocol.messages import HOPS_HEADER
from osrdyne.testing.clock import VirtualClock
from osrdyne_worker.requests.controller_clock import MAX_KNOWN, ControllerClock

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
def test_request_lives_as_long_as_the_clock_of_the_controller_says(behind: float) -> None:
    worker = Worker(behind)
    assert worker.take() == TTL_MS
    assert [worker.take(waited=seconds) for seconds in (1.5, 1.9, 2.5)] == [500, 100, -500]
    assert Worker(0.0).take(waited=1.5) == TTL_MS, "the first one lives no longer than its lifetime"
    worker = Worker(0.0)  # the longest expiration says nothing about the clocks
    far = round(worker.clock.time() * 1000) + 10 * MAX_EXPIRATION_MS
    worker.take(expiration=MAX_EXPIRATION_MS, **{DEADLINE_HEADER: far})
    assert worker.take() == TTL_MS


@pytest.mark.parametrize(("behind", "left"), [(9.0, -2_000), (-9.0, TTL_MS)])
def test_difference_above_the_allowed_one_changes_deadlines(behind: float, left: int) -> None:
    assert Worker(behind).take() == left


def test_difference_is_learned_anew_after_a_change_of_the_leader() -> None:
    worker = Worker(0.0)
    worker.take()
    worker.behind = 3.0
    left = [worker.take() for _ in range(MAX_KNOWN)]
    assert (left[0], left[-1]) == (TTL_MS - 3_000, TTL_MS)


@pytest.mark.proves("controller/wall-clock-jumps")
def test_jump_of_the_own_wall_clock_changes_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, time = Worker(0.0), VirtualClock.time
    worker.take()
    monkeypatch.setattr(VirtualClock, "time", lambda clock: time(clock) + 4.0)
    worker.behind = 4.0
    assert worker.take(waited=1.5) == 500
