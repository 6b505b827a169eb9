"""RabbitMQ's own command line tool, against an embedded node."""

import asyncio
import os

from osrdyne.dev.rabbitmq import node_files
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker, find_server
from osrdyne.dev.rabbitmq.node_files import NodeIdentity


async def rabbitmqctl(broker: EmbeddedBroker, *arguments: str) -> None:
    identity = NodeIdentity.load_or_create(broker.directory)
    process = await asyncio.create_subprocess_exec(
        str(find_server().parent / "rabbitmqctl"),
        *arguments,
        env=node_files.environment(broker.directory, identity, os.environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
