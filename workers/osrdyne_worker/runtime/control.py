"""Control messages from the controller: the desired state, and the listener that receives them.

Level-triggered: the controller repeats the desired state, and messages of an older generation are ignored. A lost
control message delays a change and has no other effect. The listener retries by itself and never affects requests.
Source: docs/reference/protocol/reports.md, "Control messages".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from osrdyne.aio.clock import Backoff, Clock
from osrdyne.amqp import Channel, Connection
from osrdyne.errors import BrokerAccessError, BrokerError, BrokerNotFoundError
from osrdyne.logs import get_logger
from osrdyne.protocol.control import Command, ControlMessage, Generation, control_from_wire, is_plausible_term
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import PoolNames, QueueName, WorkerId

NO_GENERATION = Generation(0, 0)
"""Older than every generation of a leader."""
FORGED_INTERVAL = 5.0
"""Seconds between two log events about forged control messages: a client may send any number of them."""

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The state that the controller requests of this worker."""

    queues: tuple[QueueName, ...]
    paused: bool = False
    generation: Generation = NO_GENERATION


def is_plausible(message: ControlMessage, *, now: float) -> bool:
    """Whether a leader can have sent it at `now` (seconds since the epoch): its term is not far ahead of the clock."""
    return is_plausible_term(message.generation.term, now=now)


def without_implausible_generation(state: DesiredState, *, now: float) -> DesiredState:
    """The state without a generation that no leader can have: it was accepted while this machine's clock was wrong."""
    return state if is_plausible_term(state.generation.term, now=now) else replace(state, generation=NO_GENERATION)


def apply_control(state: DesiredState, message: ControlMessage) -> DesiredState:
    """The state after `pause`, `resume` or `queues`; an older or malformed message changes nothing."""
    # Equal is accepted: the leader repeats its state with the same generation (lifecycle: generations).
    if message.generation < state.generation:
        return state
    match message.command:
        case Command.PAUSE:
            return replace(state, paused=True, generation=message.generation)
        case Command.RESUME:
            return replace(state, paused=False, generation=message.generation)
        case Command.QUEUES:
            queues = parse_queues(message.details.get("queues"))
            # An empty list counts as malformed: the worker would take no requests, and report no pause.
            return replace(state, queues=queues, generation=message.generation) if queues else state
        case _:
            return state


def parse_queues(value: object) -> tuple[QueueName, ...]:
    """The queue names of a `queues` message, highest priority first; empty if the value is invalid."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        return ()
    return tuple(QueueName(name) for name in dict.fromkeys(value))


def parse_seconds(value: object) -> float:
    """A number of seconds; 0 if the value is invalid."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 < value < math.inf else 0.0


class CreditListener(Protocol):
    """Receives the credit messages of clients: the streams of a worker (`requests.streams`)."""

    def listening(self, available: bool | None) -> None:
        """Whether credit messages can be received; None: not known yet."""
        ...

    def granted(self, headers: Mapping[str, object]) -> None:
        """Handle the headers of one credit message."""
        ...


class ControlWarnings:
    """Logs that control messages cannot be received, once for each outage. A missing control exchange is logged once in
    the life of a worker: the reference's daemon has none."""

    def __init__(self) -> None:
        self._missing_logged = False

    def note(self, error: BrokerError, *, exchange: str, first: bool) -> None:
        """Log a failed attempt; `first`: the first one since messages were received or the connection was opened."""
        missing = isinstance(error, BrokerNotFoundError)  # the exchange: the queue was declared just before
        if missing and not self._missing_logged:
            self._missing_logged = True
            log.warning("control exchange missing", exchange=exchange)
        elif first and not missing:
            log.warning("control queue unavailable", reason=str(error))


async def listen(
    connection: Connection,
    environment: WorkerEnvironment,
    handle: Callable[[ControlMessage], None],
    *,
    routing_keys: tuple[str, ...],
    on_listening: Callable[[], None],
    on_forged: Callable[[], None],
    warnings: ControlWarnings,
    clock: Clock,
    credit: CreditListener | None = None,
) -> None:
    """Call `handle` with every control message for `routing_keys` while the connection is open, and `on_listening`
    before the first.

    `on_forged` is called for a message that did not come through the control exchange, where only the controller may
    publish. Clients can reach the queue by its name: their replies go to the default exchange.

    `credit` receives the credit messages of clients; None for a process that answers no requests.

    The control queue is exclusive. After a connection that broke silently, RabbitMQ refuses the queue until it has
    noticed the loss: hence the retries.
    """
    failures = 0

    def begin() -> None:
        nonlocal failures
        failures = 0  # the next failure is the first one of another outage
        on_listening()

    while not connection.is_closed:
        try:
            channel = await connection.channel()
            try:
                await _listen_once(channel, connection, environment, routing_keys, handle, begin, on_forged, credit)
            except BrokerError:
                # RabbitMQ keeps the channel of a consumer that it has cancelled. Not closed after a cancellation of
                # this task: the connection is closed next, and must not wait for an answer.
                await channel.close()
                raise
        except BrokerError as error:
            failures += 1
            if credit is not None:
                # Streams get no credit now. Without a control exchange they never get any.
                credit.listening(False if isinstance(error, BrokerNotFoundError) else None)
            if not connection.is_closed:
                warnings.note(error, exchange=environment.control_exchange, first=failures == 1)
            await clock.sleep(Backoff(initial=1.0).delay(failures))


async def _listen_once(
    channel: Channel,
    connection: Connection,
    environment: WorkerEnvironment,
    routing_keys: tuple[str, ...],
    handle: Callable[[ControlMessage], None],
    on_listening: Callable[[], None],
    on_forged: Callable[[], None],
    credit: CreditListener | None,
) -> None:
    if credit is not None:
        credit.listening(None)
    names = PoolNames(environment.pool)
    queue = names.control_queue(environment.worker_id)
    # Exclusive: RabbitMQ deletes it with the connection, so that no control message waits for a lost worker.
    await channel.declare_queue(queue, exclusive=True, auto_delete=True)
    for routing_key in routing_keys:
        await channel.bind_queue(queue, environment.control_exchange, routing_key)
    # Without acknowledgements: a lost control message is repeated, and a late one is of no use.
    consumer = await channel.consume(queue, no_ack=True)
    on_listening()
    if credit is not None:
        credit.listening(await _binds_credit(connection, queue, names, environment.worker_id))
    async for delivery in consumer:
        if credit is not None and delivery.exchange == names.credit_exchange:
            credit.granted(delivery.headers)
            continue
        if delivery.exchange != environment.control_exchange:
            # Clients can reach this queue through the default exchange, and could otherwise drain or stop a worker.
            on_forged()
            continue
        message = control_from_wire(delivery.body)
        if message is None:
            log.warning("malformed control message", size=len(delivery.body))
        else:
            handle(message)


async def _binds_credit(connection: Connection, queue: QueueName, names: PoolNames, worker_id: WorkerId) -> bool:
    """Bind the control queue to the exchange of credit messages; False if the pool has no such exchange."""
    # On a channel of its own: RabbitMQ closes the channel if the exchange is missing or must not be read.
    channel = await connection.channel()
    try:
        await channel.bind_queue(queue, names.credit_exchange, worker_id)
    except (BrokerNotFoundError, BrokerAccessError) as error:
        log.info("answers are not streamed", reason=str(error))
        return False
    finally:
        await channel.close()
    return True
