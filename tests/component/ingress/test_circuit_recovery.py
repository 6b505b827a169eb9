"""The circuit breaker in a simulated pool: 1,000 requests of 20 groups, and a backend that fails for a while.

The pool carries out the effects as docs/design/circuits.md asks for: queues of groups, workers that stop when their
group is paused, a leader that is killed and begins again with the stored state.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import replace

import pytest

from osrdyne.ingress.circuits.breaker import (
    CircuitBreaker,
    Effect,
    PauseGroup,
    ResumeGroup,
    SendProbe,
    Transition,
    Verdict,
)
from osrdyne.ingress.circuits.configuration import CircuitConfiguration, OnOpen, TimedStep
from osrdyne.ingress.circuits.state import CircuitId, CircuitState, state_from_json
from osrdyne.protocol.names import Key

REQUESTS, GROUPS, TICK_MS = 1_000, 20, 10
START_MS = 1_700_000_000_000
ROUTE = CircuitId("r")
CONFIGURATION = CircuitConfiguration(
    checks=True,
    updates_statistics=True,
    error_threshold=50,
    max_age_ms=60_000,
    min_samples=40,
    max_samples=60,
    open_to_half_open=TimedStep(enabled=True, interval_ms=1_000),
    unlock=TimedStep(enabled=True, interval_ms=50),
    probe=TimedStep(enabled=True, interval_ms=300),
)


class Pool:
    """A worker for each group, which serves one request a tick. The backend fails between two times."""

    def __init__(self, configuration: CircuitConfiguration, *, fails_from: int, fails_until: int, seed: int) -> None:
        self.breaker = CircuitBreaker(configuration)
        self.fails_from, self.fails_until = START_MS + fails_from, START_MS + fails_until
        self.random = random.Random(seed)
        self.now = START_MS
        self.queues: dict[Key, deque[str]] = {Key(f"g{number}"): deque() for number in range(GROUPS)}
        self.paused: set[Key] = set()
        self.resumed: list[Key] = []
        self.answers: dict[str, str] = {}
        self.failed_at: list[int] = []
        self.transitions: list[Transition] = []
        self.probes = 0
        self.lost_reports = 0.0
        self.crashes = 0.0

    def carry_out(self, effects: tuple[Effect, ...]) -> None:
        self.transitions += [effect for effect in effects if isinstance(effect, Transition)]
        if effects and self.random.random() < self.crashes:
            self.kill_leader()  # after the state was stored, and before it has any effect
            return
        for effect in effects:
            match effect:
                case PauseGroup(key):
                    self.paused.add(key)
                case ResumeGroup(key):
                    self.paused.discard(key)
                    self.resumed.append(key)
                case SendProbe(circuit, key):
                    self.send_probe(circuit, key)

    def send_probe(self, circuit: CircuitId, key: Key) -> None:
        if not self.queues[key]:
            self.carry_out(self.breaker.probe_missing(circuit, now_ms=self.now))
            return
        request_id = self.queues[key].popleft()
        assert self.breaker.probe_sent(circuit, request_id)
        self.probes += 1
        self.serve(key, request_id)

    def publish(self, key: Key, request_id: str) -> None:
        admission = self.breaker.admit("r", key, now_ms=self.now)
        if admission.verdict is Verdict.REJECT:
            self.answers[request_id] = "circuit-open"
            self.carry_out(admission.effects)
            return
        self.queues[key].append(request_id)
        self.carry_out(admission.effects)

    def serve(self, key: Key, request_id: str) -> None:
        success = not self.fails_from <= self.now < self.fails_until
        assert request_id not in self.answers
        self.answers[request_id] = "ok" if success else "error"
        if not success:
            self.failed_at.append(self.now)
        if self.random.random() >= self.lost_reports:
            self.carry_out(self.breaker.record("r", key, request_id, success=success, now_ms=self.now))

    def kill_leader(self) -> None:
        stored = json.dumps(self.breaker.state.to_json())
        self.breaker = CircuitBreaker(self.breaker.configuration, state_from_json(json.loads(stored)))
        self.paused = set(self.breaker.paused_groups())

    def tick(self) -> None:
        self.now += TICK_MS
        self.carry_out(self.breaker.advance(now_ms=self.now))
        for key, queue in self.queues.items():
            # Looked up for each: an outcome of this tick may have paused the next group.
            if queue and key not in self.paused:
                self.serve(key, queue.popleft())

    def run(self, *, seconds: int, kill_every: int | None = None) -> None:
        """Publish all requests within the first half of the time; kill the leader after each `kill_every` ticks."""
        ticks = seconds * 1_000 // TICK_MS
        published = 0
        for number in range(ticks):
            while published < min(REQUESTS, 2 * REQUESTS * number // ticks):
                self.publish(Key(f"g{published % GROUPS}"), f"request {published}")
                published += 1
            self.tick()
            if kill_every is not None and number % kill_every == 0:
                self.kill_leader()

    @property
    def states(self) -> list[CircuitState]:
        return [transition.after for transition in self.transitions]


@pytest.mark.parametrize("kill_every", [None, 5, 50])
@pytest.mark.parametrize(("lost_reports", "crashes"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.3, 0.3)])
def test_backend_is_spared_and_every_request_is_answered(
    kill_every: int | None, lost_reports: float, crashes: float
) -> None:
    pool = Pool(CONFIGURATION, fails_from=1_000, fails_until=6_000, seed=1)
    pool.lost_reports, pool.crashes = lost_reports, crashes
    pool.run(seconds=20, kill_every=kill_every)
    assert len(pool.answers) == REQUESTS
    assert not any(pool.queues.values())
    assert pool.states[0] is CircuitState.OPEN
    assert pool.states[-1] is CircuitState.CLOSED
    # All but the probes were served before the circuit opened; without it, the backend would have got half of all.
    assert len(pool.failed_at) - pool.probes < REQUESTS / 5
    assert sum(answer == "error" for answer in pool.answers.values()) == len(pool.failed_at)
    assert pool.breaker.paused_groups() == frozenset() == pool.paused


def test_circuit_opens_at_the_exact_sample() -> None:
    pool = Pool(CONFIGURATION, fails_from=0, fails_until=20_000, seed=1)
    pool.run(seconds=20)
    # 40 requests, and after each second one probe, which fails too.
    assert len(pool.failed_at) == CONFIGURATION.min_samples + pool.probes
    assert pool.states == [CircuitState.OPEN] + [CircuitState.HALF_OPEN, CircuitState.OPEN] * pool.probes
    assert pool.probes >= 18
    assert len(pool.answers) + sum(map(len, pool.queues.values())) == REQUESTS


def test_groups_are_resumed_in_the_order_in_which_they_were_paused() -> None:
    pool = Pool(CONFIGURATION, fails_from=1_000, fails_until=6_000, seed=1)
    order: list[Key] = []
    for number in range(2_000):
        # A circuit without a waiting request waits for one to come: it would be the probe.
        pool.publish(Key(f"g{pool.random.randrange(GROUPS)}"), f"request {number}")
        pool.tick()
        order = list(pool.breaker.state.paused) if pool.states and pool.states[-1] is not CircuitState.CLOSED else order
    assert len(order) == GROUPS
    assert pool.resumed == order


def test_rejecting_circuit_answers_new_requests_and_still_recovers() -> None:
    pool = Pool(replace(CONFIGURATION, on_open=OnOpen.REJECT), fails_from=1_000, fails_until=4_000, seed=1)
    pool.run(seconds=20)
    answers = list(pool.answers.values())
    assert len(answers) == REQUESTS
    assert 0 < answers.count("circuit-open") < REQUESTS / 2
    assert pool.states[-1] is CircuitState.CLOSED
    assert not pool.breaker.paused_groups()
