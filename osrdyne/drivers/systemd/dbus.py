"""systemd over D-Bus: one connection, opened at the first call and again after it was lost.

systemd's signals replace polling: `JobRemoved` ends the wait for a job, `PropertiesChanged` and `UnitRemoved` of units
of the pool are the driver's events. Source: org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from dbus_fast import DBusFastError, Message, MessageType, unpack_variants
from dbus_fast.aio import MessageBus
from dbus_fast.constants import BusType

from osrdyne.aio.signals import WatchCell
from osrdyne.drivers.systemd.names import UnitEnd, object_path
from osrdyne.drivers.systemd.units import CALL_TIMEOUT, ActiveState, SystemdUnits, active_state, refusal, trouble
from osrdyne.errors import DriverUnavailableError

_SYSTEMD = "org.freedesktop.systemd1"
_MANAGER = "org.freedesktop.systemd1.Manager"
_MANAGER_PATH = "/org/freedesktop/systemd1"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_MATCHES = (
    f"type='signal',sender='{_SYSTEMD}',interface='{_MANAGER}',member='JobRemoved'",
    f"type='signal',sender='{_SYSTEMD}',interface='{_MANAGER}',member='UnitRemoved'",
    f"type='signal',sender='{_SYSTEMD}',interface='{_PROPERTIES}',member='PropertiesChanged',"
    f"path_namespace='{_MANAGER_PATH}/unit'",
)
_NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
_REMEMBERED_JOBS = 1000


class _Refused(Exception):
    """The answer to a method call is an error; `name` is its D-Bus name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class DbusConnection:
    """One connection to the bus: method calls, the results of jobs, and changes of the pool's units."""

    def __init__(self, bus: MessageBus, prefix: str) -> None:
        self._bus = bus
        self._prefix = object_path(prefix)
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._finished: dict[str, str] = {}
        self._changes = WatchCell(0)
        self._lost = asyncio.ensure_future(bus.wait_for_disconnect())  # type: ignore[no-untyped-call]
        self._lost.add_done_callback(self._end)
        bus.add_message_handler(self._handle)

    @classmethod
    async def open(cls, address: str | None, prefix: str) -> DbusConnection:
        """Connect and subscribe; `address` None: to the bus of the system. Raises `DriverUnavailableError`."""
        try:
            bus = MessageBus(address, BusType.SYSTEM, auth_timeout=CALL_TIMEOUT)
            async with asyncio.timeout(CALL_TIMEOUT):
                await bus.connect()
        except (OSError, EOFError, DBusFastError, TimeoutError) as error:
            raise DriverUnavailableError(f"D-Bus cannot be reached: {str(error) or 'no answer'}.") from error
        connection = cls(bus, prefix)
        try:
            for match in _MATCHES:
                await connection.call("AddMatch", "s", [match], destination="org.freedesktop.DBus")
            await connection.call("Subscribe")
        except _Refused as error:
            # For example, no systemd is on this bus, or it is just being restarted.
            await connection.close()
            raise DriverUnavailableError(f"systemd cannot be reached over D-Bus: {error}.") from error
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def is_open(self) -> bool:
        return not self._lost.done()

    async def call(
        self,
        member: str,
        signature: str = "",
        body: list[Any] | None = None,
        *,
        path: str = _MANAGER_PATH,
        interface: str = _MANAGER,
        destination: str = _SYSTEMD,
    ) -> list[Any]:
        """Call a method. Raises `DriverUnavailableError`, or `_Refused` when the answer is an error."""
        if destination != _SYSTEMD:
            path, interface = "/org/freedesktop/DBus", destination
        message = Message(
            destination=destination,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=body or [],
        )
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                reply = await self._bus.call(message)
        except (OSError, EOFError, DBusFastError, TimeoutError) as error:
            raise DriverUnavailableError(f"systemd does not answer: {str(error) or member}.") from error
        if reply is None:
            raise DriverUnavailableError("The connection to D-Bus was lost.")
        if reply.message_type is MessageType.ERROR:
            raise _Refused(reply.error_name or "", str(reply.body[0]) if reply.body else "no reason given")
        answer: list[Any] = unpack_variants(reply.body)
        return answer

    async def job(self, member: str, unit: str) -> str:
        """Enqueue a job, wait for it, and return its result (`done`, `failed`, `canceled`, …)."""
        [path] = await self.call(member, "ss", [unit, "replace"])
        if path in self._finished:
            return self._finished[path]
        waiting = self._waiting.setdefault(path, asyncio.get_running_loop().create_future())
        return await asyncio.shield(waiting)

    async def changes(self) -> AsyncIterator[None]:
        """Yields when a unit of the pool changed. Raises `DriverUnavailableError` when the connection is lost."""
        seen = self._changes.value
        while self.is_open:
            if self._changes.value == seen:
                await self._changes.changed()
            seen = self._changes.value
            yield
        raise DriverUnavailableError("The connection to D-Bus was lost.")

    async def close(self) -> None:
        self._bus.disconnect()
        await asyncio.wait([self._lost])

    def _handle(self, message: Message) -> None:
        if message.message_type is not MessageType.SIGNAL:
            return
        if message.member == "JobRemoved":
            _, path, _, result = message.body
            self._finish(path, result)
        elif message.member == "PropertiesChanged":
            if (message.path or "").startswith(self._prefix):
                self._note_change()
        elif message.member == "UnitRemoved" and str(message.body[1]).startswith(self._prefix):
            self._note_change()

    def _note_change(self) -> None:
        self._changes.set(self._changes.value + 1)

    def _finish(self, path: str, result: str) -> None:
        waiting = self._waiting.pop(path, None)
        if waiting is not None:
            waiting.set_result(result)
        self._finished[path] = result  # the answer to the call that enqueued the job may still be in transit
        if len(self._finished) > _REMEMBERED_JOBS:
            del self._finished[next(iter(self._finished))]

    def _end(self, lost: asyncio.Future[Any]) -> None:
        if not lost.cancelled():
            lost.exception()  # marks it as retrieved
        for waiting in self._waiting.values():
            waiting.set_exception(DriverUnavailableError("The connection to D-Bus was lost."))
            waiting.exception()
        self._waiting.clear()
        self._note_change()


