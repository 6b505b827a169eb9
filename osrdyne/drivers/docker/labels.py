"""The labels that mark a container as a worker of a pool, and the worker that they describe. Pure.

Used by the Docker driver. All data of a worker is in the labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from osrdyne.drivers.base import Exit, Instance, InstanceId, InstanceState, WorkerSpec
from osrdyne.drivers.docker.options import LABEL_PREFIX
from osrdyne.protocol.names import Key, WorkerId, fit_key

POOL, STACK, KEY, SLOT, WORKER, GENERATION, SPEC_HASH, STARTED_AT = (
    LABEL_PREFIX + name
    for name in ("pool", "stack", "key", "slot", "worker-id", "generation", "spec-hash", "started-at")
)

_KEY_LIMIT = 100
_SIGNALS = {137: "SIGKILL", 143: "SIGTERM", 134: "SIGABRT", 139: "SIGSEGV"}


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of containers. Two stacks on one engine may have pools of the same id."""

    pool: str
    stack: str

    def filters(self) -> list[str]:
        """The label filters for listings and events of the engine."""
        return [f"{POOL}={self.pool}", f"{STACK}={self.stack}"]

    def owns(self, name: str, labels: Mapping[str, str] | None) -> bool:
        """Whether a container has labels of this pool and the name that they imply; a copy has another name."""
        marks = labels or {}
        if (marks.get(POOL), marks.get(STACK)) != (self.pool, self.stack) or KEY not in marks:
            return False
        slot = marks.get(SLOT, "")
        return slot.isdecimal() and name.removeprefix("/") == self.container_name(Key(marks[KEY]), int(slot))

    def container_name(self, key: Key, slot: int) -> str:
        """The name of the container of a slot. It is the lock of the slot, because names are unique.

        The engine allows no plus signs in names, so those of the encoded key become dots, which it does not contain.
        """
        stack = hashlib.sha256(self.stack.encode()).hexdigest()[:8]
        return f"osrdyne-{self.pool}-{stack}-{fit_key(key, _KEY_LIMIT).replace('+', '.')}-{slot}"

    def labels(self, spec: WorkerSpec, *, spec_hash: str, started_at: float) -> dict[str, str]:
        return {
            POOL: self.pool,
            STACK: self.stack,
            KEY: spec.key,
            SLOT: str(spec.slot),
            WORKER: spec.worker_id,
            GENERATION: str(spec.generation),
            SPEC_HASH: spec_hash,
            STARTED_AT: repr(started_at),
        }


def read_instance(
    container_id: str, name: str, labels: Mapping[str, str], *, state: InstanceState, exit: Exit | None = None
) -> Instance | None:
    """The instance that the labels of a container describe; None if they are incomplete or malformed."""
    try:
        return Instance(
            instance_id=InstanceId(container_id),
            key=Key(labels[KEY]),
            slot=int(labels[SLOT]),
            worker_id=WorkerId(labels[WORKER]),
            state=state,
            spec_hash=labels[SPEC_HASH],
            started_at=float(labels[STARTED_AT]),
            external_id=name.removeprefix("/"),
            exit=exit,
        )
    except (KeyError, ValueError):
        return None


def read_exit(state: Mapping[str, Any]) -> Exit:
    """How a container ended, from its `State`. The exit code after a signal is 128 plus its number, as in a shell.

    `OOMKilled` may be missing, because the notice of the kernel races with the end of the container.
    """
    code = int(state.get("ExitCode", 0))
    signal = _SIGNALS.get(code)
    if state.get("OOMKilled"):
        return Exit(code=code, signal=signal, reason="out of memory: it took more than driver.options.memory allows")
    if state.get("Error"):
        return Exit(code=code, signal=signal, reason=str(state["Error"]))
    if signal == "SIGKILL":
        return Exit(code=code, signal=signal, reason="killed from outside, or out of memory")
    return Exit(code=code, signal=signal)
