"""The interface of the systemd driver to systemd, over D-Bus or through systemctl."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum

from osrdyne.drivers.systemd.names import UnitEnd
from osrdyne.errors import DriverError, DriverUnavailableError, StartFailedError

CALL_TIMEOUT = 25.0  # Seconds within which systemd must answer any call except a job.


class ActiveState(StrEnum):
    """systemd's active states, as far as the driver distinguishes them."""

    UP = "up"
    STOPPING = "stopping"
    FAILED = "failed"
    DOWN = "down"

    @property
    def is_alive(self) -> bool:
        """Whether the unit may have processes."""
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
    """Parse a state of systemd. An unknown one counts as UP, so that no second worker is started for the slot."""
    return _STATES.get(text, ActiveState.UP)


class SystemdUnits(ABC):
    """The units of one systemd. Calls raise `DriverUnavailableError` if systemd does not answer within a time-out."""

    @abstractmethod
    async def states(self, pattern: str) -> Mapping[str, ActiveState]:
        """The state of each loaded unit, by name. systemd unloads a unit that ended without a failure."""

    @abstractmethod
    async def end_of(self, unit: str) -> UnitEnd:
        """How a failed unit ended."""

    @abstractmethod
    async def start(self, unit: str) -> bool:
        """Start a unit and wait until its program runs. False if it does not run, or has ended already.

        Raises `StartFailedError` if the unit is missing, or may not be started by this user.
        """

    @abstractmethod
    async def stop(self, unit: str) -> None:
        """Stop a unit and wait without limit until it has stopped. No-op if it is down."""

    @abstractmethod
    async def kill(self, unit: str) -> None:
        """Send SIGKILL to every process of a unit. No-op if it is down."""

    @abstractmethod
    async def forget_failure(self, unit: str) -> None:
        """Reset the failed state of a unit, so that systemd unloads it."""

    @abstractmethod
    def changes(self) -> AsyncIterator[None]:
        """Yields when units of the pool changed. Ends or raises `DriverUnavailableError` if it cannot observe them."""

    async def close(self) -> None:  # noqa: B027 - an optional hook
        """Release what this object holds."""


def refusal(message: str, unit: str) -> DriverError:
    """The error for a start that systemd refused: permanent if the unit or a permission is missing, else temporary."""
    message = message.partition("\n")[0]  # the following lines are hints for a terminal
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
    return DriverUnavailableError(f"systemd refused: {message}")


def trouble(message: str, unit: str) -> DriverUnavailableError:
    """The error for any other refused call: temporary, with the same remedy."""
    return DriverUnavailableError(refusal(message, unit).message)
