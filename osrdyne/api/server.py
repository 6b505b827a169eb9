"""Serve the API in the daemon, on sockets of its own.

The daemon binds first (a port in use ends the start with one sentence), then runs `ApiServer.run` in its TaskGroup;
cancelling it is the graceful stop. `run` loads the application and uvicorn in a thread, which takes a part of a second.
Earlier requests wait in the socket.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from osrdyne.api.unix_socket import UnixListener
from osrdyne.config.models import ApiSettings, ApiTlsSettings
from osrdyne.errors import ConfigurationError, PortTakenError
from osrdyne.logs import get_logger

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from osrdyne.api.uvicorn_server import QuietServer

RENEWAL_INTERVAL = 10.0
"""Seconds between two checks whether the certificate was renewed."""

_LOADING = threading.Lock()
"""FastAPI suppresses a warning of pydantic while it reads the routes, and `warnings.catch_warnings` is not thread-safe.
Several daemons may run in one process, as in a demo."""

log = get_logger("api")


class ApiServer:
    """The listeners of one API: TCP, a Unix socket if `open_local` returns one, and one for probes if the settings name
    its port. Each has limits of its own, so that requests from the network exclude neither those of this host nor
    probes."""

    def __init__(
        self,
        make_app: Callable[[], ASGIApp],
        settings: ApiSettings,
        *,
        open_local: Callable[[], UnixListener | None] | None = None,
        make_probes: Callable[[], ASGIApp] | None = None,
    ) -> None:
        """`make_app` and `make_probes`, the application of the socket for probes, are called in a thread."""
        self._make_app = make_app
        self._make_probes = make_probes
        self._probes: socket.socket | None = None
        self._settings = settings
        self._open_local = open_local
        self._local: UnixListener | None = None
        self._socket: socket.socket | None = None
        self._certificate: tuple[object, ...] = ()

    def bind(self) -> None:
        """Bind port and path. Raises `PortTakenError` or `ConfigurationError`; a second call does nothing."""
        if self._socket is not None:
            return
        self._certificate = _version_of(self._settings.tls)
        _check_certificate(self._settings.tls)
        self._socket = bind_socket(self._settings.host, self._settings.port)
        if self._settings.probe_port is not None and self._make_probes is not None:
            self._probes = bind_socket(self._settings.host, self._settings.probe_port, setting="api.probe_port")
        if self._open_local is not None:
            self._local = self._open_local()

    @property
    def local_path(self) -> Path | None:
        """The file of the Unix socket, if there is one. Only after `bind`."""
        return None if self._local is None else self._local.path

    @property
    def port(self) -> int:
        """The port, also if the setting is 0. Only after `bind`."""
        assert self._socket is not None, "bind() first"
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def probe_port(self) -> int | None:
        """The port for probes, if there is one. Only after `bind`."""
        return None if self._probes is None else int(self._probes.getsockname()[1])

    @property
    def url(self) -> str:
        """The URL of the API on this host. Only after `bind`."""
        host = self._settings.host
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # nosec B104
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def announced_url(self) -> str:
        """The URL of the API for other hosts if it listens for them, otherwise for this host. Only after `bind`."""
        if self._settings.host in {"0.0.0.0", "::", ""}:  # nosec B104
            return f"{self._scheme}://{socket.gethostname()}:{self.port}"
        return self.url

    @property
    def _scheme(self) -> str:
        return "http" if self._settings.tls.certificate_file is None else "https"

    async def run(self) -> None:
        """Serve until cancelled, then wait a few seconds at most for requests in progress."""
        self.bind()
        assert self._socket is not None
        servers = await asyncio.to_thread(self._load)
        log.info(
            "api listening",
            url=self.url,
            socket=None if self._local is None else str(self._local.path),
            probes=self.probe_port,
        )
        serving = [
            asyncio.create_task(server.serve(sockets=[listener]), name=f"uvicorn, {name}")
            for name, (server, listener) in servers.items()
        ]
        server, _ = servers["network"]
        renewing = asyncio.create_task(self._renew_certificate(server), name="certificate of the API")
        try:
            await asyncio.shield(asyncio.gather(*serving))
        finally:
            renewing.cancel()
            for one, _ in servers.values():
                one.stop()
            await asyncio.gather(*serving)
            self.close()

    async def _renew_certificate(self, server: QuietServer) -> None:
        """Use a renewed certificate for new connections. An unusable one is logged once, and the old one stays."""
        tls, failed = self._settings.tls, None
        if tls.certificate_file is None:
            return
        while True:
            await asyncio.sleep(RENEWAL_INTERVAL)
            version = await asyncio.to_thread(_version_of, tls)
            # Without a context uvicorn has not started yet: it will read the files itself.
            if version == self._certificate or server.config.ssl is None:
                continue
            try:
                # In another context first: a certificate without its key would break the one in use.
                await asyncio.to_thread(_check_certificate, tls)
                server.config.ssl.load_cert_chain(tls.certificate_file, tls.key_file, password=lambda: "")
            except (ConfigurationError, OSError) as error:
                if version != failed:
                    log.error("renewed certificate unusable, the former one stays", error=str(error))
                failed = version
                continue
            self._certificate = version
            log.info("certificate renewed", certificate=tls.certificate_file)

    def _load(self) -> dict[str, tuple[QuietServer, socket.socket]]:
        """The servers with their sockets, by name; the one of the network is always among them."""
        from osrdyne.api.uvicorn_server import local_server, network_server, probe_server

        assert self._socket is not None
        with _LOADING:
            app = self._make_app()
        servers = {"network": (network_server(app, self._settings), self._socket)}
        if self._local is not None:
            servers["local"] = local_server(app, self._settings), self._local.socket
        if self._probes is not None and self._make_probes is not None:
            servers["probes"] = probe_server(self._make_probes(), self._settings), self._probes
        return servers

    def close(self) -> None:
        """Release ports and path; for a server that was bound and never ran."""
        if self._probes is not None:
            self._probes.close()
            self._probes = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._local is not None:
            self._local.close()
            self._local = None


def _version_of(tls: ApiTlsSettings) -> tuple[object, ...]:
    """The version of the two files; it changes with either of them."""
    return tuple(_file_version(path) for path in (tls.certificate_file, tls.key_file) if path is not None)


def _file_version(path: str) -> tuple[int, ...] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _check_certificate(tls: ApiTlsSettings) -> None:
    """Load certificate and key. Raises `ConfigurationError`, also for a key with a passphrase."""
    if tls.certificate_file is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate_file, tls.key_file, password=lambda: "")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigurationError(
            f"api.tls: cannot use the certificate {tls.certificate_file} with the key {tls.key_file}: "
            f"{getattr(error, 'strerror', None) or getattr(error, 'reason', None) or error}."
        ) from error


def bind_socket(host: str, port: int, *, setting: str = "api.port") -> socket.socket:
    """A listening socket. `setting`: the one that has the port.

    Raises `PortTakenError` if the port is in use, and `ConfigurationError` for an address of another host or a port
    that needs privileges.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigurationError(f"api.host: {host!r} is not an address of this host.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # With SO_REUSEADDR two sockets can bind; only `listen` fails if the port is in use.
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port, setting) from error
    return listener


def _bind_error(error: OSError, host: str, port: int, setting: str) -> PortTakenError | ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            f"Port {port} on {host} is in use by another process: stop it, or set {setting} to another (0: any free).",
            host=host,
            port=port,
        )
    if error.errno == errno.EACCES:
        return ConfigurationError(f"{setting}: this user may not listen on port {port}; use one above 1023.")
    return ConfigurationError(f"api.host: cannot listen on {host!r} port {port}: {error.strerror}.")
