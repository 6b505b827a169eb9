"""The labels that mark a container as a worker of a pool, and the worker that they describe. Pure.

Used by the Docker driver. The labels are everything that is known about a worker: nothing is kept elsewhere.
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
    """Whose containers they are. Two stacks on one engine may have pools of the same id."""

    pool: str
    stack: str

    def filters(self) -> list[str]:
        """What the engine is asked to filter by, when it lists containers or events."""
        return [f"{POOL}={self.pool}", f"{STACK}={self.stack}"]

    def owns(self, name: str, labels: Mapping[str, str] | None) -> bool:
        """Whether it has our labels and the name that follows from them: a copy has another name."""
        marks = labels or {}
        if (marks.get(POOL), marks.get(STACK)) != (self.pool, self.stack) or KEY not in marks:
            return False
        slot = marks.get(SLOT, "")
        return slot.isdecimal() and name.removeprefix("/") == self.container_name(Key(marks[KEY]), int(slot))

    def container_name(self, key: Key, slot: int) -> str:
        """The lock of a slot, because the engine has no two containers of one name.

        A name of the engine may have dots but no plus signs, and an encoded key has no dots.
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
    """The worker in a container; None for one whose labels do not say which."""
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
    """How a container ended, from its `State`. The engine adds 128 to the number of a signal, as a shell does.

    It does not always notice that memory ran out: the kernel's notice and the end of the container race.
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
