"""The check whether a key exists, before a worker is started for it (`worker.key_exists`).

The check belongs to the operator and may block: it runs in a thread, with a time limit. A check that fails lets the
worker start, whose `on_start` then decides: no request is refused because the check is broken.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from osrdyne.aio.tasks import Threads
from osrdyne.errors import ConfigurationError
from osrdyne.logs import Logger, get_logger
from osrdyne.protocol.names import Key
from osrdyne.protocol.refusals import KeyRefusal

KEY_FIELD = "{key}"
CHECKS_AT_ONCE = 4
CHECK_TIMEOUT = 5.0
UNKNOWN_KEY = "unknown_key"

KeyTest = Callable[[str], object]


def load_key_test(setting: str | None) -> KeyTest | None:
    """The test that `worker.key_exists` names; None without the setting. Raises `ConfigurationError`."""
    if setting is None:
        return None
    if KEY_FIELD in setting:
        return partial(_has_path, setting)
    module_name, _, name = setting.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as for `worker.app`
    try:
        test = getattr(import_module(module_name), name)
    except Exception as error:
        raise ConfigurationError(
            f"worker.key_exists: {setting} cannot be imported ({type(error).__name__}: {error}); write a path with "
            f"{KEY_FIELD}, or module:function of a module that the daemon can import."
        ) from error
    if not callable(test) or inspect.iscoroutinefunction(test):
        raise ConfigurationError(f"worker.key_exists: {setting} must be a plain function of the key.")
    return test  # type: ignore[no-any-return]


def _has_path(template: str, key: str) -> bool:
    if ".." in key.split("/") or "\0" in key:
        return False  # not a path below that of the setting
    return Path(template.replace(KEY_FIELD, key)).exists()


class KeyCheck:
    """Runs the test of one pool."""

    def __init__(self, test: KeyTest | None, *, timeout: float = CHECK_TIMEOUT) -> None:
        self._test = test
        self._timeout = timeout
        self._threads = Threads("key-exists", limit=CHECKS_AT_ONCE)
        self._log: Logger = get_logger("key_check")

    async def refusal(self, key: Key) -> KeyRefusal | None:
        """The refusal of a key that does not exist; None if it exists, or if that is unknown."""
        if self._test is None:
            return None
        try:
            async with asyncio.timeout(self._timeout):
                if await self._threads.run(partial(self._test, key)):
                    return None
        except Exception as error:  # code of the operator
            self._log.warning("key_exists failed", key=key, error=f"{type(error).__name__}: {error}")
            return None
        return KeyRefusal(f"There is no key {key!r}.", 404, UNKNOWN_KEY)
