"""The driver that starts workers as instances of a systemd template unit.

systemd runs them, limits them and stores their output. This driver writes one environment file for each, which is also
the record by which the next controller finds the worker. The unit defines the program, its user and its limits
(`deploy/systemd`), so `systemctl edit`, slices and drop-ins work as for any service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar, TypeVar

from osrdyne.aio.clock import Backoff
from osrdyne.drivers.base import (
    Driver,
    DriverContext,
    DriverOptions,
    Exit,
    Finding,
    Instance,
    InstanceId,
    InstanceState,
    WorkerSpec,
    hash_options,
)
from osrdyne.drivers.systemd.checks import PROPERTIES, judge_unit
from osrdyne.drivers.systemd.dbus import DbusUnits
from osrdyne.drivers.systemd.names import UnitEnd, UnitNames, environment_text, is_accepted
from osrdyne.drivers.systemd.options import BusChoice, SystemdOptions, bus_address, runtime_directory
from osrdyne.drivers.systemd.records import EnvironmentFiles, Record
from osrdyne.drivers.systemd.systemctl import Journal, Systemctl
from osrdyne.drivers.systemd.units import ActiveState, SystemdUnits
from osrdyne.errors import DriverError, DriverUnavailableError, SlotTakenError, StartFailedError
from osrdyne.protocol.environment import STANDARD_INPUT, URI_FILE_VARIABLE, URI_VARIABLE
from osrdyne.protocol.names import WorkerId, encode_key

T = TypeVar("T")

_SHORTEST_GRACE = 0.2  # Seconds that a stop without grace leaves for systemd to send SIGTERM.
_RECONNECT = Backoff(initial=0.2, maximum=10.0)
# Seconds within which systemd must run the program: its own limit is 90, but a job may also wait for other units.
_START_PATIENCE = 120.0
_KILL_PATIENCE = 20.0  # Seconds within which a killed unit must be gone; the kernel may be unable to end its processes.


class SystemdDriver(Driver):
    """Starts, lists and stops units. Its options: `SystemdOptions`."""

    name: ClassVar[str] = "systemd"
    options_model: ClassVar[type[DriverOptions]] = SystemdOptions
    same_host = True

    def __init__(self, options: SystemdOptions, context: DriverContext) -> None:
        super().__init__(options, context)
        self._options = options
        self._names = UnitNames(options.template, context.pool, context.stack)
        self._files = EnvironmentFiles(runtime_directory(options), self._names.prefix)
        self._systemctl = Systemctl(options.manager, self._names.pattern, clock=context.clock)
        self._dbus = DbusUnits(
            bus_address(options.manager), self._names.unit(self._names.prefix).removesuffix(".service")
        )
        self._journal = Journal(options.manager, clock=context.clock)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="systemd-driver")
        self._starting: set[str] = set()

    def spec_hash(self, config: Mapping[str, object] | None = None) -> str:
        return hash_options(
            {
                "template": self._options.template,
                "app": self.context.worker_app,
                "environment": self._options.environment,
                "config": self.context.shape_of(config),
            }
        )

    async def list_instances(self) -> list[Instance]:
        records = await self._in_thread(self._files.records)
        units = await self._units()
        # Before the states are read: a start that ends meanwhile has a unit that the states may not show yet.
        starting = frozenset(self._starting)
        states = await units.states(self._names.pattern)
        # A start after the records were read has a unit by now: its record is read here.
        alive = [self._names.instance_of(unit) for unit, state in states.items() if state.is_alive]
        unknown = [instance for instance in alive if instance not in records]
        records |= await self._in_thread(lambda: self._files.read_all(unknown))
        instances = [
            await self._instance(
                instance,
                record,
                states.get(self._names.unit(instance), ActiveState.DOWN),
                units,
                is_starting=instance in starting or instance in self._starting,
            )
            for instance, record in records.items()
        ]
        return instances + self._without_record(records, states)

    async def start(self, spec: WorkerSpec) -> Instance:
        instance = self._names.instance(spec.key, spec.slot)
        record = Record(
            key=spec.key,
            slot=spec.slot,
            worker_id=spec.worker_id,
            spec_hash=spec.spec_hash or self.spec_hash(),
            generation=str(spec.generation),
            started_at=self.context.clock.time(),
        )
        units = await self._units()
        if instance in self._starting:
            raise SlotTakenError("A worker of this slot is already being started.", key=spec.key, slot=spec.slot)
        # From here on the slot is listed as running: the state of a unit whose job waits does not show it.
        self._starting.add(instance)
        try:
            # Crash after it: the record has no running unit, and is listed as never started.
            await self._take_slot(instance, record, spec, units)
            return await self._start_unit(instance, record, units)
        finally:
            self._starting.discard(instance)

    async def stop(self, instance_id: InstanceId, *, grace: float) -> None:
        instance = await self._find(instance_id)
        if instance is None:
            return
        unit = self._names.unit(instance)
        units = await self._units()
        if not (await self._state(unit, units)).is_alive:
            return
        try:
            async with asyncio.timeout(max(grace, _SHORTEST_GRACE)):
                return await units.stop(unit)
        except TimeoutError:
            # The job of the first stop continues, and ends once the processes are gone.
            await units.kill(unit)
        try:
            async with asyncio.timeout(_KILL_PATIENCE):
                await units.stop(unit)
        except TimeoutError:
            raise DriverUnavailableError("The worker was killed, but its processes do not end.", unit=unit) from None

    async def remove(self, instance_id: InstanceId) -> None:
        instance = await self._find(instance_id)
        if instance is None:
            return
        unit = self._names.unit(instance)
        units = await self._units()
        state = await self._state(unit, units)
        if state.is_alive:
            return
        # systemd lists a failed unit until it is reset.
        if state is ActiveState.FAILED:
            await units.forget_failure(unit)
        await self._in_thread(lambda: self._files.remove(instance, WorkerId(instance_id)))

    async def logs(self, instance_id: InstanceId, *, lines: int = 50) -> tuple[str, ...]:
        instance = await self._find(instance_id)
        if instance is None:
            return ()
        record = await self._in_thread(lambda: self._files.read(instance))
        since = 0.0 if record is None else record.started_at
        unit = self._names.unit(instance)
        ended = not (await self._state(unit, await self._units())).is_alive
        return await self._journal.tail(unit, since=since, lines=lines, ended=ended)

    async def events(self) -> AsyncIterator[None]:
        failures = 0
        while True:
            try:
                async for _ in (await self._units()).changes():
                    failures = 0
                    yield
            except DriverUnavailableError:
                failures += 1
                await self.context.clock.sleep(_RECONNECT.delay(failures))
            yield  # events in between may be lost

    async def check(self) -> list[Finding]:
        return [
            await self._check_unit(),
            await self._check_bus(),
            await self._check_directory(),
            await self._check_journal(),
        ]

    async def close(self) -> None:
        await self._dbus.close()
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    # --- which systemd interface

    async def _units(self) -> SystemdUnits:
        """D-Bus if it answers; otherwise systemctl if the options allow it. Raises `DriverUnavailableError`."""
        if self._options.bus is BusChoice.SYSTEMCTL:
            return self._systemctl
        try:
            await self._dbus.connect()
        except DriverUnavailableError:
            if self._options.bus is BusChoice.DBUS:
                raise
            return self._systemctl
        return self._dbus

    async def _state(self, unit: str, units: SystemdUnits) -> ActiveState:
        return (await units.states(unit)).get(unit, ActiveState.DOWN)

    # --- one instance

    async def _instance(
        self, instance: str, record: Record, state: ActiveState, units: SystemdUnits, *, is_starting: bool
    ) -> Instance:
        listed = self._running(instance, record)
        if state is ActiveState.UP and not record.started and not is_starting:
            await self._in_thread(lambda: self._files.mark_started(instance, record))  # its start took effect late
        if state is ActiveState.UP or is_starting:
            return listed
        if state is ActiveState.STOPPING:
            return replace(listed, state=InstanceState.STOPPING)
        if state is ActiveState.FAILED:
            end = (await units.end_of(self._names.unit(instance))).to_exit()
        else:  # systemd forgets a unit that ended well
            end = Exit(code=0) if record.started else Exit(reason="it was never started")
        return replace(listed, state=InstanceState.EXITED, exit=end)

    def _running(self, instance: str, record: Record) -> Instance:
        return Instance(
            instance_id=InstanceId(record.worker_id),
            key=record.key,
            slot=record.slot,
            worker_id=record.worker_id,
            state=InstanceState.RUNNING,
            spec_hash=record.spec_hash,
            started_at=record.started_at,
            external_id=self._names.unit(instance),
        )

    def _without_record(self, records: Mapping[str, Record], states: Mapping[str, ActiveState]) -> list[Instance]:
        """Units of the pool that run although their file was deleted: they are workers, and hold their slot."""
        found = []
        for unit, state in states.items():
            instance = self._names.instance_of(unit)
            place = self._names.parse(instance)
            if instance not in records and place is not None and state.is_alive:
                lost = Record(*place, WorkerId(instance), spec_hash="", generation="", started_at=0.0)
                stopping = InstanceState.STOPPING if state is ActiveState.STOPPING else InstanceState.RUNNING
                found.append(replace(self._running(instance, lost), state=stopping))
        return found

    async def _find(self, instance_id: InstanceId) -> str | None:
        """The instance name of a worker. A worker without a record has it as its id."""
        records = await self._in_thread(self._files.records)
        for instance, record in records.items():
            if InstanceId(record.worker_id) == instance_id:
                return instance
        return str(instance_id) if self._names.parse(instance_id) is not None and instance_id not in records else None

    # --- starting

    async def _take_slot(self, instance: str, record: Record, spec: WorkerSpec, units: SystemdUnits) -> None:
        unit = self._names.unit(instance)
        if (await self._state(unit, units)).is_alive:
            # Its record may have been deleted: the unit itself holds the slot then.
            raise SlotTakenError("A worker of this slot exists already.", key=spec.key, slot=spec.slot)
        text = environment_text(self._variables(spec))
        uri = spec.environment.amqp_uri
        if not await self._in_thread(lambda: self._files.create(instance, record, text, uri=uri)):
            raise SlotTakenError("A worker of this slot exists already.", key=spec.key, slot=spec.slot)

    def _variables(self, spec: WorkerSpec) -> dict[str, str]:
        variables = {
            "PYTHONUNBUFFERED": "1",  # so that the last lines of a killed worker are in the journal
            **self._options.environment,
            **spec.environment.to_variables(),
            "OSRDYNE_WORKER_APP": self.context.worker_app,
        }
        if not self.context.uri_in_environment:
            del variables[URI_VARIABLE]
            variables[URI_FILE_VARIABLE] = STANDARD_INPUT
        if not is_accepted(spec.key):
            variables.pop("WORKER_KEY", None)
            variables["WORKER_KEY_ESCAPED"] = encode_key(spec.key)
        return variables

    async def _start_unit(self, instance: str, record: Record, units: SystemdUnits) -> Instance:
        unit = self._names.unit(instance)
        try:
            if not await self._begin(unit, units):
                await self._raise_unless_it_ran(unit, record, units)
        except StartFailedError:
            await units.forget_failure(unit)
            # systemd could not run the program, so no worker has the slot.
            await self._in_thread(lambda: self._files.remove(instance, record.worker_id))
            raise
        await self._in_thread(lambda: self._files.mark_started(instance, record))
        return self._running(instance, record)

    async def _begin(self, unit: str, units: SystemdUnits) -> bool:
        """Start the unit. Raises `DriverUnavailableError` if that takes too long; a later listing shows the outcome."""
        try:
            async with asyncio.timeout(_START_PATIENCE):
                return await units.start(unit)
        except TimeoutError:
            message = f"systemd has not started {unit} yet: `systemctl list-jobs` shows what it waits for."
            raise DriverUnavailableError(message, unit=unit) from None

    async def _raise_unless_it_ran(self, unit: str, record: Record, units: SystemdUnits) -> None:
        """Raise `StartFailedError` if systemd could not run the program. A worker that ended at once has started."""
        if await self._state(unit, units) is not ActiveState.FAILED:
            return
        end: UnitEnd = await units.end_of(unit)
        if end.not_started is None:
            return
        lines = await self._journal.lines_of_systemd(unit, since=record.started_at)
        raise StartFailedError(
            f"systemd could not run the worker: {end.not_started}. Check the unit {self._options.template}@.service.",
            log_lines=lines,
        )

    # --- doctor

    async def _check_unit(self) -> Finding:
        example = self._names.unit(f"{self._names.prefix}check")
        try:
            unit = await self._systemctl.properties(example, PROPERTIES)
        except DriverError as error:
            return Finding("worker unit", ok=False, message=error.message, remedy="Is systemd running here?")
        template = f"{self._options.template}@.service"
        return judge_unit(unit, template=template, directory=self._files.path, stop_grace=self.context.stop_grace)

    async def _check_bus(self) -> Finding:
        try:
            units = await self._units()
            await units.states(self._names.pattern)
        except DriverError as error:
            return Finding("systemd", ok=False, message=error.message, remedy="Is systemd running here?")
        if units is self._dbus:
            return Finding("systemd", ok=True, message="systemd answers over D-Bus.")
        ok = self._options.bus is BusChoice.SYSTEMCTL
        remedy = None if ok else "Install dbus: without it, the driver polls the units every few seconds."
        return Finding("systemd", ok=ok, message="systemd answers through systemctl.", remedy=remedy, fatal=False)

    async def _check_directory(self) -> Finding:
        try:
            await self._in_thread(self._files.prepare)
        except DriverError as error:
            remedy = "Set RuntimeDirectory=osrdyne in the daemon's unit, or create it (mode 0700)."
            return Finding("environment files", ok=False, message=error.message, remedy=remedy)
        return Finding("environment files", ok=True, message=f"Environment files are written to {self._files.path}.")

    async def _check_journal(self) -> Finding:
        try:
            if await self._journal.is_readable():
                return Finding("journal", ok=True, message="The output of workers can be read.")
            message = "The output of workers cannot be read, so failures are reported without their last lines."
        except DriverError as error:
            message = error.message
        remedy = "Add the daemon's user to the group systemd-journal."
        return Finding("journal", ok=False, message=message, remedy=remedy, fatal=False)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)
