"""The RabbitMQ under attack: an embedded node, or a container of another version. Both have the same commands."""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from docker.models.containers import Container
from pydantic import SecretStr
from testcontainers.core.container import DockerContainer

from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError
from tests.acceptance.daemon_process import free_port, until
from tests.connections import connected
from tests.integration.rabbitmqctl import rabbitmqctl

LOOPBACK = "127.0.0.1"
START_TIMEOUT = 300.0
STOP_SECONDS = 20


class Node(Protocol):
    """Address and data survive `stop` and `kill`; `start` returns once it serves."""

    @property
    def amqp_uri(self) -> str: ...
    @property
    def management_uri(self) -> str: ...
    @property
    def amqp_port(self) -> int: ...
    @property
    def management_port(self) -> int: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def kill(self) -> None: ...
    async def freeze(self) -> None: ...
    async def thaw(self) -> None: ...
    async def control(self, *arguments: str) -> None:
        """Run `rabbitmqctl`."""


class EmbeddedNode(EmbeddedBroker):
    """The RabbitMQ that is installed here."""

    async def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    async def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """To the node and everything it has started: they are one process group."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    async def control(self, *arguments: str) -> None:
        await rabbitmqctl(self, *arguments)


class ContainerNode:
    """A container of `image`, from testcontainers; `close` removes it, with its data.

    Needs `TESTCONTAINERS_RYUK_DISABLED=true` where Ryuk's image cannot be had.
    """

    def __init__(self, image: str) -> None:
        self._password = secrets.token_hex(16)
        self.amqp_port = free_port()
        self.management_port = free_port()
        access = {"RABBITMQ_DEFAULT_USER": "osrdyne", "RABBITMQ_DEFAULT_PASS": self._password}
        # The name of the host is a part of the name of the node, and so of its data.
        self._container = DockerContainer(image).with_envs(**access).with_kwargs(hostname="rabbitmq")
        # Not `with_bind_ports`, which would listen on every address.
        ports: Any = {"5672/tcp": (LOOPBACK, self.amqp_port), "15672/tcp": (LOOPBACK, self.management_port)}
        self._container.ports = ports
        self._node: Container | None = None

    @property
    def amqp_uri(self) -> str:
        """Holds the password: never log it."""
        return f"amqp://osrdyne:{self._password}@{LOOPBACK}:{self.amqp_port}/"

    @property
    def management_uri(self) -> str:
        """Holds the password: never log it."""
        return f"http://osrdyne:{self._password}@{LOOPBACK}:{self.management_port}"

    async def close(self) -> None:
        """Remove it, running or not."""
        await asyncio.to_thread(self._container.stop)

    async def start(self) -> None:
        if self._node is None:
            await asyncio.to_thread(self._container.start)
            self._node = self._container.get_wrapped_container()
        else:
            await asyncio.to_thread(self._node.start)
        await until(self._serves, "RabbitMQ serves", timeout=START_TIMEOUT, interval=0.2)

    async def stop(self) -> None:
        await asyncio.to_thread(self._started.stop, timeout=STOP_SECONDS)

    async def kill(self) -> None:
        await asyncio.to_thread(self._started.kill)

    async def freeze(self) -> None:
        await asyncio.to_thread(self._started.pause)

    async def thaw(self) -> None:
        await asyncio.to_thread(self._started.unpause)

    async def control(self, *arguments: str) -> None:
        code, output = await asyncio.to_thread(self._container.exec, ["rabbitmqctl", *arguments])
        assert code == 0, f"rabbitmqctl {arguments[0]}: {output.decode(errors='replace')}"

    @property
    def _started(self) -> Container:
        assert self._node is not None, "start() first"
        return self._node

    async def _serves(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(LOOPBACK, self.management_port)
            writer.close()
            async with connected(self.amqp_uri, connect_timeout=5.0):
                return True
        except (BrokerError, OSError):
            return False


def managing(node: Node) -> ManagementClient:
    settings = BrokerSettings(uri=SecretStr(node.amqp_uri), management_uri=SecretStr(node.management_uri))
    return ManagementClient(settings)


@asynccontextmanager
async def running_node(directory: Path, *, image: str | None) -> AsyncIterator[Node]:
    """A container of `image`, or without one the RabbitMQ that is installed, with its data in `directory`."""
    if image is None:
        async with EmbeddedNode(directory / "rabbitmq") as embedded:
            yield embedded
        return
    container = ContainerNode(image)
    try:
        await container.start()
        yield container
    finally:
        await container.close()
