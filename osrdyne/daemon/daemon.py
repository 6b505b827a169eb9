"""The daemon: builds the objects that outlive a term, serves the API, and leads one term after the other.

Losing the broker or the token ends a term: the daemon discards all state of the term and becomes a standby again
(lifecycle: term-ends-whole). The process, its configuration, the driver and the running workers survive. The objects of
a term are built in `daemon.wiring`. Called by the CLI.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING

import uvloop

from osrdyne import __version__
from osrdyne.aio.clock import Backoff, Clock, SystemClock
from osrdyne.aio.tasks import start_endless
from osrdyne.api.access.authenticators import authenticators_of
from osrdyne.api.server import ApiServer
from osrdyne.api.unix_socket import open_listener
from osrdyne.broker.leadership.token import Token
from osrdyne.broker.management.client import ManagementClient
from osrdyne.broker.management.credentials import REMEDY, administrator_of_workers, describe_administrator
from osrdyne.broker.queues.quarantine import Quarantine
from osrdyne.broker.session import LeaderSession
from osrdyne.config.models import Settings
from osrdyne.daemon.inspector import DaemonInspector, DaemonState
from osrdyne.daemon.leader_address import LeaderAddress
from osrdyne.daemon.term import StopRequest, Term
from osrdyne.daemon.wiring import Resources
from osrdyne.drivers.base import Driver
from osrdyne.drivers.registry import create_pool_driver, environment_warning
from osrdyne.errors import (
    BrokerError,
    BrokerUnavailableError,
    ManagementUnavailableError,
    OsrdyneError,
    PoolConflictError,
)
from osrdyne.logs import Logger, get_logger
from osrdyne.metrics import Metrics
from osrdyne.pool.context import TermContext
from osrdyne.pool.state.groups.admission import KeyCounter
from osrdyne.pool.state.groups.pins import PinStore
from osrdyne.pool.workers.key_check import load_key_test
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.telemetry.last_values.query import LastValues

if TYPE_CHECKING:
    from starlette.types import ASGIApp

# Seconds for which the API waits until the daemon leads: its libraries are loaded after that, so that no request for a
# worker waits for them.
API_DELAY = 1.0


def run(settings: Settings, *, stop_workers: bool = False) -> None:
    """Run a daemon until SIGTERM or SIGINT.

    Raises `ConfigurationError` or `PortTakenError` when it cannot start. Later it waits while RabbitMQ is unavailable.
    """
    uvloop.run(_run_until_signal(settings, stop_workers=stop_workers))


async def _run_until_signal(settings: Settings, *, stop_workers: bool) -> None:
    stop = StopRequest(asyncio.Event(), stop_workers)
    loop = asyncio.get_running_loop()

    def end() -> None:
        notify_service_manager(Service.STOPPING)
        stop.requested.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    await Daemon(settings, clock=SystemClock()).serve(stop)


class Daemon:
    """One daemon of one pool."""

    def __init__(self, settings: Settings, *, clock: Clock) -> None:
        # Before anything else: it may refuse to start.
        self._authenticators, self._warnings = authenticators_of(settings.api, clock=clock)
        load_key_test(settings.worker.key_exists)
        self._settings = settings
        self._clock = clock
        self._metrics = Metrics()
        self._state = DaemonState()
        self._quarantine = Quarantine(clock)
        self._key_counter = KeyCounter(settings.lifecycle.max_distinct_keys)
        self._driver: Driver = create_pool_driver(settings, clock=clock)
        self._management = ManagementClient(settings.broker, clock=clock)
        self._pins = PinStore(self._management, pool=settings.pool.id, configured=settings.pool.pinned_keys)
        self._leader = LeaderAddress(self._management, pool=settings.pool.id, own=lambda: self.api.announced_url)
        self._backoff = Backoff(initial=0.2, maximum=settings.broker.retry_interval)
        self._last_values = LastValues(settings)
        self._inspector = DaemonInspector(
            pool=settings.pool.id,
            state=self._state,
            driver=self._driver,
            management=self._management,
            pins=self._pins,
            leader=self._leader,
            prices=settings.prices.by_tier(),
            clock=clock,
            last_values=self._last_values,
        )
        self.api = ApiServer(
            self._create_app, settings.api, open_local=lambda: open_listener(settings), make_probes=self._create_probes
        )
        self._leading = asyncio.Event()
        self._log: Logger = get_logger("daemon", pool=settings.pool.id)

    def _create_app(self) -> ASGIApp:
        """The application of the API, with FastAPI, which takes a part of a second to import."""
        from osrdyne.api.access.checks import Access
        from osrdyne.api.access.guard import hosts_of
        from osrdyne.api.app import create_app
        from osrdyne.api.bodies import BodyLimits

        api = self._settings.api
        return create_app(
            self._inspector,
            self._metrics,
            version=__version__,
            allowed_hosts=hosts_of(api.host, api.allowed_hosts),
            access=Access(self._authenticators),
            limits=BodyLimits(api.max_body, api.max_manifest, api.body_timeout),
            audit_required=self._settings.audit.required,
            clock=self._clock,
            circuits_path=api.circuits_path,
        )

    def _create_probes(self) -> ASGIApp:
        from osrdyne.api.probes import create_probes

        return create_probes(self._inspector)

    async def _serve_api(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(API_DELAY):
                await self._leading.wait()
        await self.api.run()

    async def serve(self, stop: StopRequest) -> None:
        """Run until `stop` is requested, then end in order."""
        # Before anything connects: a port that is taken must end the daemon, and not its first term.
        self.api.bind()
        _raise_file_limit()
        self._log.info("daemon starting", version=__version__, driver=self._driver.name)
        if (warning := environment_warning(self._settings, manages_workers=self._driver.manages_workers)) is not None:
            self._state.note("worker environment", ok=False, fatal=False, detail=warning)
            self._log.warning("worker environment not recommended", reason=warning)
        for exposure in self._warnings:
            self._log.warning("the API is exposed", reason=exposure)
        try:
            async with asyncio.TaskGroup() as group:
                api = start_endless(group, "http api", self._serve_api())
                notify_service_manager(Service.READY)  # also as a standby, and without a broker
                await self._lead_until(stop)
                api.cancel()
        finally:
            self.api.close()
            await self._last_values.close()
            await self._management.close()
            await self._driver.close()
        self._log.info("daemon stopped")

    @property
    def term(self) -> Term | None:
        """The term that this daemon leads; None while another leads."""
        return self._state.term

    async def wait_leading(self) -> None:
        """Wait until this daemon leads its pool for the first time."""
        await self._leading.wait()

    async def replace_workers(self) -> None:
        """Replace all workers, one at a time in each group: their application has changed (`osrdyne dev`)."""
        # First: the next term, if this one ends now, computes its hashes with it.
        self._driver.context.revision.number += 1
        if self._state.term is not None:
            await self._state.term.routing.profiles.replace_workers()

    async def _lead_until(self, stop: StopRequest) -> None:
        """Lead one term after the other, with a growing pause after each that failed."""
        failures, ended_in_order = 0, False
        while not stop.requested.is_set():
            began = self._clock.monotonic()
            try:
                ended_in_order = await self._one_term(stop)
            except BaseExceptionGroup as failure:
                self._report(failure)
            except Exception as error:  # also an unexpected one: the next term may succeed
                self._report(BaseExceptionGroup("term", [error]))
            finally:
                if self._state.term is not None:
                    self._state.note("leadership", ok=False, detail="this daemon's last term has ended")
                # After every end: the API must not answer from the state of a term that is over.
                self._state.term = self._state.session = None
                self._metrics.leading.set(0)
                self._metrics.term.set(0)
            # After a term that lasted, the next failure counts as the first one.
            if self._clock.monotonic() - began > self._settings.broker.retry_interval:
                failures = 0
            failures += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(self._backoff.delay(failures)):
                    await stop.requested.wait()
        if stop.stop_workers and not ended_in_order:
            self._log.warning("workers not stopped: this daemon did not lead")

    async def _one_term(self, stop: StopRequest) -> bool:
        """Connect, wait for the token, lead. True if the term ended in order; raises when leadership is lost."""
        # Known before it connects: an alarm may hold it up.
        session = self._state.session = LeaderSession(
            self._settings,
            clock=self._clock,
            quarantine=self._quarantine,
            last_term=self._leader.last_term,
            on_forged=self._metrics.forged_messages.labels(queue="leader").inc,
        )
        async with session:
            self._state.note("broker", ok=True, detail=f"connected, RabbitMQ {session.version}")
            self._state.note("leadership", ok=True, detail="standby: another daemon leads, or the token is on its way")
            # In a task: a standby may wait for the token for months, and must end at once when it is stopped.
            acquiring = asyncio.ensure_future(session.acquire(accept=self._refuse_foreign_host))
            stopping = asyncio.ensure_future(stop.requested.wait())
            try:
                await asyncio.wait({acquiring, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not acquiring.done():
                    return False
                _, token = acquiring.result()
            finally:
                acquiring.cancel()
                stopping.cancel()
            term = Term(
                Resources(
                    context=TermContext(session.names, self._settings, self._clock, self._metrics),
                    session=session,
                    token=token,
                    driver=self._driver,
                    management=self._management,
                    open_pool=lambda: self._open_pool(token),
                    unpin=self._pins.remove,
                    parameters=(self._pins, self._leader),
                    key_counter=self._key_counter,
                    measures_lag=True,
                    verifier=self._authenticators if self._authenticators.verifies_tokens else None,
                )
            )
            await term.run(stop, on_leading=lambda: self._note_leading(term), on_delay=self._note_delay)
            return True

    async def _open_pool(self, token: Token) -> list[Key]:
        pinned, *_ = await asyncio.gather(
            self._pins.load(),
            # A later leader reads from the announcement that the pool was led before (lifecycle: token-queue).
            self._leader.announce(term=token.term),
            self._note_rights_of_workers(),
        )
        return pinned

    def _note_delay(self, error: ManagementUnavailableError) -> None:
        self._state.note("management", ok=False, detail=error.message)

    async def _note_rights_of_workers(self) -> None:
        """Warn if every worker gets the credentials of an administrator."""
        name = "worker credentials"
        if self._settings.broker.scoped_credentials and self._driver.manages_workers:
            return
        try:
            user = await administrator_of_workers(self._settings.broker, clock=self._clock)
        except BrokerError as error:
            self._log.debug("permissions of the worker user unknown", error=str(error))
            return
        if user is None:
            self._state.components.pop(name, None)
        elif name not in self._state.components:
            self._state.note(name, ok=False, fatal=False, detail=f"{describe_administrator(user)} {REMEDY}")
            self._log.warning("workers have the credentials of an administrator", user=user, remedy=REMEDY)

    def _refuse_foreign_host(self, previous: Token) -> None:
        """Refuse to lead on another host than before if the driver lists only workers of its own host: two workers of a
        key would run (decision 0008). Raises `PoolConflictError`."""
        if self._driver.same_host and previous.host not in {"", socket.gethostname()}:
            raise PoolConflictError(
                f"The pool {self._settings.pool.id} was last led on {previous.host}, and its driver "
                f"{self._driver.name!r} sees workers of its own host only. Run the daemon there, or delete the queue "
                f"{PoolNames(self._settings.pool.id).leader_queue} once no worker runs there."
            )

    def _note_leading(self, term: Term) -> None:
        self._state.term = term
        self._leading.set()
        self._metrics.leading.set(1)
        self._metrics.term.set(term.state.tracker.generation.term)
        self._state.note("leadership", ok=True, detail=f"leading in term {term.state.tracker.generation.term}")
        self._state.note("management", ok=True, detail="the HTTP API answers")
        self._state.note("driver", ok=True, detail=f"{self._driver.name} answers")

    def _report(self, failure: BaseExceptionGroup[BaseException]) -> None:
        """Log why a term ended: an expected error as one warning, an unexpected one with its traceback."""
        self._metrics.terms_lost.inc()
        reasons = list(_leaves(failure))
        expected = main_reason(reasons)
        if expected is not None:
            component = "broker" if isinstance(expected, BrokerError) else "leadership"
            self._state.note(component, ok=False, detail=str(expected))
            self._log.warning("term ended", error=str(expected))
        for error in reasons:
            if not isinstance(error, OsrdyneError | asyncio.CancelledError):
                self._log.error("term ended by an unexpected error", exc_info=error)
        if any(isinstance(error, KeyboardInterrupt | SystemExit) for error in reasons):
            raise failure


def main_reason(errors: Sequence[BaseException]) -> OsrdyneError | None:
    """The most specific expected error; None without one. A lost connection also ends every consumer on it."""
    expected = [error for error in errors if isinstance(error, OsrdyneError)]
    specific = [error for error in expected if not isinstance(error, BrokerUnavailableError)]
    return next(iter([*specific, *expected]), None)


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit: the subprocess driver needs one for each worker."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


_NOTIFY_TIMEOUT = 1.0


class Service(StrEnum):
    """The states that systemd reads from a unit with `Type=notify`."""

    READY = "READY=1"
    STOPPING = "STOPPING=1"


def notify_service_manager(state: Service, environment: Mapping[str, str] = os.environ) -> None:
    """Send a state to the service manager, if `NOTIFY_SOCKET` names one. Never fails. Source: sd_notify(3)."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # the abstract name space
        address = f"\0{address[1:]}"
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(_NOTIFY_TIMEOUT)
        manager.sendto(state.encode(), address)
