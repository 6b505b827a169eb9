"""The manifests of a pool as RabbitMQ keeps them: versions, their order, and what somebody else wrote."""

from __future__ import annotations

import json

import pytest
import structlog

from osrdyne.ingress.manifest import Manifest, load_manifest
from osrdyne.pool.manifest_store import KEPT_VERSIONS, ManifestKind, ManifestStore
from osrdyne.pool.route_store import RouteStore
from osrdyne.testing.parameters import Parameters


def manifest(*names: str) -> Manifest:
    return load_manifest(json.dumps({"routes": dict.fromkeys(names, "FROM /* INTO $upstream")}))


async def test_pool_has_no_manifest_at_first() -> None:
    store = RouteStore(Parameters(), pool="p")
    assert (await store.current(), await store.history()) == (None, [])


async def test_latest_version_is_in_force_and_earlier_ones_are_kept() -> None:
    parameters = Parameters()
    for number in range(3):
        await RouteStore(parameters, pool="p").save(manifest(f"r{number}"), author=f"a{number}", at=float(number))
    versions = await RouteStore(parameters, pool="p").history()
    assert [(kept.version, kept.author, kept.at) for kept in versions] == [
        (3, "a2", 2.0),
        (2, "a1", 1.0),
        (1, "a0", 0.0),
    ]
    assert [route.name for route in load_manifest(versions[0].manifest).routes] == ["r2"]


async def test_kept_manifest_is_read_once_until_another_one_is_kept() -> None:
    read: list[str] = []

    def load(text: str) -> Manifest:
        read.append(text)
        return load_manifest(text)

    parameters = Parameters()
    kept = await RouteStore(parameters, pool="p").save(manifest("a"), author="me", at=0.0)
    store = ManifestStore(parameters, pool="p", kind=ManifestKind.ROUTES, load=load)
    assert [await store.current() for _ in range(3)] == [kept] * 3
    assert store.load(kept.manifest) == load_manifest(kept.manifest)
    await store.save(manifest("b"), author="me", at=1.0)
    await store.current()
    assert read == [kept.manifest]


async def test_only_the_last_versions_are_kept() -> None:
    store = RouteStore(Parameters(), pool="p")
    for _ in range(KEPT_VERSIONS + 5):
        await store.save(manifest("r"), author="me", at=0.0)
    assert len(await store.history()) == KEPT_VERSIONS + 1


async def test_order_of_routes_is_kept_although_rabbitmq_keeps_none() -> None:
    names = [f"r{number}" for number in (3, 1, 2)]
    parameters = Parameters()
    await RouteStore(parameters, pool="p").save(manifest(*names), author="me", at=0.0)
    parameters.values = json.loads(json.dumps(parameters.values, sort_keys=True))
    current = await RouteStore(parameters, pool="p").current()
    assert current is not None
    assert [route.name for route in load_manifest(current.manifest).routes] == names


async def test_crash_between_history_and_version_leaves_no_version_twice() -> None:
    parameters = Parameters()
    store = RouteStore(parameters, pool="p")
    await store.save(manifest("a"), author="me", at=0.0)
    before = dict(parameters.values)
    await store.save(manifest("b"), author="me", at=0.0)
    parameters.values["osrdyne-p-routes"] = before["osrdyne-p-routes"]
    assert [kept.version for kept in await store.history()] == [1]


@pytest.mark.parametrize("value", [7, "x", [], {"version": 1}, {"version": 1, "author": "a", "at": 0, "manifest": "{"}])
async def test_nonsense_of_somebody_else_is_no_version_and_is_told(value: object) -> None:
    parameters = Parameters()
    parameters.values["osrdyne-p-routes"] = value
    with structlog.testing.capture_logs() as logs:
        assert await RouteStore(parameters, pool="p").current() is None
    assert [entry["log_level"] for entry in logs] == ["error"]
