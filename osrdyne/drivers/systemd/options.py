"""The options of the systemd driver, and where its environment files are."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path

from pydantic import Field, field_validator

from osrdyne.drivers.base import DriverOptions
from osrdyne.drivers.shared import ShellVariables
from osrdyne.drivers.systemd.names import is_accepted


class ManagerKind(StrEnum):
    """Which systemd: that of the system, or that of the daemon's own user."""

    SYSTEM = "system"
    USER = "user"


class BusChoice(StrEnum):
    """The interface to systemd; `auto`: D-Bus, and systemctl while D-Bus is unavailable."""

    AUTO = "auto"
    DBUS = "dbus"
    SYSTEMCTL = "systemctl"


class SystemdOptions(DriverOptions):
    """`driver.options` of the systemd driver. The unit defines the program, its user and its limits."""

    template: str = Field(
        "osrdyne-worker", description="The template unit, without `@.service`. Pools may have one each."
    )
    manager: ManagerKind = Field(ManagerKind.SYSTEM, description="`system`, or `user` for `systemctl --user`.")
    bus: BusChoice = Field(
        BusChoice.AUTO, description="`dbus`, `systemctl`, or `auto`: D-Bus, and systemctl while D-Bus is unavailable."
    )
    environment: ShellVariables = Field(
        default_factory=dict, description="Further environment variables of the workers."
    )
    runtime_directory: str | None = Field(
        None, description="Where the environment files are; the unit names the same directory in `EnvironmentFile=`."
    )

    @field_validator("template")
    @classmethod
    def _is_unit_name(cls, value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value) is None:
            raise ValueError("must be 1 to 64 letters, digits, `_`, `-` and `.`, without `@.service`")
        return value

    @field_validator("environment")
    @classmethod
    def _is_accepted_by_systemd(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not is_accepted(text):
                raise ValueError(f"the value of {name} contains characters that systemd does not accept")
        return value


def runtime_directory(options: SystemdOptions) -> Path:
    """The directory of the environment files. A reboot deletes it, as it ends the workers."""
    if options.runtime_directory is not None:
        return Path(options.runtime_directory).absolute()
    if options.manager is ManagerKind.USER:
        return _user_directory() / "osrdyne"
    return Path("/run/osrdyne")


def bus_address(manager: ManagerKind) -> str | None:
    """The address of D-Bus for this systemd; None: the default address of the system."""
    return f"unix:path={_user_directory() / 'bus'}" if manager is ManagerKind.USER else None


def _user_directory() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}")
