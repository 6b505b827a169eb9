"""The RabbitMQ under attack: an embedded node, or a container of another version. Both do the same when told to."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from osrdyne import amqp
from osrdyne.broker.embedded import EmbeddedBroker
from osrdyne.errors import BrokerError
from tests.acceptance.daemon_process import free_port
from tests.integration.rabbitmqctl import rabbitmqctl

LOOPBACK = "127.0.0.1"
START_TIMEOUT = 120.0
STOP_SECONDS = "20"


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
    """A container of `image`; `async with` removes it, with its data, at the end."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._name = f"osrdyne-chaos-{secrets.token_hex(4)}"
        self._password = secrets.token_hex(16)
        self.amqp_port = free_port()
        self.management_port = free_port()

    @property
    def amqp_uri(self) -> str:
        """Holds the password: never log it."""
        return f"amqp://osrdyne:{self._password}@{LOOPBACK}:{self.amqp_port}/"

    @property
    def management_uri(self) -> str:
        """Holds the password: never log it."""
        return f"http://osrdyne:{self._password}@{LOOPBACK}:{self.management_port}"

    async def __aenter__(self) -> Self:
        publish = (
            f"--publish={LOOPBACK}:{self.amqp_port}:5672",
            f"--publish={LOOPBACK}:{self.management_port}:15672",
        )
        user = ("--env=RABBITMQ_DEFAULT_USER", "--env=RABBITMQ_DEFAULT_PASS")  # their values are in our environment
        try:
            # The host's name is part of the name of the node, and so of its data.
            await self._docker("create", f"--name={self._name}", "--hostname=rabbitmq", *publish, *user, self._image)
            await self.start()
        except BaseException:
            await self._remove()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._remove()

    async def start(self) -> None:
        await self._docker("start", self._name)
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

    async def stop(self) -> None:
        await self._docker("stop", "-t", STOP_SECONDS, self._name)

    async def kill(self) -> None:
        await self._docker("kill", self._name)

    async def freeze(self) -> None:
        await self._docker("pause", self._name)

    async def thaw(self) -> None:
        await self._docker("unpause", self._name)

    async def control(self, *arguments: str) -> None:
        await self._docker("exec", self._name, "rabbitmqctl", *arguments)

    async def _remove(self) -> None:
        await self._docker("rm", "--force", "--volumes", self._name)

    async def _docker(self, *arguments: str) -> None:
        own = {"RABBITMQ_DEFAULT_USER": "osrdyne", "RABBITMQ_DEFAULT_PASS": self._password}
        process = await asyncio.create_subprocess_exec(
            "docker",
            *arguments,
            env={**os.environ, **own},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, f"docker {arguments[0]}: {output.decode(errors='replace')}"


@asynccontextmanager
async def running_node(directory: Path, *, image: str | None) -> AsyncIterator[Node]:
    """A container of `image`, or without one the RabbitMQ that is installed, with its data in `directory`."""
    if image is None:
        async with EmbeddedNode(directory / "rabbitmq") as embedded:
            yield embedded
    else:
        async with ContainerNode(image) as container:
            yield container
