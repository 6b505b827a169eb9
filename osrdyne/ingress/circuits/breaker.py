"""The circuit breaker of a pool: its circuits, and the groups that they pause. A state machine without I/O.

The caller passes in the time, carries out the effects that each method returns, and reports outcomes. An open circuit
pauses the groups whose requests it has seen: requests stay in their queues, so none is lost. A half-open circuit lets
one request of one paused group through, the probe. Its success closes the circuit, and the groups are resumed one by
one. Source: docs/design/circuits.md; Gateleen queue circuit breaker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from osrdyne.ingress.circuits.configuration import CircuitConfiguration, CircuitScope, OnOpen
from osrdyne.ingress.circuits.samples import Sample
from osrdyne.ingress.circuits.state import BreakerState, Circuit, CircuitId, CircuitState, Probe
from osrdyne.protocol.names import Key

MAX_CIRCUITS = 2_000  # With more, the closed circuit whose last outcome is the oldest is forgotten.
# Samples of all circuits, about 270 bytes each: with many circuits, each keeps fewer than the configuration allows.
MAX_SAMPLES = 200_000


@dataclass(frozen=True, slots=True)
class PauseGroup:
    """Stop the workers of the group from taking requests. A group is paused at most once."""

    key: Key


@dataclass(frozen=True, slots=True)
class ResumeGroup:
    """Let the workers of the group take requests again: no circuit holds it any more."""

    key: Key


@dataclass(frozen=True, slots=True)
class SendProbe:
    """One request of the paused group may pass: report `probe_sent` before it does, or `probe_missing`."""

    circuit: CircuitId
    key: Key


@dataclass(frozen=True, slots=True)
class Transition:
    """A circuit has changed its state, with the reason in a few words."""

    circuit: CircuitId
    before: CircuitState
    after: CircuitState
    reason: str


Effect = PauseGroup | ResumeGroup | SendProbe | Transition


class Verdict(Enum):
    """The decision about a new request. HOLD: publish it to the queue of its paused group."""

    FORWARD = "forward"
    HOLD = "hold"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Admission:
    """A verdict with its effects. `retry_after_ms`: of a rejected request, the time until the circuit may be half open
    or its probe may have an outcome; None if the circuit stays open until it is closed by hand."""

    verdict: Verdict
    retry_after_ms: int | None = None
    effects: tuple[Effect, ...] = ()


class CircuitBreaker:
    """All circuits of a pool. Times are milliseconds since the epoch; an earlier time than the last one means that the
    clock was set back, or that the clock of another leader was fast. `state`: for reading and storing only.

    The caller must carry out the effects that a method returns, in their order. After a crash before that, the next
    leader pauses `paused_groups`, and a probe that was not sent has no outcome in time.
    """

    def __init__(self, configuration: CircuitConfiguration, state: BreakerState | None = None) -> None:
        """Continue with a stored state, or begin with closed circuits. The caller must pause `paused_groups` first."""
        self.configuration = configuration
        self.state = BreakerState() if state is None else state
        # How many circuits hold a group; two routes may lead to one group.
        self._holders = Counter(key for circuit in self.state.circuits.values() for key in circuit.held)
        # An earlier leader may have stored the configuration, and ended before it stored what follows from it.
        self._fit_to_configuration([])

    # --- reading

    def circuit_of(self, route: str | None, key: Key) -> CircuitId:
        """The circuit of a request of this route and group."""
        return CircuitId(route, key if self.configuration.scope is CircuitScope.GROUP else None)

    def state_of(self, circuit_id: CircuitId) -> CircuitState:
        """The state of a circuit; closed for one without outcomes."""
        circuit = self.state.circuits.get(circuit_id)
        return CircuitState.CLOSED if circuit is None else circuit.state

    def paused_groups(self) -> frozenset[Key]:
        """The groups that are paused now: held by a circuit, or not resumed yet."""
        return frozenset(self.state.paused)

    def next_step_ms(self) -> int | None:
        """When to call `advance` next; None if only outcomes, requests or a change by hand have an effect."""
        moments = [moment for one in self.state.circuits.values() if (moment := self._next_step_of(one)) is not None]
        if self._is_resuming:
            moments.append(self._next_resume_ms())
        return min(moments, default=None)

    # --- outcomes and requests

    def record(
        self, route: str | None, key: Key, request_id: str, *, success: bool, now_ms: int, probe_id: str | None = None
    ) -> tuple[Effect, ...]:
        """Count the outcome of a request. A repeated outcome replaces the earlier one. `probe_id`: the id under which
        the request passed as a probe, if that is not its own."""
        self._set_time(now_ms)
        effects: list[Effect] = []
        circuit_id = self.circuit_of(route, key)
        circuit = self.state.circuits.get(circuit_id)
        if self.configuration.updates_statistics and (circuit is None or circuit.state is not CircuitState.OPEN):
            circuit = self._counted(circuit_id, request_id, key, success=success)
        if circuit is None:
            return ()
        if circuit.state is CircuitState.CLOSED and self._must_open(circuit):
            self._open(circuit, f"{circuit.samples.fail_ratio} % of {circuit.samples.count} requests failed", effects)
            for one in circuit.samples.groups():
                self._pause(circuit, one, effects)
        # Only the probe decides: any other request may have begun before the circuit opened.
        elif circuit.probe is not None and circuit.probe.request_id == (probe_id or request_id):
            if success:
                self._close(circuit, "the probe succeeded", effects)
                self._resume_due(effects)
            else:
                self._open(circuit, "the probe failed", effects)
        return tuple(effects)

    def admit(self, route: str | None, key: Key, *, now_ms: int) -> Admission:
        """Decide about a new request. If it is held, publish it to the queue of its group after the effects."""
        self._set_time(now_ms)
        decision = self.refuse(route, key, now_ms=self.state.now_ms)
        if decision.verdict is Verdict.FORWARD:
            return decision
        circuit, effects = self.state.circuits[self.circuit_of(route, key)], list[Effect]()
        # Also if the request is rejected: earlier ones may wait in the queue of its group.
        self._pause(circuit, key, effects)
        self._send_probe(circuit, effects)
        return replace(decision, effects=tuple(effects))

    def refuse(self, route: str | None, key: Key, *, now_ms: int) -> Admission:
        """The decision of `admit` at this time, without its effects."""
        circuit = self.state.circuits.get(self.circuit_of(route, key))
        if circuit is None or circuit.state is CircuitState.CLOSED:
            return Admission(Verdict.FORWARD)
        awaits = self._awaits_probe(circuit)
        # A half-open circuit without a waiting request would never get a probe if it rejected this one.
        if self.configuration.on_open is OnOpen.HOLD or (awaits and not circuit.candidates):
            return Admission(Verdict.HOLD)
        # If the circuit awaits a probe, this request lets a waiting group send one now.
        moment = now_ms + self.configuration.probe.interval_ms if awaits else self._next_step_of(circuit)
        return Admission(Verdict.REJECT, None if moment is None else max(0, moment - now_ms))

    # --- probes

    def probe_sent(self, circuit_id: CircuitId, request_id: str) -> bool:
        """Record which request is the probe, before it passes. False: it must not pass, because the circuit awaits no
        probe."""
        circuit = self.state.circuits.get(circuit_id)
        if circuit is None or circuit.probe is None or circuit.probe.request_id is not None:
            return False
        circuit.probe.request_id = request_id
        return True

    def probe_missing(self, circuit_id: CircuitId, *, now_ms: int, request_id: str | None = None) -> tuple[Effect, ...]:
        """Record that the group that was to send the probe has no request, and choose the next group. `request_id`: as
        given to `probe_sent`, if that was called before the request was known.

        The group stays paused, and may be chosen again after its next request.
        """
        self._set_time(now_ms)
        circuit, effects = self.state.circuits.get(circuit_id), list[Effect]()
        if circuit is not None and circuit.probe is not None and circuit.probe.request_id == request_id:
            circuit.candidates.pop(circuit.probe.key, None)
            circuit.probe = None
            self._send_probe(circuit, effects)
        return tuple(effects)

    # --- time, and changes by a person

    def advance(self, *, now_ms: int) -> tuple[Effect, ...]:
        """Apply the transitions that are due: half-open circuits, probes, probes without an outcome, a group to
        resume."""
        self._set_time(now_ms)
        effects: list[Effect] = []
        for circuit in self.state.circuits.values():
            # Here too: a route without requests must not show the ratio of a former day.
            circuit.samples.drop_older(now_ms=now_ms, max_age_ms=self.configuration.max_age_ms)
            moment = self._next_step_of(circuit)
            if moment is None or moment > self.state.now_ms:
                continue
            if circuit.state is CircuitState.OPEN:
                self._change(circuit, CircuitState.HALF_OPEN, "the interval of openToHalfOpen is over", effects)
                self._send_probe(circuit, effects)
            elif circuit.probe is not None:
                # Its report was lost, its worker was killed, or it takes too long: stop waiting for it.
                self._open(circuit, "the probe had no outcome in time", effects)
            else:
                self._send_probe(circuit, effects)
        self._resume_due(effects)
        return tuple(effects)

    def close(self, circuits: Iterable[CircuitId], *, now_ms: int) -> tuple[Effect, ...]:
        """Close these circuits by hand, as after a successful probe. Of closed ones the samples are cleared; unknown
        ones are ignored."""
        self._set_time(now_ms)
        effects: list[Effect] = []
        for circuit_id in circuits:
            circuit = self.state.circuits.get(circuit_id)
            if circuit is not None and circuit.state is CircuitState.CLOSED:
                circuit.samples.clear()
            elif circuit is not None:
                self._close(circuit, "closed by hand", effects)
        self._resume_due(effects)
        return tuple(effects)

    def configure(self, configuration: CircuitConfiguration, *, now_ms: int) -> tuple[Effect, ...]:
        """Use another configuration. Turning the checks off, or another scope, closes all circuits."""
        self._set_time(now_ms)
        effects: list[Effect] = []
        self.configuration = configuration
        self._fit_to_configuration(effects)
        self._resume_due(effects)
        return tuple(effects)

    def keep_routes(self, routes: Collection[str], *, now_ms: int) -> tuple[Effect, ...]:
        """Forget the circuits of all other routes and resume their groups. The circuit of no named route stays."""
        self._set_time(now_ms)
        effects: list[Effect] = []
        gone = [one for one in self.state.circuits.values() if one.id.route is not None and one.id.route not in routes]
        self._forget(gone, "the route was removed", effects)
        self._resume_due(effects)
        return tuple(effects)

    # --- steps

    def _set_time(self, now_ms: int) -> None:
        if now_ms < self.state.now_ms:
            # Set back: a time in the future would delay the next step of its circuit by the whole jump.
            for circuit in self.state.circuits.values():
                circuit.samples.clamp(now_ms)
                circuit.since_ms = min(circuit.since_ms, now_ms)
                if circuit.probe is not None:
                    circuit.probe.since_ms = min(circuit.probe.since_ms, now_ms)
            if self.state.resumed_at_ms is not None:
                self.state.resumed_at_ms = min(self.state.resumed_at_ms, now_ms)
        self.state.now_ms = now_ms

    def _counted(self, circuit_id: CircuitId, request_id: str, key: Key, *, success: bool) -> Circuit:
        circuit = self.state.circuits.get(circuit_id)
        if circuit is None:
            circuit = self.state.circuits[circuit_id] = Circuit(circuit_id, since_ms=self.state.now_ms)
        self.state.circuits.move_to_end(circuit_id)
        circuit.samples.drop_older(now_ms=self.state.now_ms, max_age_ms=self.configuration.max_age_ms)
        circuit.samples.record(request_id, Sample(key, self.state.now_ms), success=success, most=self._most_samples)
        if len(self.state.circuits) > MAX_CIRCUITS:
            # Only a closed one, because an open one holds groups. The new circuit is the last and stays.
            first = next((one for one in self.state.circuits.values() if one.state is CircuitState.CLOSED), circuit)
            if first is not circuit:
                del self.state.circuits[first.id]
        return circuit

    @property
    def _most_samples(self) -> int:
        """The most samples of each side of a circuit, at least as many as it needs to open."""
        share = MAX_SAMPLES // (2 * max(1, len(self.state.circuits)))
        return min(self.configuration.max_samples, max(self.configuration.min_samples, share))

    def _must_open(self, circuit: Circuit) -> bool:
        configuration, samples = self.configuration, circuit.samples
        return (
            configuration.checks
            and configuration.updates_statistics
            and samples.count >= configuration.min_samples
            and samples.fail_ratio >= configuration.error_threshold
        )

    def _change(self, circuit: Circuit, after: CircuitState, reason: str, effects: list[Effect]) -> None:
        effects.append(Transition(circuit.id, circuit.state, after, reason))
        circuit.state, circuit.since_ms, circuit.probe = after, self.state.now_ms, None

    def _open(self, circuit: Circuit, reason: str, effects: list[Effect]) -> None:
        self._change(circuit, CircuitState.OPEN, reason, effects)

    def _pause(self, circuit: Circuit, key: Key, effects: list[Effect]) -> None:
        circuit.candidates.setdefault(key)
        if key in circuit.held:
            return
        circuit.released.pop(key, None)
        circuit.held[key] = None
        self._holders[key] += 1
        if key not in self.state.paused:
            self.state.paused[key] = None
            effects.append(PauseGroup(key))

    def _awaits_probe(self, circuit: Circuit) -> bool:
        return circuit.state is CircuitState.HALF_OPEN and circuit.probe is None and self.configuration.probe.enabled

    def _send_probe(self, circuit: Circuit, effects: list[Effect]) -> None:
        """Choose the group that sends the probe, if the circuit needs one now."""
        if not self._awaits_probe(circuit) or not circuit.candidates:
            return
        key = next(iter(circuit.candidates))
        circuit.candidates.move_to_end(key)
        circuit.probe = Probe(key, self.state.now_ms)
        effects.append(SendProbe(circuit.id, key))

    def _close(self, circuit: Circuit, reason: str, effects: list[Effect]) -> None:
        self._change(circuit, CircuitState.CLOSED, reason, effects)
        circuit.samples.clear()
        for key in circuit.held:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
        circuit.released |= circuit.held
        circuit.held.clear()
        circuit.candidates.clear()

    def _fit_to_configuration(self, effects: list[Effect]) -> None:
        """Close all circuits if they are not checked any more, forget those of another scope, drop excess samples."""
        if not self.configuration.checks:
            for circuit in self.state.circuits.values():
                if circuit.state is not CircuitState.CLOSED:
                    self._close(circuit, "the checks were turned off", effects)
        by_group = self.configuration.scope is CircuitScope.GROUP
        others = [one for one in self.state.circuits.values() if (one.id.key is not None) != by_group]
        self._forget(others, "circuitScope was changed", effects)
        for circuit in self.state.circuits.values():
            circuit.samples.bound(self.configuration.max_samples)

    def _forget(self, circuits: Iterable[Circuit], reason: str, effects: list[Effect]) -> None:
        for circuit in circuits:
            if circuit.state is not CircuitState.CLOSED:
                self._close(circuit, reason, effects)
            del self.state.circuits[circuit.id]

    def _resume_due(self, effects: list[Effect]) -> None:
        """Resume one group if it is time, or all if they are not resumed one by one."""
        if not self._is_resuming or self._next_resume_ms() > self.state.now_ms:
            return
        free = [key for key in self.state.paused if key not in self._holders]
        resumed = free[:1] if self.configuration.unlock.enabled else free
        for key in resumed:
            del self.state.paused[key]
            effects.append(ResumeGroup(key))
        for circuit in self.state.circuits.values():
            if circuit.released:
                for key in resumed:
                    circuit.released.pop(key, None)
        self.state.resumed_at_ms = self.state.now_ms

    @property
    def _is_resuming(self) -> bool:
        """Whether a group is paused that no circuit holds."""
        return len(self.state.paused) > len(self._holders)

    def _next_resume_ms(self) -> int:
        unlock = self.configuration.unlock
        if self.state.resumed_at_ms is None or not unlock.enabled:
            return self.state.now_ms
        return self.state.resumed_at_ms + unlock.interval_ms

    def _next_step_of(self, circuit: Circuit) -> int | None:
        """When the state of a circuit changes by time alone, or a probe is due; None: never."""
        configuration = self.configuration
        if circuit.state is CircuitState.OPEN and configuration.open_to_half_open.enabled:
            return circuit.since_ms + configuration.open_to_half_open.interval_ms
        if circuit.state is CircuitState.HALF_OPEN:
            if circuit.probe is not None:
                return circuit.probe.since_ms + configuration.probe.interval_ms
            if configuration.probe.enabled and circuit.candidates:
                return circuit.since_ms
        return None
