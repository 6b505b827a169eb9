"""The manifests of a managed pool, of one kind and in all their versions, as global parameters of RabbitMQ.

Written by the leader only. A manifest is kept as text: RabbitMQ does not keep the order of an object's members, and in
every kind of manifest the first of several counts. A large one is kept compressed. The history is written first: a
crash in between leaves a version twice, which is read once.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from osrdyne.aio.offload import SMALL, off_loop
from osrdyne.config.types import size_text
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.documents.reader import MAX_CHARACTERS
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.state.pins import Parameters

KEPT_VERSIONS = 20
"""The one in force and those before it."""
MAX_KEPT_BYTES = 4 * 2**20
"""Of one manifest as it is kept."""
MAX_HISTORY_BYTES = 8 * 2**20
"""Of all versions of a kind as they are kept; the oldest go first. RabbitMQ refuses bodies of some 20 MB."""
_LOADED = 2
"""Manifests that stay ready for use: the one in force and the one before it."""


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

    @property
    def size(self) -> int:
        """How many routes or rules it has."""
        ...


D = TypeVar("D", bound=Document)


@dataclass(frozen=True, slots=True)
class KeptManifest:
    """One version. `at` in seconds since the epoch; `size`: how many routes or rules it has, where that is known.

    `stored` is its document as JSON text, compressed and in Base64 where `packed`; None: the version has no manifest.
    """

    version: int
    author: str
    at: float
    stored: str | None = field(repr=False)
    packed: bool = False
    size: int | None = None

    @classmethod
    def of(cls, version: int, author: str, at: float, text: str | None, *, size: int | None = None) -> KeptManifest:
        if text is None or len(text) <= SMALL:
            return cls(version, author, at, text, size=size)
        packed = base64.b64encode(zlib.compress(text.encode(), 6)).decode("ascii")
        return cls(version, author, at, packed, packed=True, size=size)

    @property
    def manifest(self) -> str | None:
        """The document as JSON text; None: the version has no manifest. Raises `ValueError` for what cannot be read."""
        if not self.packed or self.stored is None:
            return self.stored
        try:
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(base64.b64decode(self.stored, validate=True), 4 * MAX_CHARACTERS)
        except (zlib.error, binascii.Error) as error:
            raise ValueError("the kept manifest is damaged") from error
        if not unpacker.eof:
            raise ValueError("the kept manifest is damaged or too large")
        return content.decode()

    def parameter(self) -> dict[str, Any]:
        """The version as RabbitMQ keeps it."""
        value = {"version": self.version, "author": self.author, "at": self.at, "manifest": self.stored}
        extra = {"packed": True} if self.packed else {}
        return value | extra | ({} if self.size is None else {"size": self.size})


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
        self._loaded: OrderedDict[str, D] = OrderedDict()
        self._current_checked: KeptManifest | None = None
        self._parameters = parameters
        self._current = f"osrdyne-{pool}-{kind}"
        self._history = f"osrdyne-{pool}-{kind}-history"
        self._log: Logger = get_logger(kind.value, pool=pool)

    async def load(self, text: str) -> D:
        """Read a manifest; one that was in force lately is ready. Raises `InvalidDocumentError`."""
        known = self._loaded.get(text)
        return known if known is not None else await off_loop(len(text), self._read_whole, text)

    async def load_kept(self, kept: KeptManifest) -> D | None:
        """The manifest of a version; None where it has none. Raises `InvalidDocumentError`."""
        try:
            text = await off_loop(len(kept.stored or ""), lambda: kept.manifest)
        except ValueError as error:
            raise InvalidDocumentError([Problem(str(error))]) from error
        if text is None:
            return None
        manifest = await self.load(text)
        self._remember(text, manifest)
        return manifest

    async def current(self) -> KeptManifest | None:
        """The version in force; None when there has never been one. It is asked for again and again, and read when it
        is another one than before."""
        value = await self._parameters.get_global_parameter(self._current)
        kept = _read(value)
        if kept is not None and (kept == self._current_checked or await self._is_manifest(kept)):
            self._current_checked = kept
            return kept
        if value is not None:
            self._log.error("the kept manifest cannot be read, the pool does without", parameter=self._current)
        return None

    @property
    def name(self) -> str:
        """The parameter that holds the version in force."""
        return self._current

    async def is_missing(self) -> bool:
        """Whether nothing at all is kept as the version in force."""
        return await self._parameters.get_global_parameter(self._current) is None

    async def store_again(self, kept: KeptManifest) -> None:
        """Keep this version as the one in force."""
        await self._parameters.put_global_parameter(self._current, kept.parameter())

    async def history(self) -> list[KeptManifest]:
        """Every version that is kept, the newest first; the one in force is the first. Earlier ones are not read."""
        current = await self.current()
        found = {} if current is None else {current.version: current}
        value = await self._parameters.get_global_parameter(self._history)
        for kept in map(_read, value if isinstance(value, list) else []):
            if kept is not None:
                found.setdefault(kept.version, kept)
        return sorted(found.values(), key=lambda kept: -kept.version)[:KEPT_VERSIONS]

    async def save(self, manifest: D | None, *, author: str, at: float) -> KeptManifest:
        """Make a manifest the one in force, as a version of its own; None: from now on there is none.

        Raises `InvalidDocumentError` for one that is too large to be kept.
        """
        before = await self.history()
        version = before[0].version + 1 if before else 1
        size = 0 if manifest is None else manifest.size
        # The size of the text is not known yet; a hundred routes or rules have less than 32 KiB.
        text, new = await off_loop(SMALL // 100 * size, _keep, version, author, at, manifest)
        if len(new.stored or "") > MAX_KEPT_BYTES:
            raise InvalidDocumentError(
                [Problem(f"it takes more than {size_text(MAX_KEPT_BYTES)} to keep it, compressed: that is the limit")]
            )
        kept = [one.parameter() for one in _fitting(new, before)]
        await self._parameters.put_global_parameter(self._history, kept)
        await self._parameters.put_global_parameter(self._current, new.parameter())
        self._current_checked = new
        if text is not None and manifest is not None:
            self._remember(text, manifest)  # what is kept loads to the same
        return new

    def _read_whole(self, text: str) -> D:
        manifest = self._load(text)
        _ = manifest.warnings  # some are looked for when they are asked for, which takes long, too
        return manifest

    def _remember(self, text: str, manifest: D) -> None:
        self._loaded[text] = manifest
        self._loaded.move_to_end(text)
        while len(self._loaded) > _LOADED:
            self._loaded.popitem(last=False)

    async def _is_manifest(self, kept: KeptManifest) -> bool:
        """Not so where another program wrote the parameter."""
        try:
            await self.load_kept(kept)
        except InvalidDocumentError:
            return False
        return True


def _keep(version: int, author: str, at: float, manifest: Document | None) -> tuple[str | None, KeptManifest]:
    text = None if manifest is None else json.dumps(manifest.document(), ensure_ascii=False)
    size = None if manifest is None else manifest.size
    return text, KeptManifest.of(version, author, at, text, size=size)


def _fitting(new: KeptManifest, before: list[KeptManifest]) -> list[KeptManifest]:
    """The versions before the new one that are kept with it, the newest first."""
    left, fitting = MAX_HISTORY_BYTES - len(new.stored or ""), []
    for kept in before[: KEPT_VERSIONS - 1]:
        left -= len(kept.stored or "")
        if left < 0:
            break
        fitting.append(kept)
    return fitting


def _read(value: object) -> KeptManifest | None:
    """A version as kept; None for anything else."""
    if not isinstance(value, dict):
        return None
    match value:
        case {
            "version": int(version),
            "author": str(author),
            "at": int() | float() as at,
            "manifest": str() | None as stored,
        }:
            size, packed = value.get("size"), value.get("packed") is True
            return KeptManifest(version, author, float(at), stored, packed, size if isinstance(size, int) else None)
        case _:
            return None
