"""The poison inventory for programs: `PoisonClient` asks the daemon's HTTP API, blocking.

Reading consumes nothing. Only `replay` and `drop` change something, and only entries that are named.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from osrdyne.client.daemon_api import TIMEOUT, DaemonApi

PAGE = 100


@dataclass(frozen=True, slots=True)
class PoisonEntry:
    """One request that no worker survived, or that was given back too often.

    `deliveries` is RabbitMQ's count, `unexplained` how many of them no known death of a worker explains; `deaths` are
    documents with `worker_id`, `ended_with`, `said`, `at`, `log_lines` and `others`. Times are seconds since the epoch,
    None if unknown; so is the key of a message that osrdyne did not put there. `body` is None in a list without
    bodies. `document` is all of it as the API answered.
    """

    id: str
    key: str | None
    path: str
    correlation_id: str | None
    reason: str
    deliveries: int | None
    unexplained: int | None
    finding: str
    deaths: tuple[Mapping[str, Any], ...]
    replays: int
    first_at: float | None
    last_at: float | None
    headers: Mapping[str, Any]
    body: bytes | None
    document: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> PoisonEntry:
        body: str | None = document["body"]
        raw = (
            None if body is None else base64.b64decode(body) if document["body_encoding"] == "base64" else body.encode()
        )
        names = ("id", "key", "path", "correlation_id", "reason", "deliveries", "unexplained", "finding", "replays",
                 "first_at", "last_at", "headers")  # fmt: skip
        known = {name: document[name] for name in names}
        return cls(**known, deaths=tuple(document["deaths"]), body=raw, document=document)


@dataclass(frozen=True, slots=True)
class PoisonOutcome:
    """The ids of entries that were `done`, that were `missing`, and that were `refused`, with the reason."""

    done: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


class PoisonClient:
    """The inventory of one pool, by the address of a daemon's API; a standby sends it on to the leader.

    Every method raises `OsrdyneError` when that does not work. `timeout` in seconds, for one answer. `token` is an API
    token; without it the environment's is used (`OSRDYNE_API_TOKEN`, `OSRDYNE_API_TOKEN_FILE`). `ca_file`: authorities
    to trust for https.
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
        """All entries that match, oldest first, a page at a time. `older_than`, `newer_than`: seconds since it came."""
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
        """Send requests again as they were, and remove their entries. What fails half-way may be sent twice."""
        return self._act("replay", entries)

    def drop(self, *entries: str) -> PoisonOutcome:
        """Remove entries for good."""
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
