"""The interface of the systemd driver to systemd, over D-Bus or through systemctl."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum

from osrdyne.drivers.systemd.names import UnitEnd
from osrdyne.errors import DriverError, DriverUnavailableError, StartFailedError

CALL_TIMEOUT = 25.0  # Seconds within which systemd answers anything but a job.


class ActiveState(StrEnum):
    """What the driver tells apart of systemd's active states."""

    UP = "up"
    STOPPING = "stopping"
    FAILED = "failed"
    DOWN = "down"

    @property
    def is_alive(self) -> bool:
        """Whether processes of the unit may be there."""
        return self in {ActiveState.UP, ActiveState.STOPPING}


_STATES = {
    "active": ActiveState.UP,
    "reloading": ActiveState.UP,
    "refreshing": ActiveState.UP,
    "activating": ActiveState.UP,
    "maintenance": ActiveState.UP,
    "deactivating": ActiveState.STOPPING,
    "failed": ActiveState.FAILED,
    "inactive": ActiveState.DOWN,
}


def active_state(text: str) -> ActiveState:
    """systemd's own word; one that is not known yet is taken for a unit that is up, which is never the wrong start."""
    return _STATES.get(text, ActiveState.UP)


class SystemdUnits(ABC):
    """Units of one systemd. Every call has a time-out and raises `DriverUnavailableError` when systemd is silent."""

    @abstractmethod
    async def states(self, pattern: str) -> Mapping[str, ActiveState]:
        """The units that are loaded, by name. One that ended well is loaded no more."""

    @abstractmethod
    async def end_of(self, unit: str) -> UnitEnd:
        """How a failed unit ended."""

    @abstractmethod
    async def start(self, unit: str) -> bool:
        """Start a unit and wait until its program runs. False: it does not, or not any more.

        Raises `StartFailedError` for a unit that systemd does not have, or may not start.
        """

    @abstractmethod
    async def stop(self, unit: str) -> None:
        """Stop a unit and wait, without limit, until it has. One that is down is fine."""

    @abstractmethod
    async def kill(self, unit: str) -> None:
        """SIGKILL every process of a unit. One that is down is fine."""

    @abstractmethod
    async def forget_failure(self, unit: str) -> None:
        """Let systemd forget how a unit ended."""

    @abstractmethod
    def changes(self) -> AsyncIterator[None]:
        """Yields when units of the pool changed; ends or raises `DriverUnavailableError` when it cannot tell."""

    async def close(self) -> None:  # noqa: B027 - an optional hook
        """Release what this object holds."""


def refusal(message: str, unit: str) -> DriverError:
    """The error for a start that systemd refused: permanent if the unit or a permission is missing, else temporary."""
    message = message.partition("\n")[0]  # systemctl goes on with advice for a terminal
    words = message.lower()
    template = f"{unit.partition('@')[0]}@.service"
    if "not found" in words or "masked" in words or "bad unit file" in words or "bad-setting" in words:
        return StartFailedError(
            f"systemd cannot use the unit {template}: {message} Install it (deploy/systemd), run "
            "`systemctl daemon-reload`, and check driver.options.template."
        )
    if "access denied" in words or "authentication required" in words or "not permitted" in words:
        return StartFailedError(
            f"systemd does not let this user manage {template}: {message} The polkit rule in deploy/systemd allows it "
            "for templates whose name begins with osrdyne-worker."
        )
    return DriverUnavailableError(f"systemd did not do it: {message}")


def trouble(message: str, unit: str) -> DriverUnavailableError:
    """The error for anything else that systemd refused: it is tried again, and the remedy is the same."""
    return DriverUnavailableError(refusal(message, unit).message)
