"""The files and the environment of a private RabbitMQ node. Used by `embedded` only; starts nothing.

All files of the node are in one directory: configuration, plugins, data, logs and Erlang cookie. It reads no files of a
system-wide RabbitMQ (`/etc/rabbitmq`).
"""

from __future__ import annotations

import json
import random
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from osrdyne.protocol.uri import TlsFiles

LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)  # below the ephemeral range, from which outgoing connections take their ports
_IDLE_FLAGS = "+sbwt none +sbwtdcpu none +sbwtdio none"  # schedulers sleep at once instead of spinning
_WAL_BYTES = 64 * 2**20  # the default of 512 MiB is for servers


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """User, password and ports of a node, which stay the same in its directory."""

    user: str
    password: str = field(repr=False)
    amqp_port: int
    management_port: int
    distribution_port: int
    epmd_port: int
    amqps_port: int
    https_port: int

    @classmethod
    def load_or_create(cls, directory: Path) -> NodeIdentity:
        """Load the identity in `directory`, or create one with free ports and a random password."""
        file = directory / "node.json"
        if file.exists():
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        amqp, management, distribution, epmd, amqps, https = free_ports(6)
        identity = cls(
            user="osrdyne",
            password=secrets.token_hex(16),
            amqp_port=amqp,
            management_port=management,
            distribution_port=distribution,
            epmd_port=epmd,
            amqps_port=amqps,
            https_port=https,
        )
        write_private(file, json.dumps(asdict(identity)))
        return identity

    def ports(self, *, tls: bool = True) -> tuple[int, ...]:
        """The ports on which the node listens; without TLS another node may use those for TLS."""
        plain = self.amqp_port, self.management_port, self.distribution_port, self.epmd_port
        return (*plain, self.amqps_port, self.https_port) if tls else plain


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that are free at the moment."""
    found: list[int] = []
    # Not the seeded generator: two processes with the same seed would try the same ports at the same time.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if is_free(port):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} ports are free between {_PORTS.start} and {_PORTS.stop}")


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the node itself does
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def write_private(file: Path, text: str) -> None:
    """Write a file with mode 0600, also while it is being written."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


def configuration(identity: NodeIdentity, *, consumer_timeout: float | None, tls: TlsFiles | None) -> str:
    """The text of `rabbitmq.conf`. `consumer_timeout`: the limit for an unacknowledged delivery in seconds. `tls`: the
    certificate of the TLS listeners, and with `verify` the authority that signs the certificates of clients."""
    lines = [
        f"listeners.tcp.default = {LOOPBACK}:{identity.amqp_port}",
        f"management.tcp.ip = {LOOPBACK}",
        f"management.tcp.port = {identity.management_port}",
        f"default_user = {identity.user}",
        f"default_pass = {identity.password}",
        f"raft.wal_max_size_bytes = {_WAL_BYTES}",
        "log.console = false",
        "log.file.level = info",
    ]
    if consumer_timeout is not None:
        lines.append(f"consumer_timeout = {int(consumer_timeout * 1000)}")
    if tls is not None:
        lines += _tls_listeners(identity, tls)
    return "\n".join(lines) + "\n"


def _tls_listeners(identity: NodeIdentity, tls: TlsFiles) -> list[str]:
    verify = "verify_peer" if tls.verify else "verify_none"
    options = [
        (place, name, value)
        for place in ("ssl_options", "management.ssl")
        for name, value in (
            ("cacertfile", tls.ca_file),
            ("certfile", tls.certificate_file),
            ("keyfile", tls.key_file),
            ("verify", verify),
            ("fail_if_no_peer_cert", str(tls.verify).lower()),
        )
    ]
    return [
        f"listeners.ssl.default = {LOOPBACK}:{identity.amqps_port}",
        f"management.ssl.ip = {LOOPBACK}",
        f"management.ssl.port = {identity.https_port}",
        *(f"{place}.{name} = {value}" for place, name, value in options if value is not None),
    ]


def write_files(
    directory: Path, identity: NodeIdentity, *, consumer_timeout: float | None, tls: TlsFiles | None
) -> None:
    for folder in ("data", "log", "conf.d"):
        (directory / folder).mkdir(exist_ok=True)
    write_private(directory / "rabbitmq.conf", configuration(identity, consumer_timeout=consumer_timeout, tls=tls))
    (directory / "advanced.config").write_text("[].\n", encoding="utf-8")
    (directory / "enabled_plugins").write_text("[rabbitmq_management].\n", encoding="utf-8")


def environment(directory: Path, identity: NodeIdentity, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the node: `inherited` without the variables of RabbitMQ and Erlang, and those of the node."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
    return kept | {
        "HOME": str(directory),  # the directory of the Erlang cookie
        "ERL_EPMD_ADDRESS": LOOPBACK,
        "ERL_EPMD_PORT": str(identity.epmd_port),
        "RABBITMQ_NODENAME": "osrdyne@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
        "RABBITMQ_NODE_PORT": str(identity.amqp_port),
        "RABBITMQ_DIST_PORT": str(identity.distribution_port),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "rabbitmq-env.conf"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        "RABBITMQ_CONFIG_FILES": str(directory / "conf.d" / "*.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "data" / "config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{_IDLE_FLAGS} -kernel inet_dist_use_interface {{127,0,0,1}}",
    }
