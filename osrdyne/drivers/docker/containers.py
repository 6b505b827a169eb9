"""The containers of one pool: creating, starting, reading, signalling and removing them, one blocking call each.

Used by the Docker driver, in its threads. The only state is when containers were first seen in the state `created`, to
detect interrupted starts. Id and labels of a container are checked before each command, so that containers of other
pools and users are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from docker.errors import APIError, ImageNotFound, NotFound

from osrdyne.aio.clock import Clock
from osrdyne.drivers.base import Exit, Instance, InstanceId, InstanceState, WorkerSpec
from osrdyne.drivers.docker.engine import Engine
from osrdyne.drivers.docker.labels import Identity, read_exit, read_instance
from osrdyne.drivers.docker.launch import explain, host_settings, refuse_loopback, start_error
from osrdyne.drivers.docker.options import DockerOptions
from osrdyne.drivers.docker.secret import URI_FILE, owner_of, secret_archive
from osrdyne.errors import DriverUnavailableError, SlotTakenError
from osrdyne.logs import get_logger, mask_uri

log = get_logger("drivers.docker")

_CONFLICT = 409
_START_CALLS = 3


class ImageMissingError(Exception):
    """The engine does not have the image, and the driver may pull it."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """A container of the pool as the engine reports it: `container_id` in full, and `state`, the `State` object."""

    container_id: str
    name: str
    labels: Mapping[str, str]
    state: Mapping[str, Any]

    @property
    def status(self) -> str:
        return str(self.state["Status"])

    @property
    def is_up(self) -> bool:
        return self.status in {"running", "paused", "restarting"}


class Containers:
    """The containers of one pool of one stack."""

    def __init__(
        self,
        engine: Engine,
        options: DockerOptions,
        identity: Identity,
        *,
        command: tuple[str, ...],
        spec_hash: str,
        uri_in_file: bool,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._options = options
        self._identity = identity
        self._command = command
        self._spec_hash = spec_hash
        self._uri_in_file = uri_in_file
        self._clock = clock
        self._created: dict[str, float] = {}
        self._foreign: set[str] = set()

    # --- reading

    def instances(self, stopping: frozenset[str]) -> list[Instance]:
        """All workers, in any state. `stopping`: the ids of containers that are being stopped."""
        wanted = {"label": self._identity.filters()}
        summaries = self._engine.call(lambda client: client.containers(all=True, filters=wanted))
        ours = {str(item["Id"]): item for item in summaries if self._is_ours(item)}
        self._report_foreign({str(item["Id"]) for item in summaries} - ours.keys())
        self._note_created({container_id for container_id, item in ours.items() if item["State"] == "created"})
        found = (self._read_summary(item, stopping) for item in ours.values())
        return [instance for instance in found if instance is not None]

    def find(self, instance_id: InstanceId) -> Inspected | None:
        """Inspect a container; None if it does not exist or does not belong to this pool."""
        try:
            inspected = self._engine.call(lambda client: client.inspect_container(instance_id))
        except NotFound:
            return None
        labels = inspected["Config"]["Labels"]
        # Checked at each call: the id may belong to a container of another pool.
        if not self._identity.owns(inspected["Name"], labels):
            return None
        return Inspected(container_id=inspected["Id"], name=inspected["Name"], labels=labels, state=inspected["State"])

    def find_started(self, instance_id: InstanceId) -> Inspected | None:
        """Inspect a container that is to be stopped. One that was created and not started is removed instead."""
        seen = self.find(instance_id)
        if seen is None or seen.status != "created":
            return seen
        # The engine removes it only if it does not run. If its start was faster, it is stopped like any other.
        self.discard(seen.container_id)
        return self.find(instance_id)

    def logs(self, container_id: str, *, lines: int) -> tuple[str, ...]:
        """The last lines; none if the log driver does not support reading."""
        try:
            output = self._engine.call(lambda client: client.logs(container_id, stdout=True, stderr=True, tail=lines))
        except APIError:
            return ()
        text = output.decode("utf-8", errors="replace")
        return tuple(mask_uri(line) for line in text.splitlines()[-lines:])

    # --- starting

    def start(self, spec: WorkerSpec, *, may_pull: bool) -> Instance:
        """Create and start the container of a slot. A container that cannot be started is removed.

        Raises `ImageMissingError` if the image is missing and may be pulled.
        """
        name = self._identity.container_name(spec.key, spec.slot)
        labels = self._identity.labels(spec, spec_hash=spec.spec_hash or self._spec_hash, started_at=self._clock.time())
        # Crash after it: the container stays in the state `created`, holds the name, and is listed as ended when its
        # start is overdue.
        container_id = self._create(spec, name, labels, may_pull=may_pull)
        try:
            if self._uri_in_file:
                self._put_uri(container_id, spec.environment.amqp_uri)
            self._engine.call(lambda client: client.start(container_id))
        except APIError as error:
            # Before it is removed, because the engine deletes the lines with the container.
            lines = self.logs(container_id, lines=50)
            self.discard(container_id)
            raise start_error(error, log_lines=lines) from error
        except DriverUnavailableError:
            self._created = {**self._created, container_id: -math.inf}  # its start is over
            raise
        instance = read_instance(container_id, name, labels, state=InstanceState.RUNNING)
        assert instance is not None
        return instance

    def _create(self, spec: WorkerSpec, name: str, labels: Mapping[str, str], *, may_pull: bool) -> str:
        options = self._options
        refuse_loopback(options, spec.environment.amqp_uri)
        try:
            created = self._engine.call(
                lambda client: client.create_container(
                    options.image,
                    command=list(self._command),
                    entrypoint=None if options.entrypoint is None else list(options.entrypoint),
                    name=name,
                    labels={**options.labels, **labels},
                    environment=self._variables(spec),
                    user=options.user,
                    stop_signal="SIGTERM",
                    host_config=client.create_host_config(**host_settings(options)),
                )
            )
        except ImageNotFound as error:
            if may_pull:
                raise ImageMissingError from error
            raise start_error(error) from error
        except APIError as error:
            if error.status_code == _CONFLICT:
                # The engine gives a name to one container only (lifecycle: unique-instance-names).
                raise SlotTakenError(f"A container {name} exists already.", container=name) from error
            raise start_error(error) from error
        return str(created["Id"])

    def _variables(self, spec: WorkerSpec) -> dict[str, str]:
        variables = spec.environment.to_variables()
        if self._uri_in_file:
            # `docker inspect` shows variables for as long as the container exists. The worker deletes the file.
            del variables["WORKER_AMQP_URI"]
            variables["WORKER_AMQP_URI_FILE"] = URI_FILE
        return {"PYTHONUNBUFFERED": "1", **self._options.environment, **variables}

    def _put_uri(self, container_id: str, uri: str) -> None:
        owner = owner_of(self._engine, container_id)
        archive = secret_archive(uri, owner=owner)
        self._engine.call(lambda client: client.put_archive(container_id, "/", archive))

    # --- ending

    def signal(self, container_id: str, name: str) -> None:
        """Send a signal. No-op if the container has ended or does not exist."""
        try:
            self._engine.call(lambda client: client.kill(container_id, signal=name))
        except APIError as error:
            if error.status_code not in {404, _CONFLICT}:
                raise DriverUnavailableError(
                    f"{name} could not be sent to the container {container_id[:12]}: {explain(error)}."
                ) from error

    def remove(self, instance_id: InstanceId) -> None:
        """Remove a container that has ended."""
        seen = self.find(instance_id)
        if seen is not None and not seen.is_up and not self._is_being_started(seen.container_id, seen.status):
            self.discard(seen.container_id)

    def discard(self, container_id: str) -> None:
        """Remove a container that does not run; the engine refuses to remove a running one."""
        try:
            # Never by force: a container that was started meanwhile may hold requests.
            self._engine.call(lambda client: client.remove_container(container_id, v=True, force=False))
        except APIError as error:
            if error.status_code not in {404, _CONFLICT}:
                raise DriverUnavailableError(
                    f"The container {container_id[:12]} could not be removed: {explain(error)}."
                ) from error

    # --- interpreting a listing

    def _is_ours(self, item: Mapping[str, Any]) -> bool:
        return any(self._identity.owns(name, item["Labels"]) for name in item["Names"] or ())

    def _report_foreign(self, ids: set[str]) -> None:
        """Log each container once that has labels of the pool and another name."""
        for container_id in sorted(ids - self._foreign):
            log.warning("foreign container with osrdyne labels", container=container_id[:12])
        self._foreign = ids

    def _read_summary(self, item: Mapping[str, Any], stopping: frozenset[str]) -> Instance | None:
        container_id, status = str(item["Id"]), str(item["State"])
        labels = item["Labels"]
        name = next(name for name in item["Names"] if self._identity.owns(name, labels))
        if status in {"exited", "dead", "removing"}:
            return self._read_ended(container_id)
        if status == "created" and not self._is_being_started(container_id, status):
            return self._read_ended(container_id)
        state = InstanceState.STOPPING if container_id in stopping else InstanceState.RUNNING
        return read_instance(container_id, name, labels, state=state)

    def _read_ended(self, container_id: str) -> Instance | None:
        seen = self.find(InstanceId(container_id))
        if seen is None:
            return None
        exit = read_exit(seen.state)
        if seen.status == "created":
            exit = Exit(reason="its start was interrupted")
        return read_instance(seen.container_id, seen.name, seen.labels, state=InstanceState.EXITED, exit=exit)

    def _note_created(self, created: set[str]) -> None:
        self._created = {item: self._created.get(item, self._clock.monotonic()) for item in created}

    def _is_being_started(self, container_id: str, status: str) -> bool:
        """Whether a created container may still be started. One that stays in this state for longer than a start takes
        was left by a controller that died."""
        since = self._created.get(container_id)
        return status == "created" and (
            since is None or self._clock.monotonic() - since < _START_CALLS * self._options.timeout
        )
