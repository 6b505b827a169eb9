"""The poison inventory for programs: `PoisonClient` is a blocking client of the daemon's HTTP API.

Reading consumes nothing. Only `replay` and `drop` change entries, and only those that are named.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from osrdyne.client.daemon_api import TIMEOUT, DaemonApi
from osrdyne.protocol.poison import PoisonOutcome as PoisonOutcome
from osrdyne.protocol.poison import PoisonRecord, WorkerDeath

PAGE = 100


@dataclass(frozen=True, slots=True)
class PoisonEntry(PoisonRecord):
    """One entry of the inventory. `document`: the entry as the API returned it."""

    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PoisonEntry:
        """Parse an entry of an answer of the API."""
        values = {one.name: document[one.name] for one in fields(PoisonRecord)}
        if values["body"] is not None:
            encoded = values["body"].encode()
            # The API writes a body that is not UTF-8 in Base64.
            values["body"] = base64.b64decode(encoded) if document["body_encoding"] == "base64" else encoded
        values["deaths"] = tuple(map(_death, document["deaths"]))
        return cls(**values, document=document)


def _death(document: Mapping[str, Any]) -> WorkerDeath:
    # By name: a newer daemon may return further fields.
    values = {one.name: document[one.name] for one in fields(WorkerDeath)}
    return WorkerDeath(**{**values, "log_lines": tuple(values["log_lines"])})


class PoisonClient:
    """The inventory of one pool, by the address of the API of one of its daemons, leader or standby.

    Every method raises `OsrdyneError` if the call fails. `timeout`: seconds for one answer. `token`: an API token; by
    default that of the environment (`OSRDYNE_API_TOKEN`, `OSRDYNE_API_TOKEN_FILE`). `ca_file`: authorities to trust for
    https.
    """

    def __init__(
        self, url: str, *, timeout: float = TIMEOUT, token: str | None = None, ca_file: str | None = None
    ) -> None:
        self._api = DaemonApi(url, timeout=timeout, token=token, ca_file=ca_file)

    def entries(
        self,
        *,
        keys: Iterable[str] = (),
        path: str | None = None,
        older_than: float | None = None,
        newer_than: float | None = None,
        bodies: bool = False,
    ) -> Iterator[PoisonEntry]:
        """All entries that match, oldest first; read in pages. `older_than`, `newer_than`: their age in seconds."""
        after = None
        while True:
            page = self._api.get(
                "/v1/poison",
                key=list(keys),
                path=path,
                older_than=older_than,
                newer_than=newer_than,
                bodies=bodies,
                limit=PAGE,
                after=after,
            )
            yield from map(PoisonEntry.from_document, page["entries"])
            after = page["next"]
            if after is None:
                return

    def entry(self, name: str) -> PoisonEntry:
        """One entry with its body, by its id or the beginning of it."""
        return PoisonEntry.from_document(self._api.get(f"/v1/poison/{name}"))

    def replay(self, *entries: str) -> PoisonOutcome:
        """Publish requests again unchanged, and remove their entries. After an error some may be published twice."""
        return self._act("replay", entries)

    def drop(self, *entries: str) -> PoisonOutcome:
        """Remove entries permanently."""
        return self._act("drop", entries)

    def _act(self, action: str, entries: tuple[str, ...]) -> PoisonOutcome:
        answers = [
            self._api.post(f"/v1/poison/{action}", id=list(entries[start : start + PAGE]))
            for start in range(0, len(entries), PAGE)
        ]
        return PoisonOutcome(
            done=tuple(name for answer in answers for name in answer["done"]),
            missing=tuple(name for answer in answers for name in answer["missing"]),
            refused={name: why for answer in answers for name, why in answer["refused"].items()},
        )
