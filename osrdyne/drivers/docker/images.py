"""Pulls the image of the workers in its own threads: a pull may take minutes, and must not delay other calls.

Used by the Docker driver. Starts that need the image while a pull runs share the outcome of the next pull.
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
    """The image of a pool. `engine`: with the time-out of pulls."""

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
        """Pull the image, in a pull that begins after this call. Raises `StartFailedError`, or `DriverUnavailableError`
        if the engine does not answer."""
        begun = self._begun
        async with self._turn:
            if self._finished <= begun:
                self._begun += 1
                self._failure = await self._threads.run(self._pull)
                self._finished = self._begun
            if self._failure is not None:
                raise type(self._failure)(self._failure.message)

    def close(self) -> None:
        """Abandon a running pull without waiting for it; the engine keeps the layers that it has received."""
        self._closed = True
        self._engine.close()

    def _pull(self) -> DriverError | None:
        """Pull the image, and return the error for all waiting callers."""
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
        """Read the progress of a pull to its end, and return why it failed; an error may come after the first steps."""
        for step in client.pull(self._image, stream=True, decode=True):
            if "error" in step:
                return mask_uri(str(step["error"])).rstrip(".")
            if self._closed:
                return "the daemon is being stopped"
        return None
