"""The settings of a container from the options, and the errors of starts that the engine refuses. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from docker.errors import APIError

from osrdyne.drivers.docker.options import HOST_NETWORK, DockerOptions
from osrdyne.errors import DriverError, DriverUnavailableError, StartFailedError
from osrdyne.logs import mask_uri

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_REMEDIES = (
    (re.compile(r"no such image", re.I), "Pull or build it, or correct driver.options.image."),
    (re.compile(r"executable file not found|exec: ", re.I), "Check driver.options.command."),
    (re.compile(r"network .* not found", re.I), "Check driver.options.network."),
    (re.compile(r"unable to find user|no matching entries in passwd", re.I), "Check driver.options.user."),
    (re.compile(r"mount|bind source path|volume", re.I), "Check driver.options.mounts."),
    (re.compile(r"logger|logging|log driver|log opt", re.I), "Check driver.options.log_driver and log_options."),
)  # fmt: skip


def host_settings(options: DockerOptions) -> dict[str, Any]:
    """The host configuration of a container, as arguments of the SDK."""
    return {
        "network_mode": options.network,
        "extra_hosts": options.extra_hosts or None,
        "nano_cpus": None if options.cpus is None else round(options.cpus * 1e9),
        "mem_limit": options.memory,
        "memswap_limit": options.memory,
        "init": options.init,
        "log_config": {"Type": options.log_driver, "Config": options.log_options},
        "mounts": [
            {
                "Type": "bind" if mount.source.startswith("/") else "volume",
                "Source": mount.source,
                "Target": mount.target,
                "ReadOnly": mount.read_only,
            }
            for mount in options.mounts
        ],
        "security_opt": ["no-new-privileges"],
    }


def shape(options: DockerOptions, command: tuple[str, ...], config: Mapping[str, object]) -> dict[str, object]:
    """All settings that affect a worker, for the specification hash; those of the connection to the engine do not."""
    names = {
        "image", "entrypoint", "environment", "mounts", "network", "extra_hosts", "cpus", "memory", "user", "init",
        "labels", "broker_uri", "log_driver", "log_options",
    }  # fmt: skip
    return {**options.model_dump(mode="json", include=names), "command": command, "config": config}


def refuse_loopback(options: DockerOptions, amqp_uri: str) -> None:
    """Raise `StartFailedError` if the broker is on `localhost`, which a worker in its own network cannot reach."""
    network = options.network or ""
    host = urlsplit(amqp_uri).hostname or "localhost"
    if network != HOST_NETWORK and not network.startswith("container:") and host in _LOOPBACK:
        raise StartFailedError(
            f"The broker's address is {host}, which in a container is the container itself. "
            "Set broker.worker_uri to the address of the broker as seen by workers, or driver.options.network to host."
        )


def start_error(error: APIError, *, log_lines: tuple[str, ...] = ()) -> DriverError:
    """The error of a start that the engine refused, with a remedy if an option is the cause."""
    reason = explain(error)
    if error.status_code == 404 and "no such container" in reason.lower():
        return DriverUnavailableError("The container was removed while it was being started.")
    if "shutting down" in reason.lower():
        return DriverUnavailableError("The Docker engine is being stopped.")
    remedy = next((text for pattern, text in _REMEDIES if pattern.search(reason)), "")
    return StartFailedError(f"The container could not be started: {reason}. {remedy}".rstrip(), log_lines=log_lines)


def explain(error: APIError) -> str:
    """The message of the engine in one line, without the final dot."""
    text = error.explanation or error
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    return mask_uri(" ".join(str(text).split())).rstrip(".")
