"""The manifests of a pool as RabbitMQ keeps them: versions, their order, and what another program wrote."""

import asyncio
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import structlog

from osrdyne.config.models import PoolSettings, Settings
from osrdyne.errors import PoolConflictError, VersionConflictError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.policies.manifest import load_policies
from osrdyne.ingress.routes.manifest import Manifest, load_manifest
from osrdyne.pool.routing.active_manifest import ActiveSplitter
from osrdyne.pool.routing.manifest_store import KEPT_VERSIONS, ManifestKind, ManifestStore
from osrdyne.pool.routing.routes import RouteStore
from osrdyne.testing.fakes.context import make_context
from osrdyne.testing.fakes.management import Parameters


def manifest(*names: str) -> Manifest:
    return load_manifest(json.dumps({"routes": dict.fromkeys(names, "FROM /* INTO $upstream")}))


@pytest.fixture
def read():
    """The texts that a store with `loading(read)` loaded."""
    return []


def loading(read: list[str]) -> Callable[[str], Manifest]:
    def load(text: str) -> Manifest:
        read.append(text)
        return load_manifest(text)

    return load


async def test_latest_version_is_active_and_the_last_ones_are_kept():
    """RabbitMQ keeps no order of the routes."""
    parameters = Parameters()
    assert await RouteStore(parameters, pool="p").current() is None
    for number in range(KEPT_VERSIONS + 5):
        await RouteStore(parameters, pool="p").save(manifest(f"r{number}", "b", "a"), author=f"a{number}", at=number)
    parameters.values = json.loads(json.dumps(parameters.values, sort_keys=True))
    versions = await RouteStore(parameters, pool="p").history()
    newest = range(KEPT_VERSIONS + 5, 5, -1)
    assert [(kept.version, kept.author, kept.at) for kept in versions] == [(n, f"a{n - 1}", n - 1.0) for n in newest]
    assert len(versions) == KEPT_VERSIONS == 20  # as in docs/reference/routes
    assert [route.name for route in load_manifest(versions[0].manifest).routes] == [f"r{KEPT_VERSIONS + 4}", "b", "a"]
    assert await RouteStore(parameters, pool="p").current() == versions[0]


async def test_kept_manifest_is_read_once_until_another_one_is_kept(read):
    parameters = Parameters()
    kept = await RouteStore(parameters, pool="p").save(manifest("a"), author="me", at=0.0)
    store = ManifestStore(parameters, pool="p", kind=ManifestKind.ROUTES, load=loading(read))
    assert [await store.current() for _ in range(3)] == [kept] * 3
    assert await store.load(kept.manifest or "") == load_manifest(kept.manifest or "")
    await store.save(manifest("b"), author="me", at=1.0)
    await store.current()
    assert read == [kept.manifest]


async def test_manifest_with_twenty_patterns_is_loaded_outside_of_the_event_loop():
    threads: list[threading.Thread] = []

    def load(text):
        threads.append(threading.current_thread())
        return load_policies(text)

    store = ManifestStore(Parameters(), pool="p", kind=ManifestKind.POLICIES, load=load)
    # RE2 refuses each after milliseconds, which no limit of the length prevents.
    policies = [{"match": f"{number}{{a:\\pL{{500}}}}"} for number in range(20)]
    with pytest.raises(InvalidDocumentError):
        await store.load(json.dumps({"policies": policies}))
    assert threading.current_thread() not in threads != []


async def test_large_manifest_is_kept_compressed_and_its_history_is_not_read(read):
    parameters = Parameters()
    names = [f"route-number-{number}" for number in range(2_000)]
    store = RouteStore(parameters, pool="p")
    for _ in range(3):
        await store.save(manifest(*names), author="me", at=0.0)
    assert len(json.dumps(parameters.values)) < len(json.dumps(manifest(*names).document())) / 2
    other = ManifestStore(parameters, pool="p", kind=ManifestKind.ROUTES, load=loading(read))
    for _ in range(3):
        versions = await other.history()
    assert len(read) == 1  # the one in force
    assert [(kept.version, kept.size) for kept in versions] == [(3, 2_000), (2, 2_000), (1, 2_000)]
    assert [route.name for route in load_manifest(versions[-1].manifest or "").routes] == names


async def test_manifest_that_is_too_large_to_be_kept_is_refused_and_changes_nothing():
    parameters = Parameters()
    store = RouteStore(parameters, pool="p")
    noise = secrets.token_bytes(3 * 2**20).hex()
    large = Manifest((replace(manifest("r").routes[0], text=noise),) * 101)
    with pytest.raises(InvalidDocumentError, match="4MiB"):
        await store.save(large, author="me", at=0.0)
    assert parameters.values == {}


@pytest.mark.parametrize("stored", ["", "x", "AAAA", "eJw="])
async def test_damaged_version_is_not_a_manifest_and_its_history_is_still_shown(stored):
    parameters = Parameters()
    store = RouteStore(parameters, pool="p")
    for _ in range(2):
        await store.save(manifest("r"), author="me", at=0.0)
    history = parameters.values["osrdyne-p-routes-history"]
    assert isinstance(history, list)
    history[0] |= {"manifest": stored, "packed": True}
    first, damaged = await store.history()
    assert first.manifest is not None
    with pytest.raises(InvalidDocumentError):
        await store.load_kept(damaged)


class TestChanges:
    """What a term does with them."""

    RULES = '{"a.*": {"postfixFromStatic": ["x"]}}'

    def splitter(self, parameters: Parameters) -> ActiveSplitter:
        return ActiveSplitter(make_context(Settings(pool=PoolSettings(id="p", kind="managed"))), parameters)

    async def test_of_two_changes_of_one_version_one_is_made(self):
        splitter = self.splitter(Parameters())
        changes = [splitter.change_text(self.RULES, author=f"a{number}", expected=0) for number in range(5)]
        outcomes = await asyncio.gather(*changes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes].count(VersionConflictError) == 4
        assert len(await splitter.history()) == 1

    async def test_cleared_splitter_splits_nothing_in_this_term_and_in_the_next(self):
        parameters = Parameters()
        splitter = self.splitter(parameters)
        await splitter.change_text(self.RULES, author="me")
        assert splitter.splitter is not None
        await splitter.clear(author="me", expected=1)
        assert splitter.splitter is None
        with pytest.raises(PoolConflictError):
            await splitter.clear(author="me")
        following = self.splitter(parameters)
        await following.load()
        assert following.splitter is None
        await following.restore(1, author="me")
        assert following.splitter is not None
        assert [kept.version for kept in await following.history()] == [3, 2, 1]


async def test_crash_between_history_and_version_leaves_no_version_twice():
    parameters = Parameters()
    store = RouteStore(parameters, pool="p")
    await store.save(manifest("a"), author="me", at=0.0)
    before = dict(parameters.values)
    await store.save(manifest("b"), author="me", at=0.0)
    parameters.values["osrdyne-p-routes"] = before["osrdyne-p-routes"]
    assert [kept.version for kept in await store.history()] == [1]


@pytest.mark.parametrize("value", [7, "x", [], {"version": 1}, {"version": 1, "author": "a", "at": 0, "manifest": "{"}])
async def test_foreign_value_is_not_a_version_and_is_reported(value):
    parameters = Parameters()
    parameters.values["osrdyne-p-routes"] = value
    with structlog.testing.capture_logs() as logs:
        assert await RouteStore(parameters, pool="p").current() is None
    assert [entry["log_level"] for entry in logs] == ["error"]
