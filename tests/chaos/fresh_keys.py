"""A probe of a leader: is all that RabbitMQ has confirmed still there when the node is killed while keys are new?

    python -m tests.chaos.fresh_keys [--image rabbitmq:4-management] [--rounds 5] [--keys 30]

Each round publishes requests for new keys, all at once, into a pool of its own, kills the node just after a random one
of the keys is active, starts it again and counts. So the kill comes at another place each time in the order in which
queues are declared, written down and bound. `fresh_queues` shows what is lost without care. Exit code 1 when something
is missing.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from osrdyne import amqp
from osrdyne.errors import BrokerError, OsrdyneError
from osrdyne.logs import configure_logging
from osrdyne.protocol.names import Key, PoolNames
from tests.benchmarks.leading import leader
from tests.chaos.nodes import Node, running_node
from tests.connections import connected

REQUESTS = 3
"""For each key, one after the other: the first becomes an orphan, the others come straight to the queue."""
DELAY = 0.3
"""Until the node is killed, at most; RabbitMQ takes longer to write by itself."""
ANSWER = 5.0
"""Seconds for a queue to deliver the messages that it counts."""
PATIENCE = 20.0
"""Seconds: queues have no leader at first when the node has started, and report that they are empty."""


async def missing_after_kill(node: Node, names: PoolNames, keys: list[Key]) -> set[str]:
    """The confirmed requests that are gone."""
    confirmed: set[str] = set()
    active = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_load(node, names, keys, confirmed, active))
        await active.wait()
        await node.kill()
    await node.start()
    found: set[str] = set()
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while not confirmed <= found:
                for queue in [names.orphan_queue, *map(names.request_queue, keys)]:
                    found |= await _bodies(node, queue)
    print(f"{names.pool}: confirmed {len(confirmed)}, found {len(found)}, missing {sorted(confirmed - found)}")
    return confirmed - found


async def _load(node: Node, names: PoolNames, keys: list[Key], confirmed: set[str], active: asyncio.Event) -> None:
    """Lead the pool and publish, until the node is killed."""
    try:
        async with leader(node, names.pool) as activations:
            done = {key: activations.expect(key) for key in keys}
            async with connected(node.amqp_uri) as connection:
                async with asyncio.TaskGroup() as group:
                    for key in keys:
                        group.create_task(_publish(connection, names, key, confirmed, done[key]))
                    await asyncio.wait({done[random.choice(keys)]})
                    await asyncio.sleep(random.uniform(0, DELAY))
                    active.set()
                await connection.wait_closed()
    except* OsrdyneError:
        pass  # the term ends with the node


async def _publish(
    connection: amqp.Connection, names: PoolNames, key: Key, confirmed: set[str], active: asyncio.Future[float]
) -> None:
    with suppress(BrokerError):
        channel = await connection.channel(confirms=True)
        for number in range(REQUESTS):
            body = f"{key} {number}"
            await channel.publish(amqp.Message(body=body.encode()), exchange=names.requests_exchange, routing_key=key)
            confirmed.add(body)
            await asyncio.wait({active})


async def _bodies(node: Node, queue: str) -> set[str]:
    """What is in the queue, and stays there. One that does not exist, or does not answer, has nothing."""
    bodies: set[str] = set()
    async with connected(node.amqp_uri) as connection:
        channel = await connection.channel()
        with suppress(BrokerError, TimeoutError):
            ready = (await channel.declare_queue(queue, passive=True)).ready
            consumer = await channel.consume(queue)
            async with asyncio.timeout(ANSWER):
                bodies = {(await consumer.get()).body.decode() for _ in range(ready)}
    return bodies


async def _probe(image: str | None, rounds: int, keys: int) -> int:
    missing = 0
    with tempfile.TemporaryDirectory(prefix="osrdyne-probe-") as directory:
        async with running_node(Path(directory), image=image) as node:
            for number in range(rounds):
                new = [Key(f"new={one}") for one in range(keys)]
                missing += len(await missing_after_kill(node, PoolNames(f"probe{number}"), new))
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill RabbitMQ while a leader makes keys active.")
    parser.add_argument("--image", help="a container image of RabbitMQ instead of the one installed here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=30)
    arguments = parser.parse_args()
    configure_logging(level="critical")
    missing = asyncio.run(_probe(arguments.image, arguments.rounds, arguments.keys))
    print(f"confirmed and missing: {missing}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
