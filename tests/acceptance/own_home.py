"""A user with a home of their own, for commands that need no configuration; and what they left running."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from daemon_process import own_environment

from osrdyne.user_directories import cache_directory


def own_home(directory: Path) -> dict[str, str]:
    """The environment of such a user; what they start is found by its `TMPDIR`.

    Its cache has the archive of classes of the user who runs the tests: to make one takes more time than most tests.
    """
    (directory / "tmp").mkdir()
    archives = cache_directory() / "class-data"
    if archives.exists():
        (directory / "cache" / "osrdyne").mkdir(parents=True)
        (directory / "cache" / "osrdyne" / "class-data").symlink_to(archives)
    places = {"XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    return own_environment(**{name: str(directory / place) for name, place in places.items()})


def processes_of(home: Mapping[str, str]) -> list[psutil.Process]:
    """Every process that was started with this environment, however it is related to us."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == home["TMPDIR"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_processes_of(home: Mapping[str, str]) -> None:
    for left in processes_of(home):
        with suppress(psutil.NoSuchProcess):
            left.kill()


def commands_of(home: Mapping[str, str]) -> list[list[str]]:
    """The command lines of these processes, without those that end meanwhile."""
    found = []
    for process in processes_of(home):
        with suppress(psutil.Error):
            found.append(process.cmdline())
    return found
