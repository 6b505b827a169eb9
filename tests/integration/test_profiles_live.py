"""Profiles over HTTP, with a whole daemon, a real broker and real worker processes that echo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from daemon_in_process import PATIENCE, api_of, echo_settings, group_of, running_daemon, until

from osrdyne.client import AsyncClient
from osrdyne.config.models import BrokerSettings, Settings
from osrdyne.config.profiles import Profile
from osrdyne.daemon.daemon import Daemon

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("processes")]

DOCUMENT = {"profiles": [{"match": "big/{n}", "concurrency": 4, "unbind_delay": 120}]}


@pytest.fixture
def settings(broker_settings: BrokerSettings, pool_id: str, tmp_path: Path) -> Settings:
    plain = echo_settings(broker_settings, pool_id, tmp_path)
    worker = plain.worker.model_copy(update={"profiles": (Profile(match="small/{n}", concurrency=2),)})
    return plain.model_copy(update={"worker": worker})


async def workers_of(daemon: Daemon, key: str) -> dict[str, str]:
    """The ready workers of a group, and how many there are of all states."""
    found: list[dict[str, Any]] = (await group_of(daemon, key))["workers"]
    return {worker["worker_id"]: worker["state"] for worker in found}


async def test_profiles_are_changed_live_and_survive_the_daemon(settings: Settings) -> None:
    uri = settings.broker.uri.get_secret_value()
    async with running_daemon(settings, stop_workers=False) as daemon, api_of(daemon) as api:
        async with AsyncClient(uri, settings.pool.id) as client:
            for key in ("big/1", "small/1"):
                assert (await client.call(key, "/echo", b"1", timeout=PATIENCE)).body
            [old] = await workers_of(daemon, "big/1")
            refused = await api.put("/v1/profiles", json={"profiles": [{"match": "{"}]}, params={"author": "me"})
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid-document")
            changed = await api.put("/v1/profiles", json=DOCUMENT, params={"author": "me"})
            assert changed.json()["changed_groups"] == 2

            async def replaced() -> bool:
                await client.call("big/1", "/echo", b"1", timeout=PATIENCE)
                now = await workers_of(daemon, "big/1")
                return old not in now and len(now) == 1

            await until(replaced, "the worker of the profile is replaced")
        group = await group_of(daemon, "big/1")
        assert (group["profile"], group["settings"]["concurrency"], group["settings"]["unbind_delay"]) == (
            "big/{n}", 4, 120.0,
        )  # fmt: skip
        [present] = await workers_of(daemon, "big/1")
    async with running_daemon(settings) as daemon, api_of(daemon) as api:
        assert (await api.get("/v1/profiles")).json()["current"]["author"] == "me"
        assert present in await workers_of(daemon, "big/1")
        assert (await group_of(daemon, "small/1"))["profile"] is None
        cleared = await api.delete(
            "/v1/profiles", params={"author": "me"}, headers={"content-type": "application/json"}
        )
        assert cleared.json()["version"] == 2
        assert (await group_of(daemon, "small/1"))["profile"] == "small/{n}"
        assert [one["size"] for one in (await api.get("/v1/profiles/history")).json()["versions"]] == [None, 1]
