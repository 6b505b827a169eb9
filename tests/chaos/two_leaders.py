"""How long two daemons lead one pool after a person has deleted its leader queue, and what each does meanwhile.

    python -m tests.chaos.two_leaders [--seconds 60]

Two daemon processes of one pool, a leader and a standby, without workers; requests for new keys all the time. Then
`{pool}-leader` is deleted. Prints for how long both said that they led, their terms, and how many commands on request
queues each has sent in that time. Exit code 1 when both led, or had the same term.
"""

import argparse
import asyncio
import itertools
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from osrdyne import amqp
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import PoolNames
from tests.acceptance.daemon_process import PATIENCE, DaemonProcess
from tests.benchmarks.harness import leader_and_standby, own_directory
from tests.connections import connected

NAMES = PoolNames("two_leaders")
SETTINGS = {"broker": {"leader_heartbeat": "2s"}, "log": {"level": "warning"}}
PACE = 0.1
"""Seconds between two requests, each for a new key."""
LOOK = 0.05
MOMENT = 0.5
"""Seconds in which two leaders may be seen although there was one at a time: daemons are asked one after the other."""


@dataclass
class Watched:
    """A daemon, and its reported state."""

    process: DaemonProcess
    terms: set[int] = field(default_factory=set)
    commands: int = 0

    async def look(self, http: httpx.AsyncClient) -> bool:
        """Whether it leads."""
        text = ""
        with suppress(httpx.HTTPError):
            text = (await http.get(f"{self.process.api}/metrics")).text
        values = {name: float(value) for name, value in re.findall(r"^(\w+(?:{.*})?) (\S+)$", text, re.MULTILINE)}
        self.commands = round(sum(v for name, v in values.items() if name.startswith("osrdyne_queue_commands_total")))
        self.terms |= {round(values.get("osrdyne_term", 0))} - {0}
        return values.get("osrdyne_leading") == 1.0


async def run(seconds: float) -> int:
    async with EmbeddedBroker() as broker:
        with own_directory() as directory:
            async with leader_and_standby(broker, directory, NAMES.pool, SETTINGS) as daemons:
                return await _watch(broker, [Watched(daemon) for daemon in daemons], seconds)


async def _watch(broker: EmbeddedBroker, daemons: Sequence[Watched], seconds: float) -> int:
    async with (
        connected(broker.amqp_uri, rpc_timeout=PATIENCE) as connection,
        httpx.AsyncClient(trust_env=False, verify=False, timeout=PATIENCE) as http,
        asyncio.TaskGroup() as group,
    ):
        publishing = group.create_task(_publish(await connection.channel(confirms=True)))
        await asyncio.sleep(2.0)
        for daemon in daemons:
            await daemon.look(http)
        await (await connection.channel()).delete_queue(NAMES.leader_queue)
        deleted_at = seen = time.monotonic()
        leaderless = both = 0.0
        actions = [0, 0]
        while seen - deleted_at < seconds:
            before = [daemon.commands for daemon in daemons]
            leading = [await daemon.look(http) for daemon in daemons]
            now = time.monotonic()
            if all(leading):
                both += now - seen
                for number, daemon in enumerate(daemons):
                    actions[number] += daemon.commands - before[number]
            leaderless += 0.0 if any(leading) else now - seen
            seen = now
            await asyncio.sleep(LOOK)
        publishing.cancel()
    print(f"leader queue deleted, watched for {seconds:g} s")
    print(f"two leaders for {both:.1f} s, commands of each meanwhile: {actions[0]} and {actions[1]}")
    print(f"no leader for {leaderless:.1f} s")
    print(f"terms: {sorted(daemons[0].terms)} and {sorted(daemons[1].terms)}")
    return 1 if both > MOMENT or daemons[0].terms & daemons[1].terms else 0


async def _publish(channel: amqp.Channel) -> None:
    for number in itertools.count():
        await channel.publish(amqp.Message(), exchange=NAMES.requests_exchange, routing_key=f"key {number}")
        await asyncio.sleep(PACE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to watch (60)")
    return asyncio.run(run(parser.parse_args().seconds))


if __name__ == "__main__":
    sys.exit(main())
