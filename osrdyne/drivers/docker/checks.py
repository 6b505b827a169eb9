"""The checks of the Docker driver for `osrdyne doctor`: engine, image, network, registry file, broker's address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound

from osrdyne.drivers.base import Finding
from osrdyne.drivers.docker.engine import Engine, engine_address
from osrdyne.drivers.docker.launch import explain, refuse_loopback
from osrdyne.drivers.docker.options import DockerOptions, Pull
from osrdyne.errors import DriverUnavailableError, StartFailedError

_BUILT_IN_NETWORKS = ("host", "bridge", "none", "default")


def examine(engine: Engine, options: DockerOptions, *, broker: str) -> list[Finding]:
    """Run the checks; blocks. `broker` is `host:port/vhost`. Without an engine only that is reported."""
    try:
        version = engine.call(lambda client: client.version())
        findings = [_engine(version, options), _image(engine, options), *_network(engine, options)]
    except DriverUnavailableError as error:
        return [Finding("docker engine", ok=False, message=error.message)]
    except APIError as error:
        return [Finding("docker engine", ok=False, message=f"The engine refused: {explain(error)}.")]
    return [*findings, *_registry_file(options), _broker_address(options, broker)]


def _engine(version: dict[str, Any], options: DockerOptions) -> Finding:
    message = f"Docker {version.get('Version')} (API {version.get('ApiVersion')}) answers at {engine_address(options)}."
    return Finding("docker engine", ok=True, message=message)


def _image(engine: Engine, options: DockerOptions) -> Finding:
    image = options.image
    present = _exists(engine, lambda client: client.inspect_image(image))
    if present and options.pull is not Pull.ALWAYS:
        return Finding("worker image", ok=True, message=f"{image} exists on the engine.")
    if not present and options.pull is Pull.NEVER:
        remedy = "Pull or build it, or correct driver.options.image."
        return Finding(
            "worker image", ok=False, message=f"{image} does not exist on the engine, and pull is never.", remedy=remedy
        )
    try:
        engine.call(lambda client: client.inspect_distribution(image))
    except APIError as error:
        remedy = "Correct driver.options.image or registry_config_file, or build it on the engine's host."
        return Finding("worker image", ok=False, message=f"{image}: {explain(error)}.", remedy=remedy)
    return Finding("worker image", ok=True, message=f"{image} can be pulled.")


def _network(engine: Engine, options: DockerOptions) -> list[Finding]:
    network = options.network
    if network is None or network in _BUILT_IN_NETWORKS or network.startswith("container:"):
        return []
    if _exists(engine, lambda client: client.inspect_network(network)):
        return [Finding("worker network", ok=True, message=f"{network} exists.")]
    remedy = f"Create it (docker network create {network}), or correct driver.options.network."
    return [Finding("worker network", ok=False, message=f"The network {network} does not exist.", remedy=remedy)]


def _registry_file(options: DockerOptions) -> list[Finding]:
    path = options.registry_config_file
    if path is None or Path(path).is_file():
        return []
    remedy = "Correct driver.options.registry_config_file."
    return [Finding("registry credentials", ok=False, message=f"{path} is not a file.", remedy=remedy)]


def _broker_address(options: DockerOptions, broker: str) -> Finding:
    """Check the address of the broker. Not fatal: `broker.worker_uri`, which a driver gets with a start, may differ."""
    try:
        refuse_loopback(options, f"amqp://{broker}")
    except StartFailedError as error:
        remedy = "Ignore this if broker.worker_uri is set."
        return Finding("broker for workers", ok=False, message=error.message, remedy=remedy, fatal=False)
    return Finding("broker for workers", ok=True, message=f"Workers connect to the broker at {broker}.")


def _exists(engine: Engine, inspect: Callable[[Any], Any]) -> bool:
    try:
        engine.call(inspect)
    except NotFound:
        return False
    return True
