"""A pool of several keys in memory: clients, workers, one leader after another, faults, and a ledger of everything.

The leaders are real (session, term, loops, processors); broker, driver and clock are those of `osrdyne.testing`. What
happens is a history: a list of steps (`history_steps`). `faults` is what is wrong, at any moment and in the end.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import cache

from history_process import Passage, SimulatedProcess
from history_worker import Ends, Kind, Manner, SimulatedWorker
from lifecycle_world import REPLIES, Fault, PoolWorld

from osrdyne.amqp import Message
from osrdyne.config.models import LifecycleSettings, PooledSettings, RequestSettings, ScalingSettings, Settings
from osrdyne.drivers.base import Driver
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.registry import pooled_rules
from osrdyne.errors import BrokerError, BrokerUnavailableError, DriverUnavailableError
from osrdyne.metrics import Metrics
from osrdyne.pool.state.observed import Binding
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.pooled import PROCESS_KEY
from osrdyne.protocol.statuses import Status, decode_text
from osrdyne.testing.drivers import FakeWorker
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import Command
from osrdyne.testing.fakes.stack import POOL, Stack, make_stack, settings_for

NAMES = PoolNames(POOL)
KEYS = tuple(Key(name) for name in ("a", "b", "c", "d"))
PATIENCE = 3600.0
"""Seconds after the last fault in which everything must have come to its end."""
LOOK_INTERVAL = 10.0
METRICS = Metrics()
"""Of all histories together: to make them takes longer than to live through some steps."""


class Pool(StrEnum):
    """What the pool of a history is like."""

    ROOMY = "roomy"
    """Groups end after 40 s without use, and have up to three workers."""
    NARROW = "narrow"
    """The same with one worker, two places, one more to wait, one start at a time."""
    POOLED = "pooled"
    """Roomy, with up to three workers in a process."""


@cache
def settings(pool: Pool) -> Settings:
    narrow = pool is Pool.NARROW
    base = settings_for(
        LifecycleSettings(
            unbind_delay=20.0,
            stop_delay=10.0,
            settle_delay=10.0,
            max_groups=2 if narrow else 100,
            max_waiting_groups=1 if narrow else 1000,
            max_concurrent_starts=1 if narrow else 4,
            make_room_after=5.0,
            start_timeout=30.0,
        )
    )
    scaling = ScalingSettings(max=1 if narrow else 3, target_lag=2.0, cooldown=10.0)
    worker = base.worker.model_copy(update={"scaling": scaling})
    if pool is Pool.POOLED:
        # Without spares, so that nothing is left in the end.
        processes = PooledSettings(keys_per_process=3, spares=0, max_processes=20)
        worker = worker.model_copy(update={"placement": "pooled", "pooled": processes})
    # What has no deadline is excused by its age in no history.
    return base.model_copy(update={"worker": worker, "requests": RequestSettings(ttl=1_000_000.0)})


class HistoryWorld(PoolWorld):
    """One pool and everybody around it. `driver` is that of the platform: of pooled workers, it has the processes."""

    def __init__(self, pool: Pool = Pool.ROOMY) -> None:
        super().__init__()
        self.confirmed: dict[bytes, Key] = {}
        self.allowed: dict[bytes, set[str]] = {}
        """Statuses that a request may be answered with."""
        self.forgiven: set[str] = {Status.OK, Status.START_FAILED}
        """Statuses that the faults so far allow to every request. Any worker may fail to start."""
        self.pinned: set[Key] = set()
        self.workers: list[SimulatedWorker] = []
        self.processes: list[SimulatedProcess] = []
        self.manners: deque[Manner] = deque()
        """Of the workers to be started next."""
        self.reports_arrive = True
        self.reports_were_lost = False
        self.api_answers = True
        self.deaths_are_noticed = True
        self.refusals: deque[tuple[bool, BrokerError]] = deque()
        """What becomes of the next forwards: whether they arrive, and the confirm that the leader receives."""
        self.kill_in = 0
        """Commands until the leader is killed."""
        self.moving = asyncio.Event()
        self.moving.set()
        self._settings = settings(pool)
        self._is_pooled = pool is Pool.POOLED
        if pool is Pool.NARROW:
            self.forgiven.add(Status.CAPACITY)
        self._numbers = itertools.count(1)
        self._cut_off: list[FakeChannel] = []

    async def _hook(self, command: Command) -> None:
        """Before each command of a leader takes effect, and after."""
        if command.name.startswith("list_") and not self.api_answers:
            raise BrokerUnavailableError("RabbitMQ's HTTP API did not answer in time.")
        if self.refusals and command.name == "publish" and command.target == NAMES.requests_exchange:
            arrives, error = self.refusals[0]
            if arrives is command.done:
                self.refusals.popleft()
                raise error
        if self.kill_in:
            self.kill_in -= 1
            if not self.kill_in:
                self.kill()
        await self.moving.wait()

    # --- clients

    def send(self, kind: Kind, key: Key) -> None:
        """Publish a request; it is in the ledger once it is confirmed."""
        self.do(self._publish(f"{next(self._numbers)} {kind}".encode(), kind, key))

    async def _publish(self, body: bytes, kind: Kind, key: Key) -> None:
        message = Message(
            body=body,
            reply_to=REPLIES,
            correlation_id=body.decode(),
            expiration="5000" if kind is Kind.BRIEF else None,
            headers={"x-no-activate": True} if kind is Kind.MODEST else {},
        )
        also = {Kind.BRIEF: Status.EXPIRED, Kind.MODEST: Status.NOT_RUNNING, Kind.DEADLY: Status.DELIVERY_LIMIT}
        self.allowed[body] = {also[kind]} if kind in also else set()
        if await self.broker.publish(message, exchange=NAMES.requests_exchange, routing_key=key):
            self.confirmed[body] = key

    def cancel(self) -> None:
        """The caller of the oldest request that is open wants no answer any more."""
        body = min(self.open(), key=lambda body: int(body.split()[0]), default=None)
        if body is not None:
            self.allowed[body].add(Status.CANCELLED)
            message = Message(correlation_id=body.decode(), reply_to=REPLIES)
            self.do(self._ask(message, exchange=NAMES.cancel_exchange, key=self.confirmed[body]))

    async def _ask(self, message: Message, *, exchange: str, key: Key) -> None:
        await self.broker.publish(message, exchange=exchange, routing_key=key)

    def expire(self, queue: str) -> None:
        """The time of everything that waits in a queue runs out."""
        if queue in self.broker.queues:
            for stored in self.broker.queues[queue].ready:
                self.allowed[stored.message.body].add(Status.EXPIRED)
            self.broker.expire(queue)

    # --- workers

    def _begin(self, fake: FakeWorker) -> None:
        if not self._is_pooled or fake.spec.key != PROCESS_KEY:
            return self._begin_worker(fake, self.driver)
        process = SimulatedProcess(
            fake, names=NAMES, broker=self.broker, clock=self.clock, begin_worker=self._begin_worker
        )
        process.reports_arrive = lambda: self.reports_arrive
        self.processes.append(process)
        return self.do(process.live())

    def _begin_worker(self, fake: FakeWorker, home: Ends) -> None:
        manner = self.manners.popleft() if self.manners else Manner.ORDINARY
        worker = SimulatedWorker(fake, manner, names=NAMES, broker=self.broker, home=home, clock=self.clock)
        worker.reports_arrive = lambda: self.reports_arrive
        self.workers.append(worker)
        self.do(self._live(worker))

    async def _live(self, worker: SimulatedWorker) -> None:
        await worker.live()
        if self.deaths_are_noticed:
            worker.channel.end(None)
        else:
            self._cut_off.append(worker.channel)

    def alive(self, key: Key) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.key == key and not worker.fake.gone.is_set()]

    def crash(self, key: Key) -> None:
        for worker in self.alive(key):
            worker.crash()

    def living_processes(self) -> list[SimulatedProcess]:
        """The oldest first; none in a pool of dedicated workers."""
        return [process for process in self.processes if not process.fake.gone.is_set()]

    def end_process(self) -> None:
        """The oldest one dies, with all its workers."""
        for process in self.living_processes()[:1]:
            self.driver.exit_instance(process.fake.instance.instance_id, code=1)

    def hang_process(self) -> None:
        """The oldest one neither reads questions nor reports; its workers go on."""
        for process in self.living_processes()[:1]:
            process.mute = True

    def disturb(self, passage: Passage, *, of_states: bool, number: int = 3) -> None:
        """So travel the next messages of each process."""
        for process in self.living_processes():
            (process.states if of_states else process.questions).extend([passage] * number)

    def lose_reports(self) -> None:
        """Who is not heard of for long counts as hanging, and is replaced."""
        self.reports_arrive, self.reports_were_lost = False, True

    def notice_deaths(self) -> None:
        """The broker gives up the connections of dead workers."""
        self.deaths_are_noticed = True
        for channel in self._cut_off:
            channel.end(None)
        self._cut_off.clear()

    # --- leaders

    def appoint(self) -> None:
        """One more daemon: it leads as soon as no other does."""
        stack = make_stack(
            self.clock, broker=self.broker, driver=self._driver(), settings=self._settings, metrics=METRICS
        )
        stack.pinned = self.pinned
        stack.task = asyncio.create_task(stack.lead(), name="leader")
        self.leaders.append(stack)

    def _driver(self) -> Driver:
        """That of one daemon."""
        return PooledDriver(self.driver, pooled_rules(self._settings)) if self._is_pooled else self.driver

    def see_to_leader(self) -> None:
        if all(stack.task.done() for stack in self.leaders):
            self.appoint()

    async def lead(self) -> None:
        """Wait until one of them leads."""
        while self.leader is None:
            self.see_to_leader()
            await self.clock.advance(1.0)

    @property
    def leader(self) -> Stack | None:
        """Who leads: holds the token, and has taken over."""
        return next(iter(self._leading()), None)

    def _leading(self) -> list[Stack]:
        return [
            stack
            for stack in self.leaders
            if stack.leading.is_set() and not stack.task.done() and not any(one.is_closed for one in stack.connections)
        ]

    def kill(self) -> None:
        """The oldest daemon is killed: nothing is finished, nothing closed in order."""
        for stack in self._oldest():
            stack.killed = True
            stack.task.cancel()
            for connection in stack.connections:
                connection.cut()

    def cut(self, connection: int | None = None) -> None:
        """The connections of the oldest daemon are lost, or one of them: control, publishing."""
        for stack in self._oldest():
            for one in stack.connections if connection is None else stack.connections[connection : connection + 1]:
                one.cut()

    def _oldest(self) -> list[Stack]:
        return [stack for stack in self.leaders if not stack.task.done()][:1]

    def restart_broker(self) -> None:
        """Every connection is lost; what is in queues is not."""
        for stack in self.leaders:
            for connection in stack.connections:
                connection.cut()
        for worker in self.workers:
            worker.channel.end(BrokerUnavailableError("The broker was stopped."))

    def with_leader(self, act: Callable[[Stack], object]) -> None:
        """A question of an operator to the leader; no answer without a leader."""
        if self.leader is not None:
            act(self.leader)

    def pin(self, key: Key) -> None:
        self.pinned.add(key)
        self.with_leader(lambda leader: leader.pin(key))

    def unpin(self, key: Key) -> None:
        self.pinned.discard(key)
        self.with_leader(lambda leader: leader.unpin(key))

    # --- what is true

    def answers(self) -> dict[bytes, set[str]]:
        found: dict[bytes, set[str]] = {}
        for stored in self.broker.queues[REPLIES].ready:
            status = decode_text(stored.message.headers.get("x-status")) or ""
            found.setdefault((stored.message.correlation_id or "").encode(), set()).add(status)
        return found

    def open(self) -> set[bytes]:
        """Confirmed requests without an outcome."""
        return self.confirmed.keys() - self.answers().keys()

    def faults(self) -> dict[Fault | str, object]:
        """What must not be true at any moment, with its evidence."""
        answers = self.answers()
        lost = self.confirmed.keys() - answers.keys()
        if lost:
            lost -= {body for queue in self.broker.queues.values() for body in queue.bodies()}
        alive = [(worker.key, worker.fake.instance.slot) for worker in self.workers if not worker.fake.gone.is_set()]
        wrong = {body: statuses - self.allowed[body] - self.forgiven for body, statuses in answers.items()}
        interrupted = [worker.interrupted for worker in self.workers if worker.interrupted is not None]
        found: dict[Fault | str, object] = {
            Fault.LOST: lost,
            Fault.BUSY_STOPPED: not self.reports_were_lost and interrupted,
            "two workers": [place for place in alive if alive.count(place) > 1],
            "two leaders": self._leading()[1:],
            "wrong status": {body: statuses for body, statuses in wrong.items() if statuses},
            "wrong belief": self._wrong_beliefs(),
            "crash": self._crashes(),
        }
        return {fault: evidence for fault, evidence in found.items() if evidence}

    def _wrong_beliefs(self) -> list[str]:
        """The leader's view of a binding is right, unless it is just being changed (lifecycle:
        bound-is-reported-late)."""
        if self.leader is None:
            return []
        leader, found = self.leader, []
        changing = leader.term.queues.loop.busy_keys()
        for key in leader.known_queues():
            believed = leader.queue_of(key)
            if self.broker.route(NAMES.requests_exchange, key) == [NAMES.request_queue(key)]:
                wrong = believed.binding is Binding.UNBOUND and key not in changing
            else:
                wrong = believed.is_bound
            found += [f"{key}: {believed}"] if wrong else []
        return found

    def _crashes(self) -> list[BaseException]:
        """Unexpected errors that ended a term: neither the broker's nor the driver's."""
        ended = [stack.task for stack in self.leaders if stack.task.done() and not stack.task.cancelled()]
        errors = [BaseExceptionGroup("", [error]) for task in ended if (error := task.exception()) is not None]
        return [crash for one in errors if (crash := one.split((BrokerError, DriverUnavailableError))[1]) is not None]

    def leftovers(self) -> dict[str, object]:
        """What is there although it is no longer needed."""
        ours = (NAMES.orphan_queue, NAMES.dead_letter_queue, NAMES.cancel_queue, NAMES.activity_queue)
        found: dict[str, object] = {
            "queues": [name for name in self.broker.queues if name.startswith(NAMES.request_queue_prefix)],
            "messages": {name: self.broker.bodies(name) for name in ours if self.broker.bodies(name)},
            "workers": list(self.driver.backend.workers),
        }
        if self.leader is not None:
            leader = self.leader
            found |= {
                "groups": leader.groups(),
                "places": leader.places(),
                "facts": [*leader.known_queues(), *leader.known_workers()],
                "holds": [key for key in KEYS if leader.is_held(key)],
            }
        return {what: evidence for what, evidence in found.items() if evidence}

    # --- the end

    def heal(self) -> None:
        """Let every fault pass."""
        self.pinned.clear()
        self.moving.set()
        self.kill_in = 0
        self.refusals.clear()
        self.api_answers = self.reports_arrive = True
        self.broker.transit = 0.0
        self.notice_deaths()
        self.driver.release_starts()
        self.driver.release_lists()
        for queue in list(self.broker.queues):
            self.broker.set_running(queue, True)

    async def rest(self) -> dict[Fault | str, object]:
        """Let everything come to its end; return what is wrong then."""
        self.heal()
        await self._advance_until(lambda: not self.open() and self.leader is not None)
        if faults := self.faults():
            return faults
        if self.open():
            return {Fault.NO_OUTCOME: {body: self.confirmed[body] for body in self.open()}}
        await self._advance_until(lambda: not self.leftovers() and self.leader is not None)
        left = self.leftovers()
        return self.faults() or ({Fault.WRONG_END: left} if left else {})

    async def _advance_until(self, condition: Callable[[], bool]) -> None:
        until = self.clock.monotonic() + PATIENCE
        while self.clock.monotonic() < until and not self.faults():
            await self.clock.advance(LOOK_INTERVAL)
            self.see_to_leader()
            for key in KEYS:  # or they would never go
                self.unpin(key)
            if condition():
                return
