"""The names and labels of the Kubernetes driver's objects. Pure.

A key may be any text, so names and labels consist of hashes, and names have a readable part for operators. The key
itself is in an annotation, encoded without loss, and if it is printable in another one without encoding.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from osrdyne.drivers.base import DriverContext, WorkerSpec
from osrdyne.drivers.kubernetes.options import LABEL_PREFIX
from osrdyne.protocol.environment import Placement
from osrdyne.protocol.names import Key, encode_key

POOL_LABEL = f"{LABEL_PREFIX}pool"  # A hash of stack and pool, by which the driver lists.
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

# The name of a pod is that of its Deployment and 17 characters, the name of an owned object that and `-` and the worker
# id. KEDA uses the latter as labels, which have at most 63 characters.
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
        """The label selector of all Deployments and Pods of the pool."""
        return f"{POOL_LABEL}={self.pool_hash}"

    def object_name(self, key: Key, slot: int) -> str:
        """The name of the Deployment or Pod of (pool, key, slot), of which the API server allows only one."""
        digest = _hash(self.stack, self.pool, key, str(slot))[:20]
        readable = re.sub(r"[^a-z0-9]+", "-", f"{self.pool}-{key}".lower())
        readable = readable[: _MAX_NAME - len(_PREFIX) - len(digest) - 1].strip("-")
        return f"{_PREFIX}{readable}-{digest}" if readable else f"{_PREFIX}{digest}"

    def owned_name(self, spec: WorkerSpec) -> str:
        """The name of the owned objects of one start; unique, because those of a former start may still exist."""
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
    """Whether it is a process of pooled workers, which is a Pod without a Deployment."""
    return spec.environment.placement is Placement.POOLED


def key_annotations(spec: WorkerSpec) -> dict[str, str]:
    """The annotations with the key. A key that is not printable has only the encoded one."""
    readable = {KEY_ANNOTATION: spec.key} if spec.key.isprintable() else {}
    return {**readable, ENCODED_KEY_ANNOTATION: encode_key(spec.key), POOL_ANNOTATION: spec.pool}


def worker_selector(worker_id: str) -> str:
    """The label selector of the objects of one start."""
    return f"{WORKER_LABEL}={worker_id}"


def field_manager(worker_id: str) -> str:
    """The field manager of a group's objects. Each start has its own, so that the API server refuses a second start of
    the same name as a conflict, instead of merging both."""
    return f"osrdyne-{worker_id}"


def replicas_manager(worker_id: str) -> str:
    """The field manager of the number of pods, for groups without an autoscaler. Separate from that of the other
    fields: if this manager no longer applies the field, the number stays unchanged."""
    return f"osrdyne-replicas-{worker_id}"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
