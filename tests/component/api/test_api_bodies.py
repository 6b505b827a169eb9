"""Limits of the bodies of requests."""

from __future__ import annotations

import httpx
import pytest

from osrdyne.api.app import create_app
from osrdyne.api.bodies import BodyLimits
from osrdyne.metrics import Metrics
from osrdyne.pool.routing.manifest_store import ManifestKind
from osrdyne.testing.fakes.inspector import FakeInspector


@pytest.mark.parametrize("kind", ManifestKind)
async def test_document_of_each_kind_has_the_limit_of_manifests(kind: ManifestKind) -> None:
    app = create_app(FakeInspector(), Metrics(), version="1", limits=BodyLimits(body=10, manifest=100))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        headers, path = {"content-type": "application/json"}, f"/v1/{kind.path}?author=a"
        answers = [await client.put(path, content=f"{{{' ' * size}}}", headers=headers) for size in (20, 200)]
    assert answers[0].status_code != 413
    assert (answers[1].status_code, answers[1].json()["limit"]) == (413, 100)
