"""Records of changes with whole daemons and a real broker: what is kept, and what is dropped."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpx
import pytest
from daemon_in_process import api_of, managed_settings, running_daemon

from osrdyne.amqp import Message
from osrdyne.auth.grants import Role, grants_of
from osrdyne.auth.tokens import Token, digest_of, generate_token, render_tokens
from osrdyne.config.models import ApiSettings, AuditSettings, PoolSettings, Settings
from osrdyne.protocol.names import PoolNames

pytestmark = pytest.mark.usefixtures("processes")

KEPT = 100


@pytest.fixture
def secret():
    return generate_token()


@pytest.fixture
def settings(broker_settings, pool_id, tmp_path, secret):
    file = tmp_path / "tokens.json"
    token = Token("alice", grants_of(Role.ADMIN), digest_of(secret), datetime.now(UTC), None)
    file.write_text(render_tokens([token]))
    changes = {
        "pool": PoolSettings(id=pool_id),
        "audit": AuditSettings(max_changes=KEPT, required=True),
        "api": ApiSettings(port=0, tokens_file=str(file)),
    }
    return managed_settings(broker_settings, pool_id, tmp_path, **changes)


@asynccontextmanager
async def daemon_api(settings: Settings, secret: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    async with running_daemon(settings) as daemon, api_of(daemon, headers=headers) as api:
        yield api


@pytest.mark.proves("api/client-forges-record-queue")
async def test_records_outlive_daemons_within_their_bounds(settings, secret, pool_id, channel, management):
    names = PoolNames(pool_id)
    async with daemon_api(settings, secret) as api:
        answer = await api.put("/v1/profiles?author=x", json={"profiles": [{"match": "a", "concurrency": 2}]})
        assert answer.status_code == 200
        assert (await api.post("/v1/groups/a/pin")).status_code == 202
        assert (await api.post("/v1/groups/a/stop")).status_code == 409
        forged = (await api.get("/v1/audit")).json()["entries"][0] | {"principal": "mallory"}
        # As a worker could, which may answer to any queue.
        await channel.publish(Message(json.dumps(forged).encode()), exchange="", routing_key=names.audit_queue)
        policy = await management.get_policy(names.audit_policy)
        assert policy is not None
        assert policy.definition == {"max-length": 2 * KEPT, "message-ttl": 30 * 86_400_000}

    async with daemon_api(settings, secret) as api:
        audit = (await api.get("/v1/audit")).json()
        shown = [(one["principal"], one["action"], one["target"], one["outcome"]) for one in audit["entries"]]
        assert shown == [
            ("alice", "groups.stop", "a", "refused"),
            ("alice", "groups.pin", "a", "done"),
            ("alice", "profiles.put", None, "done"),
        ]
        assert audit["entries"][2]["digest_after"] is not None
        assert audit["total"] == 3
