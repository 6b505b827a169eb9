"""The connection to one Docker engine: the SDK's client, created at the first call and again after a failure.

Blocking; called from the threads of the Docker driver. It translates what the SDK raises when the engine does not
answer; an answer of the engine, also a refusal (`APIError`), goes to the caller. Knows nothing of workers.
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

_UNAVAILABLE = frozenset({502, 503, 504})  # from a proxy before the engine, or an engine that ends
_REMEDIES = {
    errno.EACCES: "Let the daemon's user use the socket, for instance by its group (usermod -aG docker USER, or "
    "group_add in a container).",
    errno.ENOENT: "Is the engine installed and running? In a container, mount its socket; elsewhere set "
    "driver.options.host.",
    errno.ECONNREFUSED: "Is the engine running there? Else set driver.options.host.",
}


class _Client(docker.APIClient):  # type: ignore[misc]
    """The SDK's client, whose every call has a time-out: it gives none to pulls and to the stream of events."""

    def request(self, *arguments: Any, **keywords: Any) -> Any:
        return super().request(*arguments, **{**keywords, "timeout": keywords.get("timeout") or self.timeout})


class Engine:
    """One engine, with one limit for each call (for a stream: the longest silence in it)."""

    def __init__(self, options: DockerOptions, *, timeout: float) -> None:
        self._options = options
        self._timeout = timeout
        self._lock = threading.Lock()
        self._client: _Client | None = None

    def call(self, function: Callable[[Any], T]) -> T:
        """Give the client to the function. Raises `DriverUnavailableError` when the engine does not answer, and
        `APIError` with what it says when it refuses."""
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
        _knock(str(where["base_url"]), timeout=self._timeout)
        client = _Client(**where, version="auto", timeout=self._timeout, max_pool_size=THREADS)
        if self._options.registry_config_file is not None:
            client.reload_config(self._options.registry_config_file)
        return client

    def _forget(self, client: _Client | None) -> None:
        """The next call connects again and asks for the version again: the engine may have been upgraded."""
        with self._lock:
            if client is not None and client is self._client:
                self._client = None
        if client is not None:
            client.close()

    def _unavailable(self, error: Exception) -> DriverUnavailableError:
        cause = root_cause(error)
        remedy = _REMEDIES.get(cause.errno or 0, "") if isinstance(cause, OSError) else ""
        said = (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
        address = engine_address(self._options)
        message = f"The Docker engine at {address} does not answer: {said.rstrip('.')}."
        return DriverUnavailableError(f"{message} {remedy}".rstrip())


def _knock(address: str, *, timeout: float) -> None:
    """Connect to a local socket, to hear from the system what is wrong; the SDK would also leave a socket open."""
    scheme, _, path = address.partition("://")
    if scheme.endswith("unix"):
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(timeout)
            door.connect("/" + path.lstrip("/"))


def connection(options: DockerOptions) -> dict[str, Any]:
    """Where the engine is, as the SDK's client expects it."""
    if options.host is None:
        return {"base_url": LOCAL_SOCKET, **kwargs_from_env()}
    if options.tls_directory is None:
        return {"base_url": options.host}
    directory = Path(options.tls_directory)
    certificate, key, authority = (str(directory / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    tls = docker.tls.TLSConfig(client_cert=(certificate, key), ca_cert=authority, verify=True)
    return {"base_url": options.host, "tls": tls}


def engine_address(options: DockerOptions) -> str:
    """Looks at no certificates, which may be missing: a driver is made without I/O."""
    return options.host or os.environ.get("DOCKER_HOST") or LOCAL_SOCKET


def is_local(options: DockerOptions) -> bool:
    """Whether the engine is reached through a socket of this host, so that its containers are here."""
    return engine_address(options).startswith(("unix:", "http+unix:"))


def root_cause(error: BaseException) -> BaseException:
    """The operating system's word on a failed connection, which the SDK, requests and urllib3 each wrap once."""
    seen: BaseException = error
    for _ in range(10):
        inner = seen.__cause__ or seen.__context__ or next((a for a in seen.args if isinstance(a, BaseException)), None)
        if (isinstance(seen, OSError) and seen.errno) or inner is None:
            return seen
        seen = inner
    return seen
