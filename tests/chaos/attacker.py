"""Apply the faults of a schedule to the pool, and end them afterwards. Note each fault with its target."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import psutil

from tests.acceptance.daemon_process import DaemonProcess, until
from tests.chaos.broker_faults import different_policies, flood, forbidden, import_again, queues_of_key
from tests.chaos.callers import KEYS, Callers
from tests.chaos.pool import POOL, PoolUnderAttack
from tests.chaos.proxy import Proxy
from tests.chaos.schedule import Action, Done, Family, Fault, Target, drawn

DELAY = 0.3
ALARMS = {
    Action.MEMORY: (("set_vm_memory_high_watermark", "absolute", "1"), ("set_vm_memory_high_watermark", "0.4")),
    Action.DISK: (("set_disk_free_limit", "1000000000000000"), ("set_disk_free_limit", "50000000")),
}
Note = Callable[[Fault, str], None]


class Attacker:
    """`done` holds the faults that took place; one that found no target is not among them."""

    def __init__(self, pool: PoolUnderAttack, callers: Callers, *, note: Note) -> None:
        self._pool = pool
        self._callers = callers
        self._note = note
        self._broker_turn = asyncio.Lock()
        """Of the broker's own faults only one at a time: a node that is down cannot be stopped."""
        self._daemon_turns: dict[DaemonProcess, asyncio.Lock] = {daemon: asyncio.Lock() for daemon in pool.daemons}
        self.done: list[Done] = []

    async def run(self, faults: Sequence[Fault]) -> None:
        """All of them at their times; returns when the last one is over."""
        loop = asyncio.get_running_loop()
        beginning = loop.time()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, beginning + fault.at - loop.time()))
                group.create_task(self._inflict(fault))

    async def _inflict(self, fault: Fault) -> None:
        if fault.family is Family.CUT:
            await self._on_link(fault)
        elif fault.family is Family.CLOCK:
            await self._on_clock(fault)
        elif fault.family is Family.HOSTILE:
            async with self._happening(fault, f"{fault.target} exchange"):
                await flood(self._pool, fault)
        elif fault.family is Family.POLICY:
            async with self._happening(fault, "all queues"), different_policies(self._pool.broker, fault.action):
                await asyncio.sleep(fault.seconds)
        elif fault.family is Family.PERMISSION:
            async with self._happening(fault, fault.target), forbidden(self._pool.broker, fault.target):
                await asyncio.sleep(fault.seconds)
        elif fault.family is Family.IMPORT:
            await self._on_queue(fault)
        elif fault.target is Target.NODE:
            async with self._broker_turn, self._happening(fault, "rabbitmq"):
                await self._on_broker(fault)
        elif fault.target in {Target.LEADER, Target.STANDBY}:
            await self._on_daemon(fault)
        elif fault.target is Target.WORKER:
            await self._on_worker(fault)
        else:
            key = drawn(fault, KEYS)
            async with self._happening(fault, f"{key[:20]!r}"):
                await self._callers.poison(key)

    @asynccontextmanager
    async def _happening(self, fault: Fault, victim: str) -> AsyncIterator[None]:
        self._note(fault, victim)
        began = time.time()
        try:
            yield
        finally:
            self.done.append(Done(fault, began, time.time()))

    # --- the broker

    async def _on_broker(self, fault: Fault) -> None:
        broker = self._pool.broker
        begin, end = {
            Action.STOP: (broker.freeze, broker.thaw),
            Action.KILL: (broker.kill, broker.start),
            Action.RESTART: (broker.stop, broker.start),
            **{one: (partial(broker.control, *on), partial(broker.control, *off)) for one, (on, off) in ALARMS.items()},
        }[fault.action]
        await begin()
        await asyncio.sleep(fault.seconds)
        await end()

    async def _on_queue(self, fault: Fault) -> None:
        """Deletion removes what the queue holds: of a request queue only when all that was sent to its key is answered,
        so that no request may be lost by it."""
        if fault.target is not Target.KEY:
            queue = f"{POOL}-{fault.target}"
            async with self._happening(fault, queue):
                await import_again(self._pool.broker, queue)
            return
        key = drawn(fault, KEYS)
        async with self._callers.quiet(key) as is_quiet:
            if is_quiet and (queues := await queues_of_key(self._pool.broker, key)):
                async with self._happening(fault, f"{key[:20]!r}"):
                    await import_again(self._pool.broker, drawn(fault, queues))

    # --- controllers

    async def _on_daemon(self, fault: Fault) -> None:
        daemon = await self._find_daemon(fault)
        async with self._daemon_turns[daemon], self._happening(fault, daemon.directory.name):
            if fault.action is Action.KILL:
                self._pool.killed.add(daemon)
                daemon.kill()
                await asyncio.sleep(fault.seconds)
                daemon.launch()
                self._pool.killed.discard(daemon)
            else:
                daemon.send_signal(signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                daemon.send_signal(signal.SIGCONT)

    async def _find_daemon(self, fault: Fault) -> DaemonProcess:
        """The leader or the standby; any of them while there is no leader."""
        leaders = await self._pool.leaders()
        wanted = [daemon for daemon in self._pool.daemons if (daemon in leaders) == (fault.target is Target.LEADER)]
        return drawn(fault, wanted or self._pool.daemons)

    # --- workers

    async def _on_worker(self, fault: Fault) -> None:
        with suppress(AssertionError, psutil.NoSuchProcess):  # there is none
            key, pid = drawn(fault, sorted(await until(self._pool.workers, "a worker runs", timeout=60.0)))
            process = psutil.Process(pid)
            async with self._happening(fault, f"{key[:20]!r} {pid}"):
                if fault.action is Action.KILL:
                    process.kill()
                    return
                process.suspend()
                await asyncio.sleep(fault.seconds)
                process.resume()  # psutil compares the moment of creation: never another process with the same number

    # --- links and clocks

    async def _on_link(self, fault: Fault) -> None:
        links = await self._names_of(fault, everybody=list(self._pool.proxies))
        proxies = [self._pool.proxies[link] for link in links]
        async with self._happening(fault, " ".join(links)), _disturbed(fault.action, proxies):
            await asyncio.sleep(fault.seconds)

    async def _on_clock(self, fault: Fault) -> None:
        names = await self._names_of(fault, everybody=list(self._pool.clocks))
        async with self._happening(fault, f"{' '.join(names)} {fault.jump:+g} s"):
            for name in names:
                self._pool.clocks[name].shift(fault.jump)
            await asyncio.sleep(fault.seconds)
            for name in names:
                self._pool.clocks[name].shift(-fault.jump)

    async def _names_of(self, fault: Fault, *, everybody: Sequence[str]) -> Sequence[str]:
        if fault.target in {Target.LEADER, Target.STANDBY}:
            return [(await self._find_daemon(fault)).directory.name]
        return everybody if fault.target is Target.EVERYBODY else [str(fault.target)]


@asynccontextmanager
async def _disturbed(action: Action, proxies: Sequence[Proxy]) -> AsyncIterator[None]:
    for proxy in proxies:
        if action in {Action.STALL, Action.SWALLOW}:
            proxy.hold()
        elif action is Action.DELAY:
            proxy.delay = DELAY
        else:
            proxy.refusing = action is Action.REFUSE
            proxy.cut()
    yield
    for proxy in proxies:
        if action is Action.SWALLOW:
            proxy.cut()
        proxy.delay = 0.0
        proxy.refusing = False
        proxy.resume()
