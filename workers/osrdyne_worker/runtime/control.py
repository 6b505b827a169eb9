"""Control messages from the controller: a pure state, and the listener that feeds it.

Level-triggered: the controller repeats the state it wants, and an older generation is ignored. Losing control messages
delays things and breaks nothing, so that the listener never disturbs the requests: it retries by itself.
Source: docs/reference/protocol/reports.md, "Control messages".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from osrdyne.aio.backoff import Backoff
from osrdyne.aio.clock import Clock
from osrdyne.amqp import Connection
from osrdyne.errors import BrokerError, BrokerNotFoundError
from osrdyne.logs import get_logger
from osrdyne.protocol.control import Command, ControlMessage, Generation, control_from_wire, is_plausible_term
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import PoolNames, QueueName

NO_GENERATION = Generation(0, 0)
"""Older than every generation of a leader."""

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class WantedState:
    """What the controller wants of this worker."""

    queues: tuple[QueueName, ...]
    paused: bool = False
    generation: Generation = NO_GENERATION


def is_believed(message: ControlMessage, *, now: float) -> bool:
    """Whether a leader may have sent it at `now` (seconds since the epoch): its term is not far ahead of the clock."""
    return is_plausible_term(message.generation.term, now=now)


def without_false_generation(state: WantedState, *, now: float) -> WantedState:
    """The state without a generation that no leader can have: a clock was wrong when it was believed."""
    return state if is_plausible_term(state.generation.term, now=now) else replace(state, generation=NO_GENERATION)


def apply_control(state: WantedState, message: ControlMessage) -> WantedState:
    """The state after `pause`, `resume` or `queues`; an older message changes nothing, nor does a malformed one."""
    if message.generation < state.generation:
        return state
    match message.command:
        case Command.PAUSE:
            return replace(state, paused=True, generation=message.generation)
        case Command.RESUME:
            return replace(state, paused=False, generation=message.generation)
        case Command.QUEUES:
            queues = parse_queues(message.details.get("queues"))
            return replace(state, queues=queues, generation=message.generation) if queues else state
        case _:
            return state


def parse_queues(value: object) -> tuple[QueueName, ...]:
    """The queue names of a `queues` message, highest priority first; empty when it holds none or anything else."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        return ()
    return tuple(QueueName(name) for name in dict.fromkeys(value))


def parse_seconds(value: object) -> float:
    """The seconds of a message; 0 where it says none, or anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 < value < math.inf else 0.0


class ControlTrouble:
    """Warns that control messages cannot be received: once while it lasts, and once in the life of a worker for a
    control exchange that does not exist, as under the reference's daemon, which has none."""

    def __init__(self) -> None:
        self._told_missing = False

    def note(self, error: BrokerError, *, exchange: str, first: bool) -> None:
        """An attempt has failed; `first`: since control messages were last received, or the connection was opened."""
        missing = isinstance(error, BrokerNotFoundError)  # of the exchange: the queue was declared just before
        if missing and not self._told_missing:
            self._told_missing = True
            log.warning("there is no control exchange, control messages are not received", exchange=exchange)
        elif first and not missing:
            log.warning("control messages cannot be received yet", reason=str(error))


async def listen(
    connection: Connection,
    environment: WorkerEnvironment,
    handle: Callable[[ControlMessage], None],
    *,
    on_listening: Callable[[], None],
    on_forged: Callable[[], None],
    trouble: ControlTrouble,
    clock: Clock,
) -> None:
    """Call `handle` with every control message, for as long as the connection lives; `on_listening` before them.

    `on_forged` is called for a message that did not come through the control exchange, where only the controller may
    publish: every reply is published to the default exchange, which reaches the control queue by its name.

    The control queue is exclusive: after a connection that broke silently, the broker refuses it until it has noticed,
    which is why this tries again.
    """
    failures = 0
    while not connection.is_closed:
        try:
            await _listen_once(connection, environment, handle, on_listening, on_forged)
        except BrokerError as error:
            failures += 1
            if not connection.is_closed:
                trouble.note(error, exchange=environment.control_exchange, first=failures == 1)
            await clock.sleep(Backoff(initial=1.0).delay(failures))


async def _listen_once(
    connection: Connection,
    environment: WorkerEnvironment,
    handle: Callable[[ControlMessage], None],
    on_listening: Callable[[], None],
    on_forged: Callable[[], None],
) -> None:
    names = PoolNames(environment.pool)
    queue = names.control_queue(environment.worker_id)
    channel = await connection.channel()
    await channel.declare_queue(queue, exclusive=True, auto_delete=True)
    for routing_key in (
        names.control_group_routing_key(environment.key),
        names.control_worker_routing_key(environment.worker_id),
    ):
        await channel.bind_queue(queue, environment.control_exchange, routing_key)
    consumer = await channel.consume(queue, no_ack=True)
    on_listening()
    async for delivery in consumer:
        if delivery.exchange != environment.control_exchange:
            on_forged()
            continue
        message = control_from_wire(delivery.body)
        if message is None:
            log.warning("a control message cannot be understood", size=len(delivery.body))
        else:
            handle(message)
