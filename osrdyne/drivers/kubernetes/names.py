"""The names and labels of the Kubernetes driver's objects. Pure.

A key is data: names and labels are made of hashes, with a readable part for people; the key itself is in an annotation,
encoded so that every byte comes back, and once more as it is where it can be read.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from osrdyne.drivers.base import DriverContext, WorkerSpec
from osrdyne.drivers.kubernetes.options import LABEL_PREFIX
from osrdyne.protocol.environment import Placement
from osrdyne.protocol.names import Key, encode_key

POOL_LABEL = f"{LABEL_PREFIX}pool"  # A hash of stack and pool: what a driver lists by.
KEY_LABEL = f"{LABEL_PREFIX}key"
WORKER_LABEL = f"{LABEL_PREFIX}worker"
SLOT_LABEL = f"{LABEL_PREFIX}slot"
PROCESS_LABEL = f"{LABEL_PREFIX}process"  # Only on the pod of a process of pooled workers.
KEY_ANNOTATION = f"{LABEL_PREFIX}key"
ENCODED_KEY_ANNOTATION = f"{LABEL_PREFIX}key-encoded"
POOL_ANNOTATION = f"{LABEL_PREFIX}pool"
SPEC_ANNOTATION = f"{LABEL_PREFIX}spec-hash"
GENERATION_ANNOTATION = f"{LABEL_PREFIX}generation"
SCALING_ANNOTATION = f"{LABEL_PREFIX}autoscaling"

# A pod's name is that of its Deployment and 17 characters, those of what belongs to it a `-` and the worker id; KEDA
# makes labels of the latter, and a label has at most 63.
_MAX_NAME = 46
_PREFIX = "osrdyne-"


@dataclass(frozen=True, slots=True)
class PoolLabels:
    """The names of one pool of one stack."""

    stack: str
    pool: str

    @classmethod
    def of(cls, context: DriverContext) -> PoolLabels:
        return cls(context.stack, context.pool)

    @property
    def pool_hash(self) -> str:
        return _hash(self.stack, self.pool)[:20]

    @property
    def selector(self) -> str:
        """Finds every Deployment and Pod of the pool, and nothing else."""
        return f"{POOL_LABEL}={self.pool_hash}"

    def object_name(self, key: Key, slot: int) -> str:
        """The name of everything that belongs to (pool, key, slot): the API server lets only one exist."""
        digest = _hash(self.stack, self.pool, key, str(slot))[:20]
        readable = re.sub(r"[^a-z0-9]+", "-", f"{self.pool}-{key}".lower())
        readable = readable[: _MAX_NAME - len(_PREFIX) - len(digest) - 1].strip("-")
        return f"{_PREFIX}{readable}-{digest}" if readable else f"{_PREFIX}{digest}"

    def owned_name(self, spec: WorkerSpec) -> str:
        """The name of what belongs to one start: never that of a former one, which may be on its way out."""
        return f"{self.object_name(spec.key, spec.slot)}-{spec.worker_id}"

    def labels(self, spec: WorkerSpec) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "osrdyne-worker",
            "app.kubernetes.io/managed-by": "osrdyne",
            POOL_LABEL: self.pool_hash,
            KEY_LABEL: _hash(spec.key)[:20],
            SLOT_LABEL: str(spec.slot),
            WORKER_LABEL: spec.worker_id,
            **({PROCESS_LABEL: "true"} if is_process(spec) else {}),
        }


def is_process(spec: WorkerSpec) -> bool:
    """Whether it is a process of pooled workers, which is a pod of its own, and not a group."""
    return spec.environment.placement is Placement.POOLED


def key_annotations(spec: WorkerSpec) -> dict[str, str]:
    """The whole key. A key with characters that YAML or a terminal would change has only the encoded form."""
    readable = {KEY_ANNOTATION: spec.key} if spec.key.isprintable() else {}
    return {**readable, ENCODED_KEY_ANNOTATION: encode_key(spec.key), POOL_ANNOTATION: spec.pool}


def worker_selector(worker_id: str) -> str:
    """Finds the objects of one start."""
    return f"{WORKER_LABEL}={worker_id}"


def field_manager(worker_id: str) -> str:
    """Who owns the fields of a group's objects. Each start is a manager of its own, so that the API server refuses the
    second start of a name as a conflict, instead of merging it into the first."""
    return f"osrdyne-{worker_id}"


def replicas_manager(worker_id: str) -> str:
    """Who owns the number of pods, where no autoscaler does. Apart from the rest: when this manager falls silent, the
    number stays as it is."""
    return f"osrdyne-replicas-{worker_id}"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
