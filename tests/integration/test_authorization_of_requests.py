"""Tokens of requests with a whole daemon, real workers and a real broker."""

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from daemon_in_process import PATIENCE, api_of, echo_settings, managed_settings, running_daemon
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

from osrdyne.auth.grants import ALL_KEYS, Grant
from osrdyne.auth.tokens import Token, digest_of, generate_token, render_tokens
from osrdyne.client import AsyncClient, ForbiddenError, RequestError, UnauthorizedError
from osrdyne.config.models import ApiSettings, BrokerSettings, DriverSettings, JwtSettings
from osrdyne.daemon.daemon import Daemon

pytestmark = pytest.mark.usefixtures("processes")

APP = "tests.integration.principal_app:app"
ISSUER, AUDIENCE = "https://issuer.example", "osrdyne"
OWN, FOREIGN = RSAKey.generate_key(2048), RSAKey.generate_key(2048)
ADMIN = generate_token()
TABLE = "tpch/lineitem"


def signed(key: RSAKey | OctKey = OWN, algorithm: str = "RS256", **changes: Any) -> str:
    sound = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600, "Send": "tpch/{table}"}
    return jwt.encode({"alg": algorithm}, sound | changes, key, algorithms=[algorithm])


@asynccontextmanager
async def guarding(broker: BrokerSettings, pool_id: str, directory: Path) -> AsyncIterator[Daemon]:
    """A daemon that knows an issuer and one API token, and demands grants for the keys `tpch/…`."""
    public, tokens = directory / "issuer.pem", directory / "tokens.json"
    public.write_bytes(OWN.as_pem(private=False))
    admin = Token("admin", dict.fromkeys(Grant, ALL_KEYS), digest_of(ADMIN), datetime.now(UTC))
    tokens.write_text(render_tokens([admin]))
    issuer = JwtSettings(algorithm="RS256", key_file=str(public), issuer=ISSUER, audience=AUDIENCE)
    echo = echo_settings(broker, pool_id, directory)
    worker = echo.worker.model_copy(update={"app": APP})
    command = [str(Path(sys.executable).with_name("osrdyne-worker")), APP]
    driver = DriverSettings(name="subprocess", options=echo.driver.options | {"command": command})
    api = ApiSettings(port=0, tokens_file=str(tokens), jwt=issuer)
    settings = managed_settings(broker, pool_id, directory, driver=driver, worker=worker, api=api)
    async with running_daemon(settings) as daemon:
        async with admin_of(daemon) as api:
            policies = {"policies": [{"match": "tpch/{table}", "Authorization": "RequiredToSend"}]}
            (await api.put("/v1/policies", json=policies, params={"author": "test"})).raise_for_status()
        yield daemon


def admin_of(daemon: Daemon) -> httpx.AsyncClient:
    return api_of(daemon, headers={"authorization": f"Bearer {ADMIN}", "content-type": "application/json"})


@pytest.mark.proves("managed/client-sends-token-one")
async def test_only_the_right_token_reaches_a_worker_and_none_is_left_behind(broker_settings, pool_id, tmp_path, capfd):
    refused: dict[str, tuple[str | None, type[RequestError]]] = {
        "none": (None, UnauthorizedError),
        "expired": (signed(exp=int(time.time()) - 120), UnauthorizedError),
        "wrong algorithm": (signed(OctKey.generate_key(256), "HS256"), UnauthorizedError),
        "wrong signature": (signed(FOREIGN), UnauthorizedError),
        "unknown": (generate_token(), UnauthorizedError),
        "other keys": (signed(Send="spark/{table}"), ForbiddenError),
        "no right to send": (signed(Send=False), ForbiddenError),
    }
    right, given = signed(), [token for token, _ in refused.values() if token is not None]
    uri = broker_settings.uri.get_secret_value()
    async with guarding(broker_settings, pool_id, tmp_path) as daemon:
        for name, (token, kind) in refused.items():
            async with AsyncClient(uri, pool_id, token=token, default_timeout=PATIENCE) as client:
                with pytest.raises(kind) as error:
                    await client.call(TABLE, "/whoami")
                assert token is None or token not in f"{error.value} {error.value.reply}", name
        async with admin_of(daemon) as api:
            assert (await api.get("/v1/groups")).json()["groups"] == []
        tokens = iter([right, ADMIN])
        async with AsyncClient(uri, pool_id, token=lambda: next(tokens), default_timeout=PATIENCE) as client:
            forged = {"x-osrdyne-principal": "root"}
            seen = [(await client.call(TABLE, "/whoami", headers=forged)).json() for _ in range(2)]
    assert [one["principal"] for one in seen] == ["alice", "admin"]
    assert "authorization" not in seen[0]["headers"]
    written = "".join(capfd.readouterr()) + "".join(
        file.read_text(errors="replace") for file in (tmp_path / "logs").rglob("*") if file.is_file()
    )
    assert "request refused" in written
    assert [token for token in (*given, right, ADMIN) if token in written] == []
