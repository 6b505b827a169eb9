"""A probe without osrdyne: does RabbitMQ keep what it has confirmed in a quorum queue that was declared a moment ago?

    python -m tests.chaos.fresh_queues [--image rabbitmq:4-management] [--delay 0.5] [--careful]

It declares queues, publishes with confirms, kills the node after `--delay` seconds, starts it again and counts. On 4.3
the queue that was declared last comes back empty within about a second: the node has not written down yet where its
log is. What is lost then no controller can bring back. `--careful` declares one more queue before the kill, which has
the others written down (decision 0020). Exit code 1 when something is missing.
"""

import argparse
import asyncio
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from osrdyne import amqp
from osrdyne.errors import BrokerError
from tests.chaos.nodes import Node, running_node
from tests.connections import connected

QUEUES, MESSAGES = 5, 3
ARGUMENTS = {"x-queue-type": "quorum"}


async def missing_after_kill(node: Node, *, delay: float, careful: bool) -> dict[str, int]:
    """How many confirmed messages are gone, by queue."""
    names = [f"fresh-{number}" for number in range(QUEUES)]
    async with connected(node.amqp_uri) as connection:
        channel = await connection.channel(confirms=True)
        for name in names:
            await channel.declare_queue(name, arguments=ARGUMENTS)
            for _ in range(MESSAGES):
                await channel.publish(amqp.Message(), exchange="", routing_key=name)
        if careful:
            await channel.declare_queue("precaution", arguments=ARGUMENTS)
        await asyncio.sleep(delay)
        await node.kill()
    await node.start()
    return {name: MESSAGES - await _count(node, name) for name in names}


async def _count(node: Node, name: str) -> int:
    count = 0
    async with connected(node.amqp_uri) as connection:
        channel = await connection.channel()
        with suppress(BrokerError):  # on 3.10 a queue without its log has no leader, and does not answer
            while await channel.get(name) is not None:
                count += 1
    return count


async def _probe(image: str | None, delay: float, careful: bool) -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="osrdyne-probe-") as directory:
        async with running_node(Path(directory), image=image) as node:
            return await missing_after_kill(node, delay=delay, careful=careful)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill RabbitMQ shortly after queues were declared.")
    parser.add_argument("--image", help="a container image of RabbitMQ instead of the one installed here")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds between the last confirm and the end")
    parser.add_argument("--careful", action="store_true", help="declare one more queue before the kill")
    arguments = parser.parse_args()
    missing = asyncio.run(_probe(arguments.image, arguments.delay, arguments.careful))
    print(f"confirmed and missing: {missing}")
    return 1 if any(missing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
