"""Snapshots of state: what is saved is read, and what cannot be read is refused as a whole."""

import json
import zlib

import pytest
import structlog

from osrdyne.errors import BrokerSilentError, BrokerUnavailableError, LeadershipLostError
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.pool.state import snapshots
from osrdyne.pool.state.snapshots import SnapshotStore
from osrdyne.testing.fakes.snapshots import MemorySnapshots


def parse(value: object) -> dict[str, int]:
    if not isinstance(value, dict):
        raise InvalidDocumentError([Problem("an object is expected")])
    return value


def store_in(storage: MemorySnapshots) -> SnapshotStore[dict[str, int]]:
    return SnapshotStore(storage, pool="p", encode=lambda state: state, parse=parse)


@pytest.mark.parametrize("count", [0, 1, 50_000], ids=["empty", "small", "large"])
async def test_saved_state_is_loaded_again(count):
    storage, state = MemorySnapshots(), {f"é{number}": number for number in range(count)}
    for _ in range(2):  # the second time in a thread if it is large
        assert await store_in(storage).save(state)
    assert await store_in(storage).load() == state


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", zlib.compress(b"{"), zlib.compress(b"[]"), zlib.compress(b"{}")[:-1], zlib.compress(b"[" * 100_000)],
    ids=["empty", "plain", "no JSON", "other values", "cut", "nested"],
)
@pytest.mark.proves("controller/snapshot-damaged-queue-available")
async def test_snapshot_that_cannot_be_read_is_refused_with_a_warning(content):
    with structlog.testing.capture_logs() as logs:
        assert await store_in(MemorySnapshots(content)).load() is None
    assert [line["log_level"] for line in logs] == ["warning"]


async def test_snapshot_that_is_too_large_is_neither_loaded_nor_saved(monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_TEXT_BYTES", 1000)
    storage = MemorySnapshots(zlib.compress(json.dumps({"a": " " * 2000}).encode()))
    assert await store_in(storage).load() is None
    monkeypatch.setattr(snapshots, "MAX_SNAPSHOT_BYTES", 5)
    before = storage.content
    assert not await store_in(storage).save({"a": 1})
    assert storage.content == before


@pytest.mark.proves("controller/snapshot-damaged-queue-available")
async def test_silent_queue_does_not_end_the_term_and_lost_leadership_does():
    storage = MemorySnapshots()
    storage.error = BrokerSilentError("silent")
    assert not await store_in(storage).save({})
    storage.error = BrokerUnavailableError("no listing")
    assert await store_in(storage).load() is None
    storage.error = LeadershipLostError("lost")
    for call in (store_in(storage).save({}), store_in(storage).load()):
        with pytest.raises(LeadershipLostError):
            await call