class DbusUnits(SystemdUnits):
    """systemd's manager over one `DbusConnection` at a time."""

    def __init__(self, address: str | None, prefix: str) -> None:
        self._address = address
        self._prefix = prefix
        self._connection: DbusConnection | None = None
        self._connecting = asyncio.Lock()

    async def connect(self) -> DbusConnection:
        """The open connection; opens it, or opens it again after it was lost. Raises `DriverUnavailableError`."""
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                self._connection = await DbusConnection.open(self._address, self._prefix)
            return self._connection

    async def states(self, pattern: str) -> Mapping[str, ActiveState]:
        try:
            [units] = await (await self.connect()).call("ListUnitsByPatterns", "asas", [[], [pattern]])
        except _Refused as error:
            raise DriverUnavailableError(f"systemd does not list its units: {error}.") from error
        return {unit[0]: active_state(unit[3]) for unit in units}

    async def end_of(self, unit: str) -> UnitEnd:
        connection = await self.connect()
        try:
            [properties] = await connection.call(
                "GetAll", "s", ["org.freedesktop.systemd1.Service"], path=object_path(unit), interface=_PROPERTIES
            )
        except _Refused as error:
            raise DriverUnavailableError(f"systemd does not report how a unit ended: {error}.") from error
        return UnitEnd(properties["ExecMainCode"], properties["ExecMainStatus"], properties["Result"])

    async def start(self, unit: str) -> bool:
        try:
            return await (await self.connect()).job("StartUnit", unit) == "done"
        except _Refused as error:
            raise refusal(str(error), unit) from error

    async def stop(self, unit: str) -> None:
        try:
            await (await self.connect()).job("StopUnit", unit)
        except _Refused as error:
            if error.name != _NO_SUCH_UNIT:
                raise trouble(str(error), unit) from error

    async def kill(self, unit: str) -> None:
        await self._if_loaded("KillUnit", "ssi", [unit, "all", 9], unit)

    async def forget_failure(self, unit: str) -> None:
        await self._if_loaded("ResetFailedUnit", "s", [unit], unit)

    async def changes(self) -> AsyncIterator[None]:
        connection = await self.connect()
        async for _ in connection.changes():
            yield

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _if_loaded(self, member: str, signature: str, body: list[Any], unit: str) -> None:
        try:
            await (await self.connect()).call(member, signature, body)
        except _Refused as error:
            if error.name not in {_NO_SUCH_UNIT, "org.freedesktop.systemd1.NoSuchProcess"}:
                raise trouble(str(error), unit) from error
