"""The options of the Docker driver."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from osrdyne.config.models import Model
from osrdyne.config.types import Duration, PublicTexts, Size
from osrdyne.drivers.base import DriverContext, DriverOptions
from osrdyne.drivers.shared import Variables

LABEL_PREFIX = "osrdyne."
HOST_NETWORK = "host"

_SHORT_MOUNT = re.compile(r"(?P<source>[^:]+):(?P<target>/[^:]*)(?::(?P<mode>ro|rw))?\Z")


class Pull(StrEnum):
    ALWAYS = "always"
    MISSING = "missing"
    NEVER = "never"


class BrokerUri(StrEnum):
    FILE = "file"
    ENV = "env"


class Mount(Model):
    """A directory of the engine's host, or a named volume, that is mounted into every worker."""

    source: str = Field(description="An absolute path on the engine's host, or the name of a volume.")
    target: str = Field(pattern=r"\A/", description="The absolute path in the container.")
    read_only: bool = Field(False, description="Whether workers cannot write to it.")


def _parse_mount(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = _SHORT_MOUNT.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a mount; write SOURCE:/TARGET or SOURCE:/TARGET:ro")
    return {"source": match["source"], "target": match["target"], "read_only": match["mode"] == "ro"}


class DockerOptions(DriverOptions):
    """`driver.options` of the Docker driver."""

    image: str = Field(min_length=1, description="Image of the workers, with a tag or digest.")
    command: tuple[str, ...] | None = Field(
        None, min_length=1, description="Program and arguments; by default `osrdyne-worker` with `worker.app`."
    )
    entrypoint: tuple[str, ...] | None = Field(
        None, min_length=1, description="Replaces the entry point of the image; by default the image's own."
    )
    environment: Variables = Field(
        default_factory=dict, description="Further environment variables; `docker inspect` shows them."
    )
    mounts: tuple[Annotated[Mount, BeforeValidator(_parse_mount)], ...] = Field(
        (),
        description="Directories and volumes: `SOURCE:/TARGET`, `SOURCE:/TARGET:ro` or `{source, target, read_only}`.",
    )
    network: str | None = Field(
        None, description="Network of the workers, `host` for that of the host; by default the engine's default."
    )
    extra_hosts: PublicTexts = Field(
        default_factory=dict, description="Host names and addresses; `host-gateway` stands for the engine's host."
    )
    cpus: float | None = Field(None, gt=0, description="Processors that a worker may use, such as 1.5.")
    memory: Size | None = Field(
        None, ge=6 * 2**20, description="Memory of a worker, swap included; a worker that uses more is killed."
    )
    user: str | None = Field(None, min_length=1, description="User of the workers; the image's own by default.")
    init: bool = Field(
        True, description="Run a small init as process 1, which forwards signals and reaps orphaned processes."
    )
    labels: PublicTexts = Field(default_factory=dict, description="Further labels of the containers.")
    broker_uri: BrokerUri = Field(
        BrokerUri.FILE,
        description="How a worker gets the AMQP URI: as a `file` in its container, or in the environment (`env`) "
        "which `docker inspect` shows.",
    )
    log_driver: str = Field(
        "json-file", description="Docker's log driver for the output of workers; `local` and `journald` work, too."
    )
    log_options: dict[str, str] = Field(
        default={"max-size": "10m", "max-file": "3"}, description="Options of `log_driver`."
    )
    pull: Pull = Field(
        Pull.MISSING, description="When the image is pulled: `always` before a start, if it is `missing`, or `never`."
    )
    pull_timeout: Duration = Field(600.0, gt=0, description="How long a pull may make no progress.")
    registry_config_file: str | None = Field(
        None, description="Docker's `config.json` with credentials of registries; by default that of the daemon's user."
    )
    host: str | None = Field(
        None, description="The engine, unix:///path or tcp://host:port; by default `DOCKER_HOST` or the local socket."
    )
    tls_directory: str | None = Field(
        None,
        description="Directory with ca.pem, cert.pem and key.pem for a tcp:// engine; by default `DOCKER_CERT_PATH`.",
    )
    timeout: Duration = Field(60.0, gt=0, description="Limit for one call of the engine.")
    stack: str | None = Field(
        None,
        min_length=1,
        description="Distinguishes the containers of pools with the same id on one engine; "
        "by default the broker's host, port and virtual host.",
    )

    @field_validator("labels")
    @classmethod
    def _own_labels(cls, value: dict[str, str]) -> dict[str, str]:
        if taken := [name for name in value if name.startswith(LABEL_PREFIX)]:
            raise ValueError(f"{taken[0]} is set by osrdyne itself (labels in {LABEL_PREFIX}*)")
        return value

    @field_validator("host")
    @classmethod
    def _engine_address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("unix:///", "tcp://")):
            raise ValueError("must look like unix:///var/run/docker.sock or tcp://host:2376")
        return value

    def contradiction(self, context: DriverContext) -> str | None:
        if context.uri_in_environment and "broker_uri" in self.model_fields_set and self.broker_uri is BrokerUri.FILE:
            return (
                "broker_uri: `file` keeps the AMQP URI out of the environment, and worker.environment: reference "
                "requires it there; remove one of the two"
            )
        return None

    @model_validator(mode="after")
    def _tls_for_tcp(self) -> Self:
        if self.tls_directory is not None and not (self.host or "").startswith("tcp://"):
            raise ValueError("tls_directory: only allowed for a host that begins with tcp://")
        return self
