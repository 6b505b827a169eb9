"""The environment of a worker process: inherited and new variables, and the marks by which the driver finds it again.

Pure; called by the subprocess driver. Variables are bytes, so that a key is UTF-8 independent of the daemon's locale.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from osrdyne.drivers.base import WorkerSpec
from osrdyne.drivers.shared import RESERVED_PREFIXES
from osrdyne.protocol.environment import URI_FILE_VARIABLE, URI_VARIABLE
from osrdyne.protocol.names import Key, WorkerId, decode_key, encode_key

# The variables of the daemon that a worker inherits, besides those of the option `inherit`. Not all: the environment of
# the daemon may contain credentials (of a cloud, a registry, a proxy), and a worker runs requests of clients.
INHERITED = (
    # User, language, and the places of programs and temporary files.
    "HOME", "LANG", "LANGUAGE", "LC_*", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "TZDIR",
    "USER", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR",
    # Installation and configuration of Python, Java, Spark and Hadoop.
    "HADOOP_CONF_DIR", "HADOOP_HOME", "HIVE_CONF_DIR", "JAVA_HOME", "PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON",
    "PYTHONHOME", "PYTHONPATH", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_LOCAL_DIRS", "SPARK_LOCAL_HOSTNAME",
    "SPARK_LOCAL_IP", "VIRTUAL_ENV", "YARN_CONF_DIR",
    # Trusted authorities for TLS.
    "SSL_CERT_DIR", "SSL_CERT_FILE",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Marks:
    """The variables that identify a process as a worker, and its slot.

    The state directory identifies the stack. All values except the directory are ASCII.
    """

    state: Path
    key: Key
    slot: int
    worker_id: WorkerId
    spec_hash: str
    generation: str

    def to_variables(self) -> dict[str, str]:
        return {
            "OSRDYNE_STATE_DIRECTORY": str(self.state),
            "OSRDYNE_KEY": encode_key(self.key),
            "OSRDYNE_SLOT": str(self.slot),
            "OSRDYNE_SPEC_HASH": self.spec_hash,
            "OSRDYNE_GENERATION": self.generation,
        }

    @classmethod
    def from_variables(cls, variables: Mapping[str, str], state: Path) -> Self | None:
        """The marks in the environment of a process; None if it is not a worker of this state directory."""
        key = decode_key(variables.get("OSRDYNE_KEY", "-"))
        slot = variables.get("OSRDYNE_SLOT", "")
        if not carries_mark(variables, state) or key is None or not slot.isdigit():
            return None
        return cls(
            state=state,
            key=key,
            slot=int(slot),
            worker_id=WorkerId(variables["WORKER_ID"]),
            spec_hash=variables.get("OSRDYNE_SPEC_HASH", ""),
            generation=variables.get("OSRDYNE_GENERATION", ""),
        )


def carries_mark(variables: Mapping[str, str], state: Path, worker_ids: frozenset[WorkerId] | None = None) -> bool:
    """Whether a process belongs to a worker of this state directory, and to one of `worker_ids` if they are given."""
    if variables.get("OSRDYNE_STATE_DIRECTORY") != str(state) or "WORKER_ID" not in variables:
        return False
    return worker_ids is None or variables["WORKER_ID"] in worker_ids


def worker_variables(
    spec: WorkerSpec,
    marks: Marks,
    *,
    daemon: Mapping[bytes, bytes],
    inherit: Sequence[str] = (),
    extra: Mapping[str, str],
    uri_file: Path | None,
) -> dict[bytes, bytes]:
    """The complete environment of a worker process.

    It inherits `INHERITED` and the variables that match `inherit` from the daemon, but never settings of osrdyne.
    `uri_file`: the file with the AMQP URI; None: the URI is in the environment.
    """
    wanted = (*INHERITED, *inherit)
    kept = {name: value for name, value in daemon.items() if _is_inherited(os.fsdecode(name), wanted)}
    variables = spec.environment.to_variables()
    if uri_file is not None:
        del variables[URI_VARIABLE]
        variables[URI_FILE_VARIABLE] = str(uri_file)
    # Unbuffered, so that the last lines of a killed worker are in its log.
    return {b"PYTHONUNBUFFERED": b"1", **kept, **_encode(extra), **_encode(variables), **_encode(marks.to_variables())}


def _is_inherited(name: str, wanted: Sequence[str]) -> bool:
    return not name.startswith(RESERVED_PREFIXES) and any(
        name.startswith(one[:-1]) if one.endswith("*") else name == one for one in wanted
    )


def _encode(variables: Mapping[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): value.encode("utf-8", "surrogateescape") for name, value in variables.items()}
