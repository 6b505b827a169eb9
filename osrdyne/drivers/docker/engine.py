"""The connection to one Docker engine: the SDK's client, created at the first call and again after a failure.

Blocking; called from the threads of the Docker driver. If the engine does not answer, the errors of the SDK are
translated to `DriverUnavailableError`; a refusal of the engine (`APIError`) is raised unchanged.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env
from urllib3.exceptions import HTTPError

from osrdyne.drivers.docker.options import DockerOptions
from osrdyne.errors import DriverUnavailableError

T = TypeVar("T")

THREADS = 8  # Calls of the engine at once.
LOCAL_SOCKET = "unix:///var/run/docker.sock"

_UNAVAILABLE = frozenset({502, 503, 504})  # from a proxy in front of the engine, or an engine that is shutting down
_REMEDIES = {
    errno.EACCES: "Let the daemon's user use the socket, for instance by its group (usermod -aG docker USER, or "
    "group_add in a container).",
    errno.ENOENT: "Is the engine installed and running? In a container, mount its socket; elsewhere set "
    "driver.options.host.",
    errno.ECONNREFUSED: "Is the engine running there? Else set driver.options.host.",
}


class _Client(docker.APIClient):  # type: ignore[misc]
    """The SDK's client with a time-out for every request: the SDK sets none for pulls and for the stream of events."""

    def request(self, *arguments: Any, **keywords: Any) -> Any:
        return super().request(*arguments, **{**keywords, "timeout": keywords.get("timeout") or self.timeout})


class Engine:
    """One engine. `timeout`: the limit of one call in seconds, or between two chunks of a stream."""

    def __init__(self, options: DockerOptions, *, timeout: float) -> None:
        self._options = options
        self._timeout = timeout
        self._lock = threading.Lock()
        self._client: _Client | None = None

    def call(self, function: Callable[[Any], T]) -> T:
        """Call a function with the client. Raises `DriverUnavailableError` if the engine does not answer, and
        `APIError` with its message if it refuses."""
        client: _Client | None = None
        try:
            client = self._connected()
            return function(client)
        except APIError as error:
            if error.status_code in _UNAVAILABLE:
                raise self._unavailable(error) from error
            raise
        except (DockerException, requests.RequestException, HTTPError, OSError) as error:
            self._forget(client)
            raise self._unavailable(error) from error

    def close(self) -> None:
        self._forget(self._client)

    def _connected(self) -> _Client:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> _Client:
        where = connection(self._options)
        _try_local_socket(str(where["base_url"]), timeout=self._timeout)
        client = _Client(**where, version="auto", timeout=self._timeout, max_pool_size=THREADS)
        if self._options.registry_config_file is not None:
            client.reload_config(self._options.registry_config_file)
        return client

    def _forget(self, client: _Client | None) -> None:
        """Close a client. The next call connects again, and negotiates the version again after an upgrade."""
        with self._lock:
            if client is not None and client is self._client:
                self._client = None
        if client is not None:
            client.close()

    def _unavailable(self, error: Exception) -> DriverUnavailableError:
        cause = root_cause(error)
        remedy = _REMEDIES.get(cause.errno or 0, "") if isinstance(cause, OSError) else ""
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
        address = engine_address(self._options)
        message = f"The Docker engine at {address} does not answer: {reason.rstrip('.')}."
        return DriverUnavailableError(f"{message} {remedy}".rstrip())


def _try_local_socket(address: str, *, timeout: float) -> None:
    """Connect to a local socket and close it. It raises the error of the system; the SDK would leave a socket open."""
    scheme, _, path = address.partition("://")
    if scheme.endswith("unix"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect("/" + path.lstrip("/"))


def connection(options: DockerOptions) -> dict[str, Any]:
    """The arguments of the SDK's client for the address and TLS of the engine."""
    if options.host is None:
        return {"base_url": LOCAL_SOCKET, **kwargs_from_env()}
    if options.tls_directory is None:
        return {"base_url": options.host}
    directory = Path(options.tls_directory)
    certificate, key, authority = (str(directory / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    tls = docker.tls.TLSConfig(client_cert=(certificate, key), ca_cert=authority, verify=True)
    return {"base_url": options.host, "tls": tls}


def engine_address(options: DockerOptions) -> str:
    """The address of the engine. Reads no certificates, because a driver is built without I/O."""
    return options.host or os.environ.get("DOCKER_HOST") or LOCAL_SOCKET


def is_local(options: DockerOptions) -> bool:
    """Whether the engine has a socket on this host, so that its containers run here."""
    return engine_address(options).startswith(("unix:", "http+unix:"))


def root_cause(error: BaseException) -> BaseException:
    """The error of the operating system behind a failed connection; the SDK, requests and urllib3 each wrap it."""
    seen: BaseException = error
    for _ in range(10):
        inner = seen.__cause__ or seen.__context__ or next((a for a in seen.args if isinstance(a, BaseException)), None)
        if (isinstance(seen, OSError) and seen.errno) or inner is None:
            return seen
        seen = inner
    return seen
