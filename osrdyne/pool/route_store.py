"""The route manifest in force and those before it, kept as global parameters of RabbitMQ. Written by the leader only.

A manifest is kept as text: RabbitMQ does not keep the order of an object's members, and of routes with equal priority
the first counts. The history is written first: a crash in between leaves a version twice, which is read once.
Source: ARCHITECTURE, "State that must outlive the leader".
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from osrdyne.ingress.manifest import Manifest, load_manifest
from osrdyne.ingress.problems import InvalidDocumentError, Problem
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.pins import Parameters

KEPT_VERSIONS = 20


@dataclass(frozen=True, slots=True)
class KeptManifest:
    """One version. `manifest` is its document as JSON text, `at` in seconds since the epoch."""

    version: int
    author: str
    at: float
    manifest: str

    def load(self) -> Manifest:
        """Raises `InvalidDocumentError` when somebody else has written nonsense."""
        return load_manifest(self.manifest)


@dataclass(frozen=True, slots=True)
class RouteChange:
    """What a change of the manifest did."""

    kept: KeptManifest
    added: tuple[int, ...]
    removed: tuple[int, ...]
    warnings: tuple[Problem, ...] = ()


class RouteStore:
    """The manifests of one pool."""

    def __init__(self, parameters: Parameters, *, pool: str) -> None:
        self._parameters = parameters
        self._current = f"osrdyne-{pool}-routes"
        self._history = f"osrdyne-{pool}-routes-history"
        self._log: Logger = get_logger("routes", pool=pool)

    async def current(self) -> KeptManifest | None:
        """The version in force; None when there has never been one."""
        value = await self._parameters.get_global_parameter(self._current)
        kept = _read(value)
        if kept is None and value is not None:
            self._log.error("the kept routes cannot be read, requests go upstream", parameter=self._current)
        return kept

    async def history(self) -> list[KeptManifest]:
        """Every version that is kept, the newest first; the one in force is the first."""
        current = await self.current()
        found = {} if current is None else {current.version: current}
        value = await self._parameters.get_global_parameter(self._history)
        for kept in map(_read, value if isinstance(value, list) else []):
            if kept is not None:
                found.setdefault(kept.version, kept)
        return sorted(found.values(), key=lambda kept: -kept.version)

    async def save(self, manifest: Manifest, *, author: str, at: float) -> KeptManifest:
        """Make a manifest the one in force, as a version of its own."""
        before = await self.history()
        text = json.dumps(manifest.document(), ensure_ascii=False)
        new = KeptManifest(before[0].version + 1 if before else 1, author, at, text)
        await self._parameters.put_global_parameter(self._history, [asdict(kept) for kept in before[:KEPT_VERSIONS]])
        await self._parameters.put_global_parameter(self._current, asdict(new))
        return new


def _read(value: object) -> KeptManifest | None:
    """A version as kept; None for anything else."""
    match value:
        case {"version": int(version), "author": str(author), "at": int() | float() as at, "manifest": str(manifest)}:
            kept = KeptManifest(version, author, float(at), manifest)
        case _:
            return None
    try:
        kept.load()
    except InvalidDocumentError:
        return None
    return kept
