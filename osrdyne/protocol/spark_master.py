"""The `spark.master` of `WORKER_CONFIG`: which Spark a worker uses.

The configuration refuses an invalid master at the start; workers and `osrdyne doctor` use its kind and addresses.
Source: docs/reference/workers/clusters.md.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

FORMS = (
    "`local`, `local[4]`, `local[*]`, `local-cluster[workers,cores,MiB]`, `spark://host:port[,host:port]`, "
    "`k8s://https://host:port`, `yarn` or `sc://host:port`"
)
EXECUTOR_IMAGE = "spark.kubernetes.container.image"
"""The setting of Spark that names the image of executors on Kubernetes."""
CONNECT_PORT = 15002
"""Where a Spark Connect server listens if its address has no port."""

_LOCAL = re.compile(r"local(\[(\*|[1-9][0-9]{0,3})(, *[1-9][0-9]{0,3})?\])?\Z")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[ *([1-9][0-9]*) *, *([1-9][0-9]*) *, *([1-9][0-9]*) *\]\Z")
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})\Z")


class MasterKind(StrEnum):
    LOCAL = "local"
    LOCAL_CLUSTER = "local-cluster"
    STANDALONE = "standalone"
    KUBERNETES = "kubernetes"
    YARN = "yarn"
    CONNECT = "connect"


@dataclass(frozen=True, slots=True)
class SparkMaster:
    """A valid master. `addresses`: (host, port) of each of its servers, of which one suffices. Empty for `local…`, and
    for `yarn`, whose address is in the configuration of Hadoop."""

    text: str
    kind: MasterKind
    addresses: tuple[tuple[str, int], ...] = ()

    @property
    def is_connect(self) -> bool:
        """Whether Spark runs behind a Connect server, and not in the worker."""
        return self.kind is MasterKind.CONNECT

    @property
    def is_on_this_host(self) -> bool:
        """Whether all processes of Spark run on the worker's host."""
        return self.kind in {MasterKind.LOCAL, MasterKind.LOCAL_CLUSTER}

    @property
    def is_cluster(self) -> bool:
        """Whether the worker requests executors from a cluster, which may not have any."""
        return self.kind in {MasterKind.STANDALONE, MasterKind.KUBERNETES, MasterKind.YARN, MasterKind.LOCAL_CLUSTER}

    @property
    def is_shared(self) -> bool:
        """Whether other applications use the same executors' cores and memory."""
        return self.is_cluster and self.kind is not MasterKind.LOCAL_CLUSTER


def shown_master(text: str) -> str:
    """The master without credentials: the parameters of Spark Connect, which may contain a token, and a password."""
    shown, parameters, _ = text.partition(";")
    if parameters:
        shown = shown.removesuffix("/")
    scheme, separator, rest = shown.rpartition("://")
    _, credentials, address = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if credentials else ''}{address}"


def parse_spark_master(text: str) -> SparkMaster:
    """Parse a master. Raises ValueError with the reason and the valid forms."""
    if _LOCAL.match(text):
        return SparkMaster(text, MasterKind.LOCAL)
    if _LOCAL_CLUSTER.match(text):
        return SparkMaster(text, MasterKind.LOCAL_CLUSTER)
    if text == "yarn":
        return SparkMaster(text, MasterKind.YARN)
    scheme, separator, rest = text.partition("://")
    match scheme if separator else "":
        case "spark":
            return SparkMaster(text, MasterKind.STANDALONE, tuple(_parse_address(one) for one in rest.split(",")))
        case "k8s":
            return SparkMaster(text, MasterKind.KUBERNETES, (_kubernetes_address(rest),))
        case "sc":
            return SparkMaster(text, MasterKind.CONNECT, (_connect_address(rest),))
        case _:
            raise ValueError(f"{shown_master(text)!r} is not a Spark master: write {FORMS}")


def find_reachable(addresses: Iterable[tuple[str, int]], *, timeout: float) -> str | None:
    """Open a TCP connection to the first address that accepts one. Blocks for at most `timeout` seconds an address.

    Returns None if one did, else the last error as a sentence without a full stop.
    """
    failure = None
    for host, port in addresses:
        try:
            socket.create_connection((host.strip("[]"), port), timeout=timeout).close()
        except OSError as error:
            failure = f"{host}:{port} does not accept connections: {error.strerror or error}"
        else:
            return None
    return failure


def _parse_address(text: str) -> tuple[str, int]:
    match = _ADDRESS.match(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(
            f"{shown_master(text)!r} is not an address: write spark://host:port, or several with commas: "
            "spark://a:7077,b:7077"
        )
    return match["host"], int(match["port"])


def _kubernetes_address(rest: str) -> tuple[str, int]:
    """Parse the address of an API server; as in Spark, the default scheme is `https`."""
    url = rest if "://" in rest else f"https://{rest}"
    scheme, host, port = _split(url)
    if scheme not in {"http", "https"} or not host:
        shown = shown_master(f"k8s://{rest}")
        raise ValueError(f"{shown!r} is not the address of an API server: write k8s://https://host:port")
    return host, port or (443 if scheme == "https" else 80)


def _connect_address(rest: str) -> tuple[str, int]:
    _, host, port = _split(f"sc://{rest}")
    if not host or ";" in host:  # the parameters follow a slash
        raise ValueError("sc:// needs the address of a Spark Connect server: write sc://host:15002")
    return host, port or CONNECT_PORT


def _split(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port; an empty host if the address is invalid. Errors do not contain the text, which may hold a
    token."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port
    except ValueError:
        return "", "", None
