"""The RabbitMQ under attack: an embedded node, or a container of another version. Both have the same commands."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from docker.models.containers import Container
from testcontainers.core.container import DockerContainer

from osrdyne import amqp
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError
from tests.acceptance.daemon_process import free_port
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
    """A container of `image`, from testcontainers; `async with` removes it, with its data, at the end.

    Needs `TESTCONTAINERS_RYUK_DISABLED=true` where Ryuk's image cannot be had.
    """

    def __init__(self, image: str) -> None:
        self._password = secrets.token_hex(16)
        self.amqp_port = free_port()
        self.management_port = free_port()
        self._container = (
            DockerContainer(image)
            .with_env("RABBITMQ_DEFAULT_USER", "osrdyne")
            .with_env("RABBITMQ_DEFAULT_PASS", self._password)
            .with_kwargs(hostname="rabbitmq")  # part of the name of the node, and so of its data
        )
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

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove it, running or not."""
        await asyncio.to_thread(self._container.stop)

    async def start(self) -> None:
        if self._node is None:
            await asyncio.to_thread(self._container.start)
            self._node = self._container.get_wrapped_container()
        else:
            await asyncio.to_thread(self._node.start)
        await self._until_serving()

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

    async def _until_serving(self) -> None:
        async with asyncio.timeout(START_TIMEOUT):
            while not await self._serves():
                await asyncio.sleep(0.2)

    async def _serves(self) -> bool:
        options = amqp.ConnectionOptions(uri=self.amqp_uri, name="osrdyne chaos", connect_timeout=5.0)
        try:
            _, writer = await asyncio.open_connection(LOOPBACK, self.management_port)
            writer.close()
            connection = await amqp.connect(options)
        except (BrokerError, OSError):
            return False
        await connection.close()
        return True


@asynccontextmanager
async def running_node(directory: Path, *, image: str | None) -> AsyncIterator[Node]:
    """A container of `image`, or without one the RabbitMQ that is installed, with its data in `directory`."""
    if image is None:
        async with EmbeddedNode(directory / "rabbitmq") as embedded:
            yield embedded
    else:
        async with ContainerNode(image) as container:
            yield container
