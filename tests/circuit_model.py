"""An independent model of the circuit breaker: lists that are searched as a whole, no shared code, no shortcuts.

`run_sequence` decodes bytes to a sequence of outcomes, requests, times, restarts and changes by a person, runs it
against both, and compares everything that can be seen after each step.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from osrdyne.ingress.circuits import breaker as breaker_module
from osrdyne.ingress.circuits.breaker import (
    CircuitBreaker,
    Effect,
    PauseGroup,
    ResumeGroup,
    SendProbe,
    Transition,
    Verdict,
)
from osrdyne.ingress.circuits.configuration import CircuitConfiguration, CircuitScope, OnOpen, TimedStep
from osrdyne.ingress.circuits.state import CircuitId, CircuitState, state_from_json
from osrdyne.protocol.names import Key

ROUTES = ["a", "b", None]
KEYS = [Key("k"), Key("l"), Key("é=1")]
MAX_SAMPLES = 14  # Instead of the real one: little enough for a few circuits to reach it.
START_MS = 1_700_000_000_000
STEPS_MS = [0, 1, 49, 50, 99, 100, 101, 250, 700, 5_000]

BASE = CircuitConfiguration(
    checks=True,
    updates_statistics=True,
    error_threshold=50,
    max_age_ms=700,
    min_samples=3,
    max_samples=4,
    open_to_half_open=TimedStep(enabled=True, interval_ms=100),
    unlock=TimedStep(enabled=True, interval_ms=50),
    probe=TimedStep(enabled=True, interval_ms=100),
)
CONFIGURATIONS = [
    BASE,
    BASE,
    replace(BASE, checks=False),
    replace(BASE, updates_statistics=False),
    replace(BASE, error_threshold=100, max_samples=3),
    replace(BASE, unlock=TimedStep(enabled=False, interval_ms=50)),
    replace(BASE, open_to_half_open=TimedStep(enabled=False, interval_ms=100)),
    replace(BASE, probe=TimedStep(enabled=False, interval_ms=100)),
    replace(BASE, on_open=OnOpen.REJECT),
    replace(BASE, scope=CircuitScope.GROUP, min_samples=2),
]


@dataclass
class NaiveCircuit:
    """`log`: (request, key, success, time), the latest last. `turns`: when each candidate group had its turn.

    `released`: the groups that it held until it was closed, and that have been paused since."""

    state: str = "closed"
    since: int = 0
    log: list[tuple[str, str, bool, int]] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    probe: tuple[str, int, str | None] | None = None


class Model:
    """What the breaker must do, with the state of the whole pool in plain lists."""

    def __init__(self, configuration: CircuitConfiguration) -> None:
        self.configuration = configuration
        self.circuits: dict[tuple[str | None, str | None], NaiveCircuit] = {}
        self.order: list[str] = []
        self.last_resume: int | None = None
        self.now = 0
        self.turn = 0

    def name(self, route: str | None, key: str) -> tuple[str | None, str | None]:
        return (route, key if self.configuration.scope is CircuitScope.GROUP else None)

    def is_held(self, key: str) -> bool:
        return any(key in circuit.held for circuit in self.circuits.values())

    def at(self, now: int) -> None:
        if now < self.now:
            for circuit in self.circuits.values():
                circuit.log = [(one, key, success, min(at, now)) for one, key, success, at in circuit.log]
                circuit.since = min(circuit.since, now)
                if circuit.probe is not None:
                    circuit.probe = (circuit.probe[0], min(circuit.probe[1], now), circuit.probe[2])
            if self.last_resume is not None:
                self.last_resume = min(self.last_resume, now)
        self.now = now

    def record(self, route: str | None, key: str, request: str, *, success: bool) -> None:
        name = self.name(route, key)
        circuit = self.circuits.get(name)
        if self.configuration.updates_statistics and (circuit is None or circuit.state != "open"):
            if circuit is None:
                circuit = self.circuits[name] = NaiveCircuit(since=self.now)
            circuit.log = [one for one in circuit.log if one[0] != request]
            self.forget_old(circuit)
            circuit.log.append((request, key, success, self.now))
            fair_share = MAX_SAMPLES // len(self.circuits) // 2
            limits = [self.configuration.min_samples, fair_share, self.configuration.max_samples]
            self.bound(circuit, sorted(limits)[1])
        if circuit is None:
            return
        if circuit.state == "closed" and self.configuration.checks and self.configuration.updates_statistics:
            count, failed = len(circuit.log), sum(not one[2] for one in circuit.log)
            enough = count >= self.configuration.min_samples
            if enough and 100 * failed // count >= self.configuration.error_threshold:
                self.enter(circuit, "open")
                # Of two samples of one moment, failures come first.
                for one in sorted(circuit.log, key=lambda one: (one[3], one[2])):
                    self.hold(circuit, one[1])
        elif circuit.state == "half_open" and circuit.probe is not None and circuit.probe[2] == request:
            if success:
                self.close(circuit)
                self.resume()
            else:
                self.enter(circuit, "open")

    def forget_old(self, circuit: NaiveCircuit) -> None:
        circuit.log = [one for one in circuit.log if self.now - one[3] < self.configuration.max_age_ms]

    def bound(self, circuit: NaiveCircuit, most: int) -> None:
        for side in (True, False):
            of_side = [one for one in circuit.log if one[2] is side]
            extra = of_side[: max(0, len(of_side) - most)]
            circuit.log = [one for one in circuit.log if one not in extra]

    def enter(self, circuit: NaiveCircuit, state: str) -> None:
        circuit.state, circuit.since, circuit.probe = state, self.now, None

    def hold(self, circuit: NaiveCircuit, key: str) -> None:
        if key not in circuit.turns:
            self.turn += 1
            circuit.turns[key] = self.turn
        if key not in circuit.held:
            circuit.held.append(key)
            circuit.released = [one for one in circuit.released if one != key]
        if key not in self.order:
            self.order.append(key)

    def probe(self, circuit: NaiveCircuit) -> None:
        wanted = circuit.state == "half_open" and circuit.probe is None and self.configuration.probe.enabled
        if wanted and circuit.turns:
            key = min(circuit.turns, key=lambda one: circuit.turns[one])
            self.turn += 1
            circuit.turns[key] = self.turn
            circuit.probe = (key, self.now, None)

    def close(self, circuit: NaiveCircuit) -> None:
        self.enter(circuit, "closed")
        circuit.released += circuit.held
        circuit.log, circuit.held, circuit.turns = [], [], {}

    def resume(self) -> None:
        unlock = self.configuration.unlock
        free = [key for key in self.order if not self.is_held(key)]
        if not unlock.enabled and free:
            self.order, self.last_resume = [key for key in self.order if key not in free], self.now
        elif free and (self.last_resume is None or self.now - self.last_resume >= unlock.interval_ms):
            self.order.remove(free[0])
            self.last_resume = self.now
        for circuit in self.circuits.values():
            circuit.released = [key for key in circuit.released if key in self.order]

    def admit(self, route: str | None, key: str) -> str:
        circuit = self.circuits.get(self.name(route, key))
        if circuit is None or circuit.state == "closed":
            return "forward"
        had_probe, had_candidates = circuit.probe is not None, bool(circuit.turns)
        self.hold(circuit, key)
        self.probe(circuit)
        is_the_probe = not had_probe and not had_candidates and circuit.probe is not None
        return "reject" if self.configuration.on_open is OnOpen.REJECT and not is_the_probe else "hold"

    def advance(self) -> None:
        for circuit in self.circuits.values():
            self.forget_old(circuit)
            waited = self.now - circuit.since
            if circuit.state == "open":
                step = self.configuration.open_to_half_open
                if step.enabled and waited >= step.interval_ms:
                    self.enter(circuit, "half_open")
                    self.probe(circuit)
            elif circuit.probe is not None:
                if self.now - circuit.probe[1] >= self.configuration.probe.interval_ms:
                    self.enter(circuit, "open")
            else:
                self.probe(circuit)
        self.resume()

    def configure(self, configuration: CircuitConfiguration) -> None:
        self.configuration = configuration
        for circuit in self.circuits.values():
            if not configuration.checks and circuit.state != "closed":
                self.close(circuit)
        for name, circuit in list(self.circuits.items()):
            if (name[1] is not None) != (configuration.scope is CircuitScope.GROUP):
                self.drop(name)
            else:
                self.bound(circuit, configuration.max_samples)
        self.resume()

    def drop(self, name: tuple[str | None, str | None]) -> None:
        if self.circuits[name].state != "closed":
            self.close(self.circuits[name])
        del self.circuits[name]


class World:
    """Carries out the effects as the leader must: a group is not paused twice, a probe only comes from a paused one."""

    def __init__(self) -> None:
        self.paused: set[str] = set()
        self.resumed: list[str] = []

    def carry_out(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case PauseGroup(key):
                    assert key not in self.paused
                    self.paused.add(key)
                case ResumeGroup(key):
                    self.paused.remove(key)
                    self.resumed.append(key)
                case SendProbe(_, key):
                    assert key in self.paused
                case Transition(_, before, after, reason):
                    assert before is not after
                    assert reason


class Run:
    """One sequence, against the breaker and the model."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.numbers = numbers
        self.breaker, self.model, self.world = CircuitBreaker(BASE), Model(BASE), World()
        self.now = START_MS
        self.steps: list[str] = []
        self.states: set[CircuitState] = set()
        self.actions = [
            self.fail, self.fail, self.fail, self.fail, self.succeed, self.admit, self.send_probe, self.send_probe,
            self.miss_probe, self.answer_probe, self.answer_probe, self.advance, self.advance, self.advance,
            self.restart, self.close_one, self.close_all, self.configure, self.keep_routes, self.set_back,
        ]  # fmt: skip

    def pick(self, count: int) -> int:
        return next(self.numbers) % count

    def step(self) -> None:
        action = self.actions[self.pick(len(self.actions))]
        resumed = len(self.world.resumed)
        try:
            action()
            self.compare(resumed, action.__name__)
        except AssertionError as error:
            error.add_note("\n".join(self.steps))
            raise

    def took(self, effects: tuple[Effect, ...], text: str) -> None:
        self.steps.append(text)
        self.world.carry_out(effects)

    def outcome(self, *, success: bool) -> None:
        route, key, request = ROUTES[self.pick(3)], KEYS[self.pick(3)], f"r{self.pick(8)}"
        self.model.at(self.now)
        self.model.record(route, key, request, success=success)
        effects = self.breaker.record(route, key, request, success=success, now_ms=self.now)
        self.took(effects, f"record {route} {key} {request} {success}")

    def fail(self) -> None:
        self.outcome(success=False)

    def succeed(self) -> None:
        self.outcome(success=True)

    def admit(self) -> None:
        route, key = ROUTES[self.pick(3)], KEYS[self.pick(3)]
        self.model.at(self.now)
        verdict = self.model.admit(route, key)
        is_later = self.now >= self.breaker.state.now_ms
        foreseen = self.breaker.refuse(route, key, now_ms=self.now)
        admission = self.breaker.admit(route, key, now_ms=self.now)
        assert foreseen.verdict is admission.verdict
        assert not is_later or foreseen.retry_after_ms == admission.retry_after_ms
        self.took(admission.effects, f"admit {route} {key}: {verdict}")
        assert admission.verdict.value == verdict
        if admission.retry_after_ms is not None:
            assert (admission.verdict, admission.retry_after_ms >= 0) == (Verdict.REJECT, True)

    def unsent(self) -> list[tuple[str | None, str | None]]:
        return [name for name, one in self.model.circuits.items() if one.probe is not None and one.probe[2] is None]

    def send_probe(self) -> None:
        found = self.unsent()
        if found:
            name, request = found[self.pick(len(found))], f"p{self.pick(4)}"
            circuit = self.model.circuits[name]
            assert circuit.probe is not None
            circuit.probe = (*circuit.probe[:2], request)
            assert self.breaker.probe_sent(identify(name), request)
            self.steps.append(f"probe {request} sent for {name}")
        assert not self.breaker.probe_sent(CircuitId("unknown"), "p0")

    def miss_probe(self) -> None:
        found = self.unsent()
        if found:
            name = found[self.pick(len(found))]
            circuit = self.model.circuits[name]
            assert circuit.probe is not None
            self.model.at(self.now)
            del circuit.turns[circuit.probe[0]]
            circuit.probe = None
            self.model.probe(circuit)
            self.took(self.breaker.probe_missing(identify(name), now_ms=self.now), f"probe missing for {name}")

    def answer_probe(self) -> None:
        for (route, _), circuit in list(self.model.circuits.items()):
            if circuit.probe is not None and circuit.probe[2] is not None:
                success, (key, _, request) = bool(self.pick(2)), circuit.probe
                self.model.at(self.now)
                self.model.record(route, key, request, success=success)
                effects = self.breaker.record(route, Key(key), request, success=success, now_ms=self.now)
                self.took(effects, f"probe {request} of {key}: {success}")
                return

    def advance(self) -> None:
        self.now += STEPS_MS[self.pick(len(STEPS_MS))]
        self.model.at(self.now)
        self.model.advance()
        self.took(self.breaker.advance(now_ms=self.now), f"advance to {self.now - START_MS}")

    def set_back(self) -> None:
        self.now -= STEPS_MS[self.pick(len(STEPS_MS))]
        self.steps.append(f"clock at {self.now - START_MS}")

    def restart(self) -> None:
        stored = json.dumps(self.breaker.state.to_json())
        self.breaker = CircuitBreaker(self.breaker.configuration, state_from_json(json.loads(stored)))
        assert self.breaker.paused_groups() == self.world.paused
        assert json.dumps(self.breaker.state.to_json()) == stored
        self.steps.append("restart")

    def close_one(self) -> None:
        route, key = ROUTES[self.pick(3)], KEYS[self.pick(3)]
        self.close([self.model.name(route, key)])

    def close_all(self) -> None:
        self.close(list(self.model.circuits))

    def close(self, names: list[tuple[str | None, str | None]]) -> None:
        self.model.at(self.now)
        for name in names:
            circuit = self.model.circuits.get(name)
            if circuit is not None and circuit.state == "closed":
                circuit.log = []
            elif circuit is not None:
                self.model.close(circuit)
        self.model.resume()
        self.took(self.breaker.close([identify(name) for name in names], now_ms=self.now), f"close {names}")

    def configure(self) -> None:
        configuration = CONFIGURATIONS[self.pick(len(CONFIGURATIONS))]
        self.model.at(self.now)
        self.model.configure(configuration)
        self.took(self.breaker.configure(configuration, now_ms=self.now), f"configure {configuration!r}")

    def keep_routes(self) -> None:
        self.model.at(self.now)
        for name in [name for name in self.model.circuits if name[0] == "b"]:
            self.model.drop(name)
        self.model.resume()
        self.took(self.breaker.keep_routes({"a"}, now_ms=self.now), "keep route a")

    def compare(self, resumed: int, action: str) -> None:
        assert self.breaker.paused_groups() == set(self.model.order) == self.world.paused
        assert list(self.breaker.state.paused) == self.model.order
        circuits = {one.id: one for one in self.breaker.state.circuits.values()}
        assert circuits.keys() == set(map(identify, self.model.circuits))
        for name, naive in self.model.circuits.items():
            circuit = circuits[identify(name)]
            self.states.add(circuit.state)
            assert (circuit.state.name.lower(), circuit.since_ms) == (naive.state, naive.since)
            failed, succeeded = ([one[0] for one in naive.log if one[2] is side] for side in (False, True))
            assert (list(circuit.samples.failures), list(circuit.samples.successes)) == (failed, succeeded)
            assert circuit.samples.fail_ratio == (100 * len(failed) // len(naive.log) if naive.log else 0)
            assert (list(circuit.held), list(circuit.released)) == (naive.held, naive.released)
            assert circuit.paused == len({*naive.held, *naive.released})
            assert list(circuit.candidates) == sorted(naive.turns, key=lambda one: naive.turns[one])
            probe = circuit.probe
            assert (None if probe is None else (probe.key, probe.since_ms, probe.request_id)) == naive.probe
        # What the times of `next_step_ms` promise: before them `advance` changes nothing, at them it does.
        moment = self.breaker.next_step_ms()
        assert action != "advance" or moment is None or moment > self.now
        assert not self.breaker.configuration.unlock.enabled or len(self.world.resumed) - resumed <= 1


def identify(name: tuple[str | None, str | None]) -> CircuitId:
    return CircuitId(name[0], None if name[1] is None else Key(name[1]))


def run_sequence(content: bytes) -> set[CircuitState]:
    """Run the steps that the bytes mean; the states that some circuit was in."""
    run = Run(iter(content))
    with patch.object(breaker_module, "MAX_SAMPLES", MAX_SAMPLES), suppress(StopIteration):
        while True:
            run.step()
    return run.states
