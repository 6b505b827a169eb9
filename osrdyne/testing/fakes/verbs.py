"""What a test does to a leader and asks of it. No other module of the tests knows where a term keeps its state.

`Stack` has these verbs for a leader on a broker in memory, and the integration tests have them for a daemon on a real
RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from osrdyne.broker.topology.declarations import Exchange
from osrdyne.daemon.term import Term
from osrdyne.errors import OsrdyneError
from osrdyne.pool.context import TermState
from osrdyne.pool.state.groups.profiles import GroupSettings
from osrdyne.pool.state.groups.transitions import GroupStatus
from osrdyne.pool.state.observed import ObservedQueue, ObservedWorkers, StartFailure
from osrdyne.pool.state.queues.backlog import Waiting
from osrdyne.pool.state.queues.created_queues import CreatedQueues
from osrdyne.pool.state.workers.crashes import PoisonTexts
from osrdyne.pool.state.workers.instances import InventoryEntry
from osrdyne.pool.state.workers.rates import GroupRates
from osrdyne.pool.state.workers.worker_reports import WorkerReportState
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key
from osrdyne.protocol.poison import WorkerDeath


class LeaderVerbs:
    """Needs the attribute `term`: the term that leads now."""

    term: Term

    @property
    def _state_of_term(self) -> TermState:
        return self.term.state

    # --- what the leader wants

    @property
    def generation(self) -> Generation:
        return self._state_of_term.tracker.generation

    def generation_of(self, key: Key) -> Generation:
        return self._state_of_term.tracker.generation_of(key)

    def require(self, key: Key) -> None:
        """Require the group of a key, as an orphan does."""
        self._state_of_term.tracker.require_worker_group(key)

    def retire(self, key: Key) -> bool:
        return self._state_of_term.tracker.retire(key)

    def pin(self, key: Key) -> None:
        self._state_of_term.tracker.pin(key)

    def unpin(self, key: Key) -> None:
        self._state_of_term.tracker.unpin(key)

    def groups(self) -> list[Key]:
        return self._state_of_term.tracker.keys()

    def status_of(self, key: Key) -> GroupStatus | None:
        return self._state_of_term.tracker.status(key)

    def is_held(self, key: Key) -> bool:
        return self._state_of_term.tracker.is_held(key)

    def places(self) -> list[Key]:
        """The groups that have a place or wait for one."""
        admission = self._state_of_term.admission
        return [*admission.admitted(), *admission.waiting()]

    def profile_of(self, key: Key) -> GroupSettings:
        return self._state_of_term.profiles.of(key)

    def profile_groups(self) -> tuple[GroupSettings, ...]:
        return self._state_of_term.profiles.groups

    def pause(self, key: Key) -> None:
        """Pause a group, as an open circuit does."""
        self._state_of_term.paused.pause(key)

    def probe(self, keys: Iterable[Key]) -> None:
        """Name the paused groups that need a worker for a trial request."""
        self._state_of_term.paused.set_probing(keys)

    # --- what the leader has observed of queues

    def priority_exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of the priority levels in use."""
        return self._state_of_term.layout.exchanges.exchanges

    def queue_of(self, key: Key) -> ObservedQueue:
        return self._state_of_term.queue_status[key]

    def set_queue(self, key: Key, **changes: Any) -> None:
        self._state_of_term.queue_status.update(key, **changes)

    def fault_of(self, key: Key) -> OsrdyneError | None:
        """Why the queue of a key is unavailable."""
        return self.queue_of(key).fault

    def existing_queues(self) -> set[Key]:
        return self._state_of_term.queue_status.existing()

    def known_queues(self) -> list[Key]:
        """The keys that have a status, also of a queue that does not exist."""
        return self._state_of_term.queue_status.keys()

    def backlog(self) -> dict[int | None, Waiting]:
        return self._state_of_term.backlog.waiting()

    @property
    def created_queues(self) -> CreatedQueues:
        return self._state_of_term.created_queues

    # --- what the leader has observed of workers

    def workers_of(self, key: Key) -> ObservedWorkers:
        return self._state_of_term.worker_status[key]

    def failure_of(self, key: Key) -> StartFailure | None:
        """Why a group has no worker."""
        return self.workers_of(key).failure

    def waits_for(self, key: Key) -> str | None:
        """The setting that keeps a worker from being started."""
        return self.workers_of(key).waiting_for

    def known_workers(self) -> list[Key]:
        """The keys whose workers have a status."""
        return self._state_of_term.worker_status.keys()

    def instances_of(self, key: Key | None = None) -> list[InventoryEntry]:
        """The instances of a key, or of all keys."""
        instances = self._state_of_term.instances
        return instances.entries() if key is None else instances.of_key(key)

    def report_of(self, worker_id: str) -> WorkerReportState | None:
        return self._state_of_term.worker_reports[worker_id]

    def reports_of(self, key: Key | None = None) -> list[WorkerReportState]:
        """What the workers of a key, or all workers, have reported."""
        reports = self._state_of_term.worker_reports
        return reports.all() if key is None else reports.of_key(key)

    def assume_ready(self, worker_id: str, key: Key) -> None:
        self._state_of_term.worker_reports.assume_ready(worker_id, key)

    def forget(self, worker_id: str) -> None:
        """Forget what a worker has reported."""
        self._state_of_term.worker_reports.forget(worker_id)

    def deaths_of(self, key: Key, fingerprint: str) -> tuple[WorkerDeath, ...]:
        """The deaths of workers that had received a request."""
        return self._state_of_term.crashes.of_request(key, fingerprint)

    def ended_workers_of(self, key: Key) -> list[WorkerDeath]:
        return self._state_of_term.ended_workers.of_key(key)

    def deaths_counted(self) -> float:
        return self._state_of_term.crashes.count.value

    @property
    def poison_texts(self) -> PoisonTexts:
        return self._state_of_term.poison_texts

    @property
    def rates(self) -> GroupRates:
        return self._state_of_term.rates
