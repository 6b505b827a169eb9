"""The stored manifests of a pool, of one kind and in all versions, as global parameters of RabbitMQ.

Written by the leader only. A manifest is stored as text, because RabbitMQ does not preserve the order of the members of
an object, and the order of routes and rules matters. A large manifest is compressed. The history is written before the
active version: a crash in between leaves the active version in both, and `history` returns it once.
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

from osrdyne.aio.tasks import SMALL, off_loop
from osrdyne.config.types import size_text
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.documents.reader import MAX_CHARACTERS
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.state.groups.pins import Parameters

KEPT_VERSIONS = 20  # The active version and those before it.
MAX_KEPT_BYTES = 4 * 2**20  # Maximum stored size of one manifest.
# Maximum stored size of all versions of a kind; the oldest are dropped. RabbitMQ refuses bodies of about 20 MB.
MAX_HISTORY_BYTES = 8 * 2**20
SHORT = 400  # Characters of a manifest that is loaded on the loop: it has room for few patterns.
_LOADED = 2  # Loaded manifests that stay in memory: the active one and the one before it.


class ManifestKind(StrEnum):
    """The kind of a manifest; also the last word of its parameter."""

    ROUTES = "routes"
    SPLITTER = "splitter"
    PROFILES = "profiles"
    POLICIES = "policies"
    QUOTA = "quota"
    CIRCUITS = "circuits"

    @property
    def path(self) -> str:
        """Where the API has it, below `/v1`."""
        return "circuits/config" if self is ManifestKind.CIRCUITS else str(self)

    @property
    def command(self) -> str:
        """The commands that change it, as `osrdyne routes`."""
        return f"osrdyne {self.path.replace('/', ' ')}"


class Document(Protocol):
    """A loaded manifest."""

    @property
    def warnings(self) -> tuple[Problem, ...]: ...

    def document(self) -> dict[str, Any]:
        """The manifest as JSON values, as it is stored."""
        ...

    @property
    def size(self) -> int:
        """The number of routes, rules, profiles or policies."""
        ...


D = TypeVar("D", bound=Document)


@dataclass(frozen=True, slots=True)
class KeptManifest:
    """One version. `at`: seconds since the epoch. `size`: number of routes, rules or profiles, if known.

    `stored`: the document as JSON text, compressed and in Base64 if `packed`; None: the version has no manifest.
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
        """The document as JSON text; None if the version has no manifest. Raises `ValueError` if it is damaged."""
        if not self.packed or self.stored is None:
            return self.stored
        try:
            unpacker = zlib.decompressobj()
            # With a limit: a small parameter of another program could otherwise unpack to any size.
            content = unpacker.decompress(base64.b64decode(self.stored, validate=True), 4 * MAX_CHARACTERS)
        except (zlib.error, binascii.Error) as error:
            raise ValueError("the stored manifest is damaged") from error
        if not unpacker.eof:
            raise ValueError("the stored manifest is damaged or too large")
        return content.decode()

    def parameter(self) -> dict[str, Any]:
        """The version as a parameter value."""
        value = {"version": self.version, "author": self.author, "at": self.at, "manifest": self.stored}
        extra = {"packed": True} if self.packed else {}
        return value | extra | ({} if self.size is None else {"size": self.size})


@dataclass(frozen=True, slots=True)
class ManifestChange:
    """The result of a change of a manifest."""

    kept: KeptManifest
    warnings: tuple[Problem, ...] = ()


class ManifestStore(Generic[D]):
    """The manifests of one pool and kind. `load` parses the text of one and raises `InvalidDocumentError`."""

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
        """Load a manifest; a recently active one is in memory. Raises `InvalidDocumentError`."""
        known = self._loaded.get(text)
        if known is not None:
            return known
        # In a thread: to compile, or to refuse, 200 patterns of 20 characters takes seconds, and would stop the
        # heartbeats of the leader.
        return await off_loop(len(text) * SMALL // SHORT, self._read_whole, text)

    async def load_kept(self, kept: KeptManifest) -> D | None:
        """The manifest of a version; None if it has none. Raises `InvalidDocumentError`."""
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
        """The active version; None if there has never been one. Called often, so a version is loaded only when it
        has changed."""
        value = await self._parameters.get_global_parameter(self._current)
        kept = _read(value)
        if kept is not None and (kept == self._current_checked or await self._is_manifest(kept)):
            self._current_checked = kept
            return kept
        if value is not None:
            # Ignored and not fatal: every leader would fail on it, and no request of the pool would be served.
            self._log.error("stored manifest is invalid, ignoring it", parameter=self._current)
        return None

    @property
    def name(self) -> str:
        """The name of the parameter that stores the active version."""
        return self._current

    async def is_missing(self) -> bool:
        """Whether RabbitMQ stores no active version."""
        return await self._parameters.get_global_parameter(self._current) is None

    async def store_again(self, kept: KeptManifest) -> None:
        """Store this version as the active one."""
        await self._parameters.put_global_parameter(self._current, kept.parameter())

    async def history(self) -> list[KeptManifest]:
        """Every stored version, the newest (the active one) first. Earlier versions are not loaded."""
        current = await self.current()
        found = {} if current is None else {current.version: current}
        value = await self._parameters.get_global_parameter(self._history)
        for kept in map(_read, value if isinstance(value, list) else []):
            if kept is not None:
                found.setdefault(kept.version, kept)
        return sorted(found.values(), key=lambda kept: -kept.version)[:KEPT_VERSIONS]

    async def save(self, manifest: D | None, *, author: str, at: float) -> KeptManifest:
        """Store a manifest as a new version and make it the active one; None: no manifest.

        Raises `InvalidDocumentError` if it is too large.
        """
        before = await self.history()
        # Counted from the history too: a version number must never stand for two manifests.
        version = before[0].version + 1 if before else 1
        size = 0 if manifest is None else manifest.size
        # The size of the text is not known yet; a hundred routes or rules take less than 32 KiB.
        text, new = await off_loop(SMALL // 100 * size, _keep, version, author, at, manifest)
        if len(new.stored or "") > MAX_KEPT_BYTES:
            raise InvalidDocumentError(
                [Problem(f"its compressed size exceeds the limit of {size_text(MAX_KEPT_BYTES)}")]
            )
        kept = [one.parameter() for one in _fitting(new, before)]
        # The history first, with the version that is active until now. Crash in between: that one stays active, and is
        # in both.
        await self._parameters.put_global_parameter(self._history, kept)
        await self._parameters.put_global_parameter(self._current, new.parameter())
        self._current_checked = new
        if text is not None and manifest is not None:
            self._remember(text, manifest)  # the stored text loads to the same manifest
        return new

    def _read_whole(self, text: str) -> D:
        manifest = self._load(text)
        _ = manifest.warnings  # some warnings are computed on access, which takes long, too
        return manifest

    def _remember(self, text: str, manifest: D) -> None:
        self._loaded[text] = manifest
        self._loaded.move_to_end(text)
        while len(self._loaded) > _LOADED:
            self._loaded.popitem(last=False)

    async def _is_manifest(self, kept: KeptManifest) -> bool:
        """Whether the parameter holds a manifest; another program may have written it."""
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
    """The earlier versions that are stored with the new one, the newest first."""
    left, fitting = MAX_HISTORY_BYTES - len(new.stored or ""), []
    for kept in before[: KEPT_VERSIONS - 1]:
        left -= len(kept.stored or "")
        if left < 0:
            # The oldest are dropped first: a version in the middle must not be missing between two that are there.
            break
        fitting.append(kept)
    return fitting


def _read(value: object) -> KeptManifest | None:
    """Parse a stored version; None if malformed."""
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
