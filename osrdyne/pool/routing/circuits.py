"""The circuits of a managed pool in one term: the share of failed requests of each route, and the paused groups.

Outcomes come from the reports of workers, from dead letters and from failed starts, each with the fingerprint of its
request, so that a request counts once. The outcome of a lost report is not counted. The state survives a restart and a
change of leader as a snapshot, without the outcomes of the last second.

The breaker decides (`osrdyne.ingress.circuits`), this module acts: it stores the state, and then pauses and resumes
groups and asks workers for probes. Source: docs/design/circuits.md.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import uuid4

from osrdyne.aio.clock import now_ms
from osrdyne.aio.signals import Wakeup
from osrdyne.errors import BrokerUnavailableError
from osrdyne.ingress.acceptance import RoutedRequest
from osrdyne.ingress.checks import DeliveryCheck, Refusal
from osrdyne.ingress.circuits.breaker import (
    CircuitBreaker,
    Effect,
    PauseGroup,
    ResumeGroup,
    SendProbe,
    Transition,
    Verdict,
)
from osrdyne.ingress.circuits.configuration import CircuitConfiguration, load_circuits_json
from osrdyne.ingress.circuits.samples import succeeded
from osrdyne.ingress.circuits.state import BreakerState, Circuit, CircuitId, CircuitState, state_from_json
from osrdyne.ingress.requests import Arrival
from osrdyne.metrics import Metrics
from osrdyne.pool.context import TermContext
from osrdyne.pool.routing.active_manifest import ActiveManifest
from osrdyne.pool.routing.manifest_store import ManifestKind, ManifestStore
from osrdyne.pool.state.groups.paused_groups import PausedGroups
from osrdyne.pool.state.groups.pins import Parameters
from osrdyne.pool.state.observed import QueueStatuses
from osrdyne.pool.state.snapshots import SnapshotStorage, SnapshotStore
from osrdyne.pool.state.workers.worker_reports import WorkerRegistry
from osrdyne.pool.workers.control import WorkerControl
from osrdyne.protocol.activity import EMPTY_PROBE_FIELD, GENERATION_FIELD, ActivityReport
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.statuses import Status

SNAPSHOT = "circuits"  # The name of the snapshots.
SAVE_INTERVAL = 1.0  # Seconds between two snapshots at least: what a killed leader forgets.
REPEAT_INTERVAL = 5.0  # Seconds between two messages to a group because of a worker that deviates from it.


@dataclass(frozen=True, slots=True)
class CircuitView:
    """One circuit. `route` None: of requests of no named route; `key` None: of all groups of the route. `since`: when
    it got its state, seconds since the epoch. `paused`: the number of groups that it pauses, or that are not resumed
    yet since it was closed."""

    hash: str
    route: str | None
    key: Key | None
    status: CircuitState
    fail_ratio: int
    successes: int
    failures: int
    since: float
    paused: int = 0

    @classmethod
    def of(cls, circuit: Circuit) -> CircuitView:
        samples = circuit.samples
        return cls(
            circuit.id.hash,
            circuit.id.route,
            circuit.id.key,
            circuit.state,
            samples.fail_ratio,
            len(samples.successes),
            len(samples.failures),
            circuit.since_ms / 1000,
            circuit.paused,
        )


class ActiveCircuits(ActiveManifest[CircuitConfiguration]):
    """The circuits and their configuration. `routes`: the names of the active routes; outcomes of others are not
    counted, whatever a worker reports."""

    def __init__(
        self,
        context: TermContext,
        parameters: Parameters,
        *,
        snapshots: SnapshotStorage,
        routes: Callable[[], frozenset[str]],
        paused: PausedGroups,
        queue_status: QueueStatuses,
        worker_reports: WorkerRegistry,
        control: WorkerControl,
    ) -> None:
        pool = context.names.pool
        super().__init__(
            context, ManifestStore(parameters, pool=pool, kind=ManifestKind.CIRCUITS, load=load_circuits_json)
        )
        self._metrics: Metrics = context.metrics
        self._routes = routes
        self._snapshots = SnapshotStore[BreakerState](
            snapshots, pool=pool, encode=BreakerState.to_json, parse=state_from_json
        )
        self._breaker = CircuitBreaker(CircuitConfiguration())
        self._changed = False
        self._paused = paused
        self._queue_status = queue_status
        self._worker_reports = worker_reports
        self._control = control
        self._wakeup = Wakeup(context.clock)
        self._begun = Wakeup(context.clock)
        self._stepping = asyncio.Lock()
        # The decisions of the breaker that are not stored yet, in their order.
        self._effects: list[Effect] = []
        # Groups whose pause is not stored yet. Requests for them are published after that.
        self._unsettled: dict[Key, asyncio.Event] = {}
        # Probes that are stored and not sent, by id: no worker of the group is ready yet.
        self._unsent: dict[str, Key] = {}
        # Paused groups that have got a request since they were asked for a probe.
        self._published: set[Key] = set()
        self._sent_at: dict[Key, float] = {}

    @property
    def counts(self) -> bool:
        """Whether outcomes are counted."""
        return self._breaker.configuration.updates_statistics

    @property
    def _acts(self) -> bool:
        return self._breaker.configuration.checks

    def check(self) -> DeliveryCheck:
        """The check of new requests at the ingress."""
        return DeliveryCheck(
            "circuit", self._refuse, passed=self._note_passed, refused=self._note_refused, describe=self._describe
        )

    async def load(self) -> None:
        await super().load()
        if self.counts or self._acts:
            state = await self._snapshots.load()
            # With the configuration: it says which circuits of the state are kept.
            self._breaker = CircuitBreaker(self._breaker.configuration, state)
            for key in self._breaker.paused_groups():
                self._paused.pause(key)
            self._show()

    # --- outcomes

    def record(
        self,
        route: str | None,
        key: Key,
        requests: Iterable[str],
        *,
        status: str,
        code: int | None,
        probe_id: str | None = None,
    ) -> None:
        """Count the outcome of requests, by their fingerprints. `code`: of the handler, None for the default one.
        `probe_id`: of the one request that was a probe."""
        success = succeeded(status, code)
        if not (self.counts or self._acts) or (route is not None and route not in self._routes()):
            return
        if success is None:
            if probe_id is not None:
                # The outcome of the probe says nothing about the backend: another request has to be the probe.
                self._probe_missing(key, probe_id, has_more=True)
            return
        at = now_ms(self._clock)
        for request in requests:
            # One by one: the circuit opens at the exact sample, and the outcomes after it do not count.
            self._apply(self._breaker.record(route, key, request, success=success, now_ms=at, probe_id=probe_id))
            self._changed = True
            self._begun.set()

    async def take_report(self, report: ActivityReport) -> None:
        """Take the report of a worker: it may have no request for a probe, be ready for one, or deviate from the pause
        of its group."""
        key, empty = Key(report.key), report.details.get(EMPTY_PROBE_FIELD)
        if isinstance(empty, str):
            self._probe_missing(key, empty)
        if self._unsent:
            await self._send_probes(key)
        worker = self._worker_reports[report.worker_id]
        # Only reports of state contain the pause. A worker deviates if it is new, or if a control message was lost.
        if not self._managed or worker is None or GENERATION_FIELD not in report.details or key in self._unsettled:
            return
        now = self._clock.monotonic()
        if worker.paused != self._paused.is_paused(key) and now - self._sent_at.get(key, -math.inf) >= REPEAT_INTERVAL:
            self._sent_at = {one: at for one, at in self._sent_at.items() if now - at < REPEAT_INTERVAL}
            self._sent_at[key] = now
            await self._control.ask_for_reports(key)

    # --- new requests

    def _refuse(self, arrival: Arrival, routed: RoutedRequest, now: int) -> Refusal | None:
        if not self._acts:
            return None
        decision = self._breaker.refuse(routed.route, routed.key, now_ms=now)
        if decision.verdict is not Verdict.REJECT:
            return None
        return Refusal(Status.CIRCUIT_OPEN, f"{self._open_circuit(routed)}. Try again later.", decision.retry_after_ms)

    def _describe(self, arrival: Arrival, routed: RoutedRequest) -> str | None:
        if not self._is_open(routed.route, routed.key):
            return None
        return f"{self._open_circuit(routed)}: the request waits in its queue."

    def _open_circuit(self, routed: RoutedRequest) -> str:
        circuit = self._breaker.circuit_of(routed.route, routed.key)
        state = self._breaker.state_of(circuit).name.lower().replace("_", " ")
        of = "requests of no named route" if circuit.route is None else f"route {circuit.route}"
        return f"The circuit of {of} is {state}"

    def _note_passed(self, arrival: Arrival, routed: RoutedRequest) -> None:
        self._admit(routed.route, routed.key)

    def _note_refused(self, arrival: Arrival, routed: RoutedRequest) -> None:
        # Earlier requests may wait in its queue. Without a queue there is no group, and none is made for a refusal.
        if self._queue_status[routed.key].exists:
            self._admit(routed.route, routed.key)

    async def settled(self, key: Key) -> None:
        """Wait until a pause of this group is stored and sent to its workers, or could not be."""
        if (event := self._unsettled.get(key)) is not None:
            await event.wait()

    def note_published(self, route: str | None, key: Key) -> None:
        """Note a request that is in the queue of its group now: it may be the next probe."""
        if self._acts and self._is_open(route, key):
            self._published.add(key)
            self._admit(route, key)

    def _admit(self, route: str | None, key: Key) -> None:
        if self._is_open(route, key):
            self._apply(self._breaker.admit(route, key, now_ms=now_ms(self._clock)).effects)

    def _is_open(self, route: str | None, key: Key) -> bool:
        return self._breaker.state_of(self._breaker.circuit_of(route, key)) is not CircuitState.CLOSED

    # --- for the API

    def circuits(self) -> list[CircuitView]:
        """Every circuit, by route and key. Raises `PoolConflictError` in a direct pool."""
        self.require_managed()
        self._apply(self._breaker.advance(now_ms=now_ms(self._clock)))
        views = map(CircuitView.of, self._breaker.state.circuits.values())
        return sorted(views, key=lambda one: (one.route is not None, one.route or "", one.key or ""))

    async def close(self, circuit: str | None, *, author: str) -> list[CircuitView]:
        """Close the circuit with this hash, or all, and clear their samples; returns those that were not closed.
        Returns once that is stored.

        Raises `PoolConflictError` in a direct pool, and `BrokerUnavailableError` if RabbitMQ did not store it: the
        leader tries again every second, and if it dies before, its successor has the state from before.
        """
        found = [one for one in self.circuits() if circuit in {None, one.hash}]
        names = {one.hash for one in found if one.status is not CircuitState.CLOSED}
        self._log.info("circuits closed by hand", author=author, circuits=sorted(names))
        hashes = {one.hash for one in found}
        ids = [one for one in self._breaker.state.circuits if one.hash in hashes]
        self._apply(self._breaker.close(ids, now_ms=now_ms(self._clock)))
        self._changed = True  # the cleared samples of closed ones are no effect
        if not await self.step():
            raise BrokerUnavailableError(
                "RabbitMQ did not store that circuits were closed; this daemon tries again every second."
            )
        return [one for one in found if one.hash in names]

    # --- acting

    async def work(self) -> None:
        """Carry out decisions that are due, save the state a second after a change, and update the metrics. Runs until
        cancelled."""
        while True:
            if self._has_nothing_to_do():
                await self._begun.wait(None)
            due = self._breaker.next_step_ms()
            rest = SAVE_INTERVAL if due is None else (due - now_ms(self._clock)) / 1000
            await self._wakeup.wait(max(0.0, min(SAVE_INTERVAL, rest)))
            await self.step()
            for key in set(self._unsent.values()):
                # No worker of the group had a control queue when it was asked.
                await self._send_probes(key)

    def _has_nothing_to_do(self) -> bool:
        """Whether nothing becomes due before the next outcome; then the loop sleeps, as in a pool without circuits."""
        return not (self._breaker.state.circuits or self._effects or self._changed) and (
            self._breaker.next_step_ms() is None
        )

    async def step(self) -> bool:
        """Store the state if it has changed, and then carry out the decisions of the breaker. False if RabbitMQ did not
        store it."""
        async with self._stepping:
            at, before = now_ms(self._clock), len(self._breaker.state.circuits)
            self._apply(self._breaker.keep_routes(self._routes(), now_ms=at))
            self._apply(self._breaker.advance(now_ms=at))
            self._show()
            effects, self._effects = self._effects, []
            if not effects and not self._changed and before == len(self._breaker.state.circuits):
                return True
            # Cleared first: changes during the save are saved the next time.
            self._changed = False
            # Crash before: the next leader goes on with the state of a second ago, in which nothing of this has
            # happened. After: it pauses the groups of the state, resumes the others, and opens circuits again whose
            # probe was not sent.
            is_stored = False
            try:
                state = self._breaker.state.copy()
                is_stored = await self._snapshots.save(state)
                if is_stored:
                    samples = sum(one.samples.count for one in state.circuits.values())
                    self._log.debug("circuits stored", circuits=len(state.circuits), samples=samples)
            finally:
                # Decisions of a state that is not stored are not carried out: the next step tries again, a second later
                # or when the term ends in order.
                if not is_stored:
                    self._changed, self._effects = True, [*effects, *self._effects]
            if is_stored:
                for effect in effects:
                    await self._carry_out(effect)
            for effect in effects:
                if isinstance(effect, PauseGroup):
                    # Also if the state could not be stored: requests must not wait for RabbitMQ without end.
                    self._settle(effect.key)
            self._show_probing()
            return is_stored

    def _apply(self, effects: Iterable[Effect]) -> None:
        """Note decisions of the breaker, which the next step stores and carries out."""
        for effect in effects:
            match effect:
                case Transition():
                    self._log_transition(effect)
                case PauseGroup(key):
                    # At once: from now on no worker is started for it.
                    self._paused.pause(key)
                    self._unsettled.setdefault(key, asyncio.Event())
                case ResumeGroup(key):
                    self._published.discard(key)
                case SendProbe(circuit, key):
                    # The id is stored before a worker gets it: otherwise the next leader would not know the outcome.
                    self._breaker.probe_sent(circuit, f"probe-{uuid4().hex}")
                    self._published.discard(key)
            self._effects.append(effect)
            self._wakeup.set()
            self._begun.set()

    async def _carry_out(self, effect: Effect) -> None:
        # The state may have changed since the decision: then a later effect follows.
        match effect:
            case PauseGroup(key) if key in self._breaker.state.paused:
                self._log.info("group paused", key=key)
                await self._control.ask_for_reports(key)
            case ResumeGroup(key) if key not in self._breaker.state.paused:
                self._log.info("group resumed", key=key)
                self._paused.resume(key)
                await self._control.ask_for_reports(key)
            case SendProbe(circuit, key):
                found = self._breaker.state.circuits.get(circuit)
                if found is not None and found.probe is not None and found.probe.request_id is not None:
                    self._unsent[found.probe.request_id] = key
                    await self._send_probes(key)

    async def _send_probes(self, key: Key) -> None:
        """Send the probes of a group to one of its workers, each once. Without a ready worker that gets control
        messages, they stay unsent until there is one."""
        current = self._current_probes()
        for probe_id in [one for one, asked in self._unsent.items() if asked == key and one in current]:
            # Removed first, and not sent again once a worker may have it: exactly one request may pass. A lost message
            # ends with the time of the probe.
            self._unsent.pop(probe_id, None)
            ready = sorted(worker.worker_id for worker in self._worker_reports.of_key(key) if worker.state.serves)
            for worker_id in ready:
                if await self._control.ask_for_probe(WorkerId(worker_id), probe_id):
                    self._log.info("probe asked for", key=key, probe=probe_id)
                    break
            else:
                self._unsent[probe_id] = key
        self._show_probing()

    def _current_probes(self) -> dict[str, CircuitId]:
        circuits = self._breaker.state.circuits.values()
        return {
            one.probe.request_id: one.id
            for one in circuits
            if one.probe is not None and one.probe.request_id is not None
        }

    def _show_probing(self) -> None:
        current = self._current_probes()
        self._unsent = {probe_id: key for probe_id, key in self._unsent.items() if probe_id in current}
        self._paused.set_probing(self._unsent.values())

    def _probe_missing(self, key: Key, probe_id: str, *, has_more: bool = False) -> None:
        circuit = self._current_probes().get(probe_id)
        if circuit is None:
            return
        at = now_ms(self._clock)
        has_more = has_more or key in self._published
        self._apply(self._breaker.probe_missing(circuit, now_ms=at, request_id=probe_id))
        self._changed = True
        if has_more:
            # A request was published since the group was asked: it is asked again, after the others.
            self._admit(circuit.route, key)

    def _settle(self, key: Key) -> None:
        if (event := self._unsettled.pop(key, None)) is not None:
            event.set()

    def _log_transition(self, change: Transition) -> None:
        log = self._log.warning if change.after is CircuitState.OPEN else self._log.info
        log(
            "circuit changed",
            circuit=change.circuit.hash,
            route=change.circuit.route,
            key=change.circuit.key,
            before=change.before.name.lower(),
            after=change.after.name.lower(),
            reason=change.reason,
        )

    async def _use(self, manifest: CircuitConfiguration | None) -> None:
        self._apply(self._breaker.configure(manifest or CircuitConfiguration(), now_ms=now_ms(self._clock)))

    def _show(self) -> None:
        highest: dict[str, int] = {}
        states: dict[str, int] = {}
        counts: dict[tuple[str, str], int] = {}
        for circuit in self._breaker.state.circuits.values():
            route, samples = circuit.id.route or "", circuit.samples
            highest[route] = max(highest.get(route, 0), samples.fail_ratio)
            states[route] = max(states.get(route, 0), circuit.state)
            for outcome, side in (("success", samples.successes), ("failure", samples.failures)):
                counts[route, outcome] = counts.get((route, outcome), 0) + len(side)
        self._metrics.circuit_fail_ratio.clear()
        self._metrics.circuit_state.clear()
        self._metrics.circuit_samples.clear()
        for route, ratio in highest.items():
            self._metrics.circuit_fail_ratio.labels(route=route).set(ratio)
        for route, state in states.items():
            self._metrics.circuit_state.labels(route=route).set(state)
        for (route, outcome), count in counts.items():
            self._metrics.circuit_samples.labels(route=route, outcome=outcome).set(count)
