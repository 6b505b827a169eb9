"""The manifests of a managed pool, of one kind and in all their versions, as global parameters of RabbitMQ.

Written by the leader only. A manifest is kept as text: RabbitMQ does not keep the order of an object's members, and in
every kind of manifest the first of several counts. The history is written first: a crash in between leaves a version
twice, which is read once. Source: ARCHITECTURE, "State that must outlive the leader".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from osrdyne.ingress.problems import InvalidDocumentError, Problem
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.pins import Parameters

KEPT_VERSIONS = 20


class ManifestKind(StrEnum):
    """What a manifest is about; also the last word of its parameter."""

    ROUTES = "routes"
    SPLITTER = "splitter"


class Document(Protocol):
    """What was read from a manifest."""

    @property
    def warnings(self) -> tuple[Problem, ...]: ...

    def document(self) -> dict[str, Any]:
        """The manifest as JSON values: what is kept."""
        ...


D = TypeVar("D", bound=Document)


@dataclass(frozen=True, slots=True)
class KeptManifest:
    """One version. `manifest` is its document as JSON text, `at` in seconds since the epoch."""

    version: int
    author: str
    at: float
    manifest: str


@dataclass(frozen=True, slots=True)
class ManifestChange:
    """What a change of a manifest did."""

    kept: KeptManifest
    warnings: tuple[Problem, ...] = ()


class ManifestStore(Generic[D]):
    """The manifests of one pool and kind. `load` reads the text of one; it raises `InvalidDocumentError`."""

    def __init__(self, parameters: Parameters, *, pool: str, kind: ManifestKind, load: Callable[[str], D]) -> None:
        self.kind = kind
        self._load = load
        self._in_force: tuple[str, D] | None = None
        self._parameters = parameters
        self._current = f"osrdyne-{pool}-{kind}"
        self._history = f"osrdyne-{pool}-{kind}-history"
        self._log: Logger = get_logger(kind.value, pool=pool)

    def load(self, text: str) -> D:
        """Read a manifest; the one in force was read when it came into force. Raises `InvalidDocumentError`."""
        if self._in_force is not None and self._in_force[0] == text:
            return self._in_force[1]
        return self._load(text)

    async def current(self) -> KeptManifest | None:
        """The version in force; None when there has never been one. It is asked for again and again, and read when it
        is another one than before."""
        value = await self._parameters.get_global_parameter(self._current)
        kept = _read(value)
        if kept is not None and (document := self._document_of(kept)) is not None:
            self._in_force = kept.manifest, document
            return kept
        if value is not None:
            self._log.error("the kept manifest cannot be read, the pool does without", parameter=self._current)
        return None

    async def history(self) -> list[KeptManifest]:
        """Every version that is kept, the newest first; the one in force is the first."""
        current = await self.current()
        found = {} if current is None else {current.version: current}
        value = await self._parameters.get_global_parameter(self._history)
        for kept in map(_read, value if isinstance(value, list) else []):
            if kept is not None and self._document_of(kept) is not None:
                found.setdefault(kept.version, kept)
        return sorted(found.values(), key=lambda kept: -kept.version)

    async def save(self, manifest: D, *, author: str, at: float) -> KeptManifest:
        """Make a manifest the one in force, as a version of its own."""
        before = await self.history()
        text = json.dumps(manifest.document(), ensure_ascii=False)
        new = KeptManifest(before[0].version + 1 if before else 1, author, at, text)
        await self._parameters.put_global_parameter(self._history, [asdict(kept) for kept in before[:KEPT_VERSIONS]])
        await self._parameters.put_global_parameter(self._current, asdict(new))
        self._in_force = text, manifest  # what is kept loads to the same
        return new

    def _document_of(self, kept: KeptManifest) -> D | None:
        """None for a text that is no manifest: somebody else wrote it."""
        try:
            return self.load(kept.manifest)
        except InvalidDocumentError:
            return None


def _read(value: object) -> KeptManifest | None:
    """A version as kept; None for anything else."""
    match value:
        case {
            "version": int(version),
            "author": str(author),
            "at": int() | float() as at,
            "manifest": str(manifest),
        }:
            return KeptManifest(version, author, float(at), manifest)
        case _:
            return None
