"""The steps that histories are made of: what clients, workers, daemons, the broker, the driver and time may do.

A history is a list of these, drawn and shrunk by hypothesis, which prefers the earlier ones of `STEPS`. A step only
begins something; what follows from it happens while turns or time pass.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from history_process import Passage
from history_worker import Kind, Manner
from history_world import KEYS, NAMES, HistoryWorld

from osrdyne.errors import (
    BrokerError,
    BrokerSilentError,
    DriverError,
    DriverUnavailableError,
    PublishRefusedError,
    QueueFullError,
    StartFailedError,
)
from osrdyne.protocol.names import Key
from osrdyne.protocol.statuses import Status

Act = Callable[[HistoryWorld], Awaitable[object] | object]
"""It may return something to wait for."""


@dataclass(frozen=True, slots=True)
class Step:
    """`name` is how a history is written down."""

    name: str
    act: Act = field(compare=False)

    def __repr__(self) -> str:
        return repr(self.name)

    async def take(self, world: HistoryWorld) -> None:
        result = self.act(world)
        if isinstance(result, Awaitable):
            await result


def setting(attribute: str, value: object) -> Act:
    return lambda world: setattr(world, attribute, value)


def of_time() -> Iterator[Step]:
    """Mostly short ones: faults show when operations overlap."""
    for seconds in (1, 0.3, 5, 12, 25, 45):
        yield Step(f"{seconds} s pass", partial(pass_time, seconds=seconds))
    for turns in (2, 7, 25):
        yield Step(f"{turns} turns", partial(take_turns, turns=turns))


async def pass_time(world: HistoryWorld, *, seconds: float) -> None:
    await world.clock.advance(seconds)


async def take_turns(_: HistoryWorld, *, turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def of_clients() -> Iterator[Step]:
    for kind in Kind:
        for key in KEYS:
            yield Step(f"send {kind} {key}", partial(HistoryWorld.send, kind=kind, key=key))
    yield Step("cancel", HistoryWorld.cancel)
    yield Step("orphans expire", partial(HistoryWorld.expire, queue=NAMES.orphan_queue))


def of_key(key: Key) -> Iterator[Step]:
    """The events of one group."""
    queue = NAMES.request_queue(key)
    yield Step(f"worker {key} dies", partial(HistoryWorld.crash, key=key))
    yield Step(f"requests {key} expire", partial(HistoryWorld.expire, queue=queue))
    yield Step(f"retire {key}", lambda world: world.with_leader(lambda leader: leader.retire(key)))
    yield Step(f"pin {key}", partial(HistoryWorld.pin, key=key))
    yield Step(f"unpin {key}", partial(HistoryWorld.unpin, key=key))
    yield Step(f"queue {key} loses its leader", partial(set_running, queue=queue, running=False))
    yield Step(f"queue {key} has a leader", partial(set_running, queue=queue, running=True))


def set_running(world: HistoryWorld, *, queue: str, running: bool) -> None:
    if queue in world.broker.queues:
        world.broker.set_running(queue, running)


def of_workers() -> Iterator[Step]:
    for manner in Manner:
        yield Step(f"next worker is {manner}", partial(be_next, manner=manner))
    yield Step("deaths go unnoticed", setting("deaths_are_noticed", False))
    yield Step("deaths are noticed", HistoryWorld.notice_deaths)
    yield Step("reports are lost", HistoryWorld.lose_reports)
    yield Step("reports arrive", setting("reports_arrive", True))


def be_next(world: HistoryWorld, *, manner: Manner) -> None:
    world.manners.append(manner)


def of_driver() -> Iterator[Step]:
    yield Step("start fails for good", lambda world: world.driver.fail_next_start(StartFailedError("No such image.")))
    yield Step("start fails for now", lambda world: world.driver.fail_next_start(DriverError("The engine is busy.")))
    yield Step("starts hang", lambda world: world.driver.hang_starts())
    yield Step("starts go on", lambda world: world.driver.release_starts())
    yield Step("lists hang", lambda world: world.driver.hang_lists())
    yield Step("lists go on", lambda world: world.driver.release_lists())
    yield Step("list fails", lambda world: world.driver.fail_next_list(DriverUnavailableError("No answer.")))
    yield Step("stop fails", lambda world: world.driver.fail_next_stop(DriverError("No answer.")))


def of_daemons() -> Iterator[Step]:
    yield Step("kill the daemon", HistoryWorld.kill)
    yield Step("the daemon gets other settings", change_settings)
    for commands in (1, 3, 8, 20):
        yield Step(f"kill at command {commands}", setting("kill_in", commands))
    yield Step("cut the daemon off", HistoryWorld.cut)
    yield Step("token is lost", partial(HistoryWorld.cut, connection=0))
    yield Step("publisher is lost", partial(HistoryWorld.cut, connection=1))
    yield Step("one more daemon", HistoryWorld.appoint)
    yield Step("commands stand still", lambda world: world.moving.clear())
    yield Step("commands go on", lambda world: world.moving.set())


def change_settings(world: HistoryWorld) -> None:
    """It is restarted with settings that shape workers in another way."""
    world.kill()
    world.driver.current_spec_hash += "*"


def of_processes() -> Iterator[Step]:
    """The events of processes of pooled workers."""
    yield Step("a process dies", HistoryWorld.end_process)
    yield Step("a process hangs", HistoryWorld.hang_process)
    for passage in Passage:
        yield Step(f"questions are {passage}", partial(HistoryWorld.disturb, passage=passage, of_states=False))
        yield Step(f"states are {passage}", partial(HistoryWorld.disturb, passage=passage, of_states=True))


def of_broker() -> Iterator[Step]:
    yield Step("broker restarts", HistoryWorld.restart_broker)
    yield Step("forward is dropped, not confirmed", partial(refuse, error=BrokerSilentError))
    yield Step("forward arrives, not confirmed", partial(refuse, error=BrokerSilentError, arrives=True))
    yield Step("forward refused", partial(refuse, error=PublishRefusedError))
    yield Step("forward too much", partial(refuse, error=QueueFullError))
    yield Step("API away", setting("api_answers", False))
    yield Step("API back", setting("api_answers", True))
    yield Step("totals get old", lambda world: setattr(world.broker, "totals_age", 9.8))
    for seconds in (0.0, 0.5, 5.0):
        yield Step(f"transit takes {seconds} s", partial(slow_down, transit=seconds))


def slow_down(world: HistoryWorld, *, transit: float) -> None:
    world.broker.transit = transit


def refuse(world: HistoryWorld, *, error: type[BrokerError], arrives: bool = False) -> None:
    """An error of its own each time: one that is raised again and again would keep all worlds that it went through."""
    if error is QueueFullError:
        world.forgiven.add(Status.MAXLEN)
    world.refusals.append((arrives, error("RabbitMQ did not take the forward.")))


STEPS: tuple[Step, ...] = (
    *[step for step in of_time() for _ in range(5)],
    *[step for step in of_clients() for _ in range(2)],
    *[step for key in KEYS[:2] for step in of_key(key)],
    *of_workers(),
    *of_driver(),
    *[step for step in of_daemons() for _ in range(2)],
    *of_broker(),
)
STEPS_OF_POOLED: tuple[Step, ...] = (*STEPS, *[step for step in of_processes() for _ in range(3)])
BY_NAME = {step.name: step for step in STEPS_OF_POOLED}
