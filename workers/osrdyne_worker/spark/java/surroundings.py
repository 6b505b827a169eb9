"""The user and the locale of a JVM, where those of the worker would stop it or lose files. Called by `jvm`, `session`.

A user id without a name, as OpenShift gives to every pod: Java has no home directory for it, and Hadoop no user. A
locale without UTF-8 (`LC_ALL=C`): Java finds no file whose name is not ASCII.
"""

from __future__ import annotations

import os
import pwd
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osrdyne.errors import ConfigurationError

_UTF_8 = re.compile(r"utf-?8", re.IGNORECASE)


def quoted(option: str) -> str:
    """A JVM option as a part of `spark.driver.extraJavaOptions`, which Spark splits at blanks outside of quotes."""
    if not re.search(r"[\s\"'\\]", option):
        return option
    return '"{}"'.format(option.replace("\\", "\\\\").replace('"', '\\"'))


def nameless_user() -> str | None:
    """The name that stands for a user id without one; None if the user has a name."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return os.environ.get("HADOOP_USER_NAME") or str(os.geteuid())
    return None


def user_options() -> list[str]:
    """JVM options for a user id without a name. Raises `ConfigurationError` if there is no directory for it."""
    name = nameless_user()
    return [] if name is None else [quoted(f"-Duser.home={_home()}"), quoted(f"-Duser.name={name}")]


def _home() -> Path:
    given = Path(os.environ.get("HOME") or "-")
    if given.is_absolute() and os.access(given, os.W_OK):
        return given
    home = Path(tempfile.gettempdir()) / f"osrdyne-home-{os.geteuid()}"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        status = home.lstat()
        is_own = home.is_dir() and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    except OSError:
        is_own = False
    if not is_own:
        raise ConfigurationError(
            f"The user id {os.geteuid()} has no name on this host, and {home} cannot be its home directory: set HOME "
            "to a directory that it can write to."
        )
    return home


def log_in(gateway: Any) -> None:
    """Give Hadoop a user in the JVM behind `gateway`, if the user id has no name: it would find none, and fail."""
    name = nameless_user()
    if name is not None:
        information = gateway.jvm.org.apache.hadoop.security.UserGroupInformation
        information.setLoginUser(information.createRemoteUser(name))


def locale_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that give the JVM a locale with UTF-8, if the present one has another encoding."""
    effective = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environment.get(name))), "")
    return {} if _UTF_8.search(effective) else {"LC_ALL": "C.UTF-8"}
