"""Pulls the image of the workers, in a thread of its own: a pull may take minutes, and nothing else waits for it.

Used by the Docker driver. Starts that ask while a pull is under way share the outcome of the next one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from docker.errors import APIError

from osrdyne.aio.tasks import Threads
from osrdyne.drivers.docker.engine import THREADS, Engine
from osrdyne.drivers.docker.launch import explain
from osrdyne.errors import DriverError, DriverUnavailableError, StartFailedError
from osrdyne.logs import Logger, get_logger, mask_uri


class Images:
    """The one image of a pool. `engine` has the limit of a pull."""

    def __init__(self, engine: Engine, image: str) -> None:
        self._engine = engine
        self._image = image
        self._threads = Threads("docker-pull", limit=THREADS)
        self._turn = asyncio.Lock()
        self._begun = 0
        self._finished = 0
        self._failure: DriverError | None = None
        self._closed = False
        self._log: Logger = get_logger("drivers.docker")

    async def pull(self) -> None:
        """Have the image pulled, in a pull that begins after this call. Raises `StartFailedError`, or
        `DriverUnavailableError` when the engine fell silent."""
        begun = self._begun
        async with self._turn:
            if self._finished <= begun:
                self._begun += 1
                self._failure = await self._threads.run(self._pull)
                self._finished = self._begun
            if self._failure is not None:
                raise type(self._failure)(self._failure.message)

    def close(self) -> None:
        """Give a pull up that is under way, without waiting for it; what the engine has got of it stays there."""
        self._closed = True
        self._engine.close()

    def _pull(self) -> DriverError | None:
        """Pull, and return what went wrong, for every caller that waits."""
        self._log.info("pulling image", image=self._image)
        try:
            problem = self._engine.call(self._follow)
        except APIError as error:
            problem = explain(error)
        except DriverUnavailableError as error:
            return error
        if problem is None:
            return None
        return StartFailedError(
            f"The image {self._image} cannot be pulled: {problem}. Check driver.options.image, the registry "
            "and driver.options.registry_config_file."
        )

    def _follow(self, client: Any) -> str | None:
        """Read the steps of a pull to the end; a refusal may come after the engine has begun to answer."""
        for step in client.pull(self._image, stream=True, decode=True):
            if "error" in step:
                return mask_uri(str(step["error"])).rstrip(".")
            if self._closed:
                return "the daemon is being stopped"
        return None
