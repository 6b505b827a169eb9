"""How late requests that expire behind others are answered: `python -m tests.benchmarks.cleanup --requests 200`.

Each queue holds a request that lives long and, behind it, requests that expire one after the other. Prints the seconds
from each deadline (`expiration` and `max_clock_skew`) to the answer. The same script runs on earlier commits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from pydantic import SecretStr

from osrdyne import amqp
from osrdyne.config.models import BrokerSettings, DriverSettings, PoolSettings, RequestSettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.logs import configure_logging
from osrdyne.protocol.names import PoolNames
from tests.integration.daemon_in_process import echo_settings, running_daemon

POOL, REPLIES = "bench_cleanup", "bench-cleanup-replies"
SKEW = 0.5
FIRST_LIFETIME = 12.0
SPREAD = 10.0
"""Seconds over which the deadlines are spread."""
PATIENCE = 120.0


async def measure(requests: int, queues: int, interval: float) -> dict[str, object]:
    async with EmbeddedBroker() as broker:
        uris = BrokerSettings(uri=SecretStr(broker.amqp_uri), management_uri=SecretStr(broker.management_uri))
        with tempfile.TemporaryDirectory() as directory:
            settings = echo_settings(uris, POOL, Path(directory)).model_copy(
                update={
                    "pool": PoolSettings(id=POOL, kind="managed"),
                    "driver": DriverSettings(name="noop"),
                    "requests": RequestSettings(
                        check_entire_queue_on_cleanup=True, cleanup_interval=interval, max_clock_skew=SKEW
                    ),
                }
            )
            async with running_daemon(settings):
                late = await _publish_and_wait(broker.amqp_uri, requests, queues)
    return {
        "requests": requests,
        "queues": queues,
        "cleanup_interval": interval,
        "answered": len(late),
        "median_seconds": round(statistics.median(late), 2),
        "max_seconds": round(max(late), 2),
        "later_than_interval": sum(one > interval for one in late),
    }


async def _publish_and_wait(uri: str, requests: int, queues: int) -> list[float]:
    connection = await amqp.connect(amqp.ConnectionOptions(uri=uri, rpc_timeout=PATIENCE))
    publishing, receiving = await connection.channel(confirms=True), await connection.channel()
    await receiving.declare_queue(REPLIES, exclusive=True)
    replies = await receiving.consume(REPLIES, no_ack=True)
    exchange, deadlines = PoolNames(POOL).requests_exchange, {}
    for queue in range(queues):
        head = amqp.Message(body=b"head", expiration="600000")
        await publishing.publish(head, exchange=exchange, routing_key=f"key={queue}")
    for number in range(requests):
        lifetime = FIRST_LIFETIME + SPREAD * (number * 7919 % requests) / requests
        name = str(number)
        deadlines[name] = time.time() + lifetime + SKEW
        message = amqp.Message(body=b"x", correlation_id=name, reply_to=REPLIES, expiration=str(int(lifetime * 1000)))
        await publishing.publish(message, exchange=exchange, routing_key=f"key={number % queues}")
    late = []
    async with asyncio.timeout(PATIENCE):
        while deadlines:
            reply = await replies.get()
            late.append(time.time() - deadlines.pop(reply.properties.correlation_id or ""))
    await connection.close()
    return late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--queues", type=int, default=20)
    parser.add_argument("--interval", type=float, default=2.0, help="requests.cleanup_interval in seconds")
    options = parser.parse_args()
    configure_logging(level="error")
    print(json.dumps(asyncio.run(measure(options.requests, options.queues, options.interval))))


if __name__ == "__main__":
    main()
