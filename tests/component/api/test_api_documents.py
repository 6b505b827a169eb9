"""The documents of all kinds over HTTP, over a fake pool: versions, refusals, limits. No socket."""

import httpx
import pytest

from osrdyne.api.app import create_app
from osrdyne.api.bodies import BodyLimits
from osrdyne.metrics import Metrics
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.testing.fakes.inspector import FakeInspector

JSON = {"content-type": "application/json"}
ME, YOU = {"author": "me"}, {"author": "you"}
DOCUMENTS = {
    ManifestKind.ROUTES: ({"routes": {"r": "FROM /* INTO $upstream"}}, {"routes": {}}, {"routes": {"b": 3}}),
    ManifestKind.SPLITTER: ({"b.*": {"postfixFromStatic": ["x"]}}, {}, {"a(": {}}),
    ManifestKind.PROFILES: (
        {"profiles": [{"match": "a", "concurrency": 2}]},
        {"profiles": []},
        {"profiles": [{"match": "{"}]},
    ),
    ManifestKind.POLICIES: (
        {"policies": [{"match": "a/{x}", "MaxMessageAge": 30.0}]},
        {"policies": []},
        {"policies": [{"match": "{"}]},
    ),
    ManifestKind.QUOTA: ({"pool": {"messages_per_day": 10}}, {"pool": {"messages_per_day": 5}}, {"pool": {}}),
    ManifestKind.CIRCUITS: ({"statisticsUpdateEnabled": True}, {}, {"minQueueSampleCount": 0}),
}
"""Two documents of each kind, and a wrong one."""


@pytest.fixture
async def api():
    app = create_app(FakeInspector(), Metrics(), version="1", limits=BodyLimits(body=10, manifest=1000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api", headers=JSON) as client:
        yield client


@pytest.mark.parametrize("kind", ManifestKind)
async def test_document_has_versions_and_can_go_back(api, kind):
    path, (document, other, _) = f"/v1/{kind.path}", DOCUMENTS[kind]
    empty = (await api.get(path)).json()
    assert (empty["pool"], empty["version"], empty["current"]) == ("fake", 0, None)
    assert (await api.put(path, json=document, params=ME)).json()["version"] == 1
    assert (await api.put(path, json=other, params=ME)).json()["version"] == 2
    assert (await api.delete(path, params=YOU)).json()["version"] == 3
    cleared = (await api.get(path)).json()
    assert (cleared["version"], cleared["current"]) == (3, None)
    await api.post(f"{path}/rollback", params={"version": 1, **YOU})
    versions = (await api.get(f"{path}/history")).json()["versions"]
    assert [(one["version"], one["author"]) for one in versions] == [(4, "you"), (3, "you"), (2, "me"), (1, "me")]
    again, none, _, first = [one["manifest"] for one in versions]
    assert again == first == first | document
    assert none is None
    assert (await api.get(path)).json()["current"]["manifest"] == first


@pytest.mark.parametrize("kind", ManifestKind)
async def test_wrong_change_is_refused_and_changes_nothing(api, kind):
    path, (document, _, wrong) = f"/v1/{kind.path}", DOCUMENTS[kind]
    refused = await api.put(path, json=wrong, params=ME)
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid-document")
    assert f"osrdyne {kind.path.replace('/', ' ')} check" in refused.json()["remedy"]
    assert (await api.put(path, json=document)).status_code == 422  # by whom?
    assert (await api.post(f"{path}/rollback", params={"version": 9, **ME})).status_code == 409
    assert (await api.get(path)).json()["version"] == 0
    small, large = [await api.put(path, content=f"{{{' ' * size}}}", params=ME) for size in (20, 2000)]
    assert (small.status_code != 413, large.status_code, large.json()["limit"]) == (True, 413, 1000)


@pytest.mark.parametrize("kind", ManifestKind)
async def test_change_of_another_version_than_expected_is_refused(api, kind):
    path, document = f"/v1/{kind.path}", DOCUMENTS[kind][0]

    async def put(version):
        return await api.put(path, json=document, params=ME, headers={"if-match": version})

    assert (await put('"1"')).status_code == 412
    assert (await put('"0"')).status_code == 200
    stale = await put('"0"')
    assert (stale.status_code, stale.json()["code"], stale.json()["version"]) == (412, "version-conflict", 1)
    assert (await api.get(path)).headers["etag"] == '"1"'
    assert (await put('"1"')).status_code == 200
    old, who = {"if-match": '"1"'}, {"author": "a", "version": "1"}
    assert (await api.delete(path, params=who, headers=old)).status_code == 412
    assert (await api.post(f"{path}/rollback", params=who, headers=old)).status_code == 412
    assert (await put("W/x")).status_code == 400
