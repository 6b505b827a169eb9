"""The environment of a worker process: what it inherits, what it is given, and the marks by which it is found again.

Pure; called by the subprocess driver. Variables are bytes, so that a key is UTF-8 whatever locale the daemon has.
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

# The variables of the daemon that a worker inherits. A daemon's environment may hold credentials (of a cloud, of a
# registry, of a proxy), and a worker runs other people's requests: it gets nothing that is not named here or in the
# option `inherit`.
INHERITED = (
    # The user, the language and where programs and temporary files are.
    "HOME", "LANG", "LANGUAGE", "LC_*", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "TZDIR",
    "USER", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR",
    # Python, Java, Spark and Hadoop: where they are installed and configured.
    "HADOOP_CONF_DIR", "HADOOP_HOME", "HIVE_CONF_DIR", "JAVA_HOME", "PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON",
    "PYTHONHOME", "PYTHONPATH", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_LOCAL_DIRS", "SPARK_LOCAL_HOSTNAME",
    "SPARK_LOCAL_IP", "VIRTUAL_ENV", "YARN_CONF_DIR",
    # Authorities that TLS trusts.
    "SSL_CERT_DIR", "SSL_CERT_FILE",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Marks:
    """What tells a worker of ours from every other process, and which one it is.

    The state directory is the identity of the stack. All values are ASCII but the directory.
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
        """The marks in a process's environment; None when it is no worker of this state directory."""
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
    """Whether a process belongs to a worker of this state directory (to one of `worker_ids`)."""
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
    """Everything the worker process finds in its environment.

    Of the daemon's own environment it inherits `INHERITED` and what matches `inherit`, never osrdyne's own settings.
    The AMQP URI comes as the name of a file; with None it is in the environment itself.
    """
    wanted = (*INHERITED, *inherit)
    kept = {name: value for name, value in daemon.items() if _is_inherited(os.fsdecode(name), wanted)}
    variables = spec.environment.to_variables()
    if uri_file is not None:
        del variables[URI_VARIABLE]
        variables[URI_FILE_VARIABLE] = str(uri_file)
    # Unbuffered, so that the last words of a killed worker are in its log.
    return {b"PYTHONUNBUFFERED": b"1", **kept, **_encode(extra), **_encode(variables), **_encode(marks.to_variables())}


def _is_inherited(name: str, wanted: Sequence[str]) -> bool:
    return not name.startswith(RESERVED_PREFIXES) and any(
        name.startswith(one[:-1]) if one.endswith("*") else name == one for one in wanted
    )


def _encode(variables: Mapping[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): value.encode("utf-8", "surrogateescape") for name, value in variables.items()}
