"""Pulls the image of the workers, in a thread of its own: a pull may take minutes, and nothing else waits for it.

Used by the Docker driver. Starts that ask while a pull is under way share its outcome.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from docker.errors import APIError

from osrdyne.drivers.docker.engine import Engine
from osrdyne.drivers.docker.launch import explain
from osrdyne.errors import DriverError, DriverUnavailableError, StartFailedError
from osrdyne.logs import Logger, get_logger, mask_uri


class Images:
    """The one image of a pool. `engine` has the limit of a pull."""

    def __init__(self, engine: Engine, image: str) -> None:
        self._engine = engine
        self._image = image
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="docker-pull")
        self._pulls = 0
        self._failure: DriverError | None = None
        self._closed = False
        self._log: Logger = get_logger("drivers.docker")

    async def pull(self) -> None:
        """Have the image pulled, in a pull that begins after this call. Raises `StartFailedError`, or
        `DriverUnavailableError` when the engine fell silent."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._pull_after, self._pulls)

    def close(self) -> None:
        """Give a pull up that is under way; what the engine has got of it stays there."""
        self._closed = True
        self._executor.shutdown(cancel_futures=True)
        self._engine.close()

    def _pull_after(self, pulls: int) -> None:
        if self._pulls == pulls:
            self._pulls += 1
            self._failure = self._pull()
        if self._failure is not None:
            raise type(self._failure)(self._failure.message)

    def _pull(self) -> DriverError | None:
        """Pull, and return what went wrong: it is told to everybody who waits."""
        self._log.info("image is being pulled", image=self._image)
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
