"""Attacks on the HTTP API over real sockets: every endpoint with each kind of token, slow and huge requests."""

import asyncio
import itertools
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.api.access.authenticators import authenticators_of
from osrdyne.api.access.checks import Access
from osrdyne.api.access.guard import hosts_of
from osrdyne.api.access.token_file import TokenFile
from osrdyne.api.app import create_app
from osrdyne.api.bodies import BodyLimits
from osrdyne.api.probes import create_probes
from osrdyne.api.server import ApiServer
from osrdyne.api.unix_socket import UnixListener, find_socket, open_listener
from osrdyne.auth.endpoints import KeysOf, find_endpoint
from osrdyne.auth.grants import ALL_KEYS, Grant, KeyScope, Role, grants_of, parse_scope
from osrdyne.auth.tokens import Token, digest_of, generate_token, parse_tokens, render_tokens
from osrdyne.cli.main import execute
from osrdyne.client.daemon_api import DaemonApi
from osrdyne.config.models import ApiSettings, ApiTlsSettings, PoolSettings, Settings
from osrdyne.errors import ConfigurationError, OsrdyneError, PortTakenError
from osrdyne.metrics import Metrics
from osrdyne.pool.views import ComponentView, RegisteredQueue
from osrdyne.protocol.names import Key
from osrdyne.testing.fakes.inspector import FakeInspector, poison_view

PATIENCE = 120.0
SILENCE = 6.0
"""Seconds of silence after which RabbitMQ gives the leader up: three heartbeats."""
JSON = {"content-type": "application/json"}
NOW = datetime.now(UTC).replace(microsecond=0)
NAMES = ("viewer", "operator", "admin", "all", "sender", "limited", "others", "expired", "revoked")
SECRETS = {name: generate_token() for name in NAMES}
PUBLIC = {("GET", "/health"): 200, ("GET", "/ready"): 200, ("GET", "/v1/queues"): 200, ("GET", "/v1/queue"): 404}
"""Endpoints for everyone, and their answers here. The registry shows only queues whose policy makes them public."""


def kept(
    name: str, role: Role | None, *more: Grant, keys: KeyScope = ALL_KEYS, expires: datetime | None = None
) -> Token:
    return Token(name, grants_of(role, more, keys=keys), digest_of(SECRETS[name]), NOW, expires)


TOKENS = (
    kept("viewer", Role.VIEWER, expires=NOW + timedelta(days=1)),
    kept("operator", Role.OPERATOR),
    kept("admin", Role.ADMIN),
    kept("all", Role.ADMIN, *Grant),
    kept("sender", None, Grant.SEND, Grant.LISTEN),
    kept("limited", Role.ADMIN, *Grant, keys=parse_scope("{key:k|e1}")),
    kept("others", Role.ADMIN, *Grant, keys=parse_scope("other/{key}")),
    kept("expired", Role.ADMIN, *Grant, expires=NOW - timedelta(seconds=1)),
)
GRANTS = {token.name: token.grants for token in TOKENS}


@pytest.fixture
def tokens_file(tmp_path):
    file = tmp_path / "tokens.json"
    file.write_text(render_tokens(TOKENS))
    return file


@asynccontextmanager
async def serving(
    pool: FakeInspector, settings: ApiSettings, *, open_local: Callable[[], UnixListener | None] | None = None
) -> AsyncIterator[ApiServer]:
    """The application as the daemon builds it."""
    access = Access(authenticators_of(settings, clock=SystemClock())[0])
    limits = BodyLimits(settings.max_body, settings.max_manifest, settings.body_timeout)
    hosts = hosts_of(settings.host, settings.allowed_hosts)
    app = create_app(pool, Metrics(), version="1", allowed_hosts=hosts, access=access, limits=limits)
    server = ApiServer(lambda: app, settings, open_local=open_local, make_probes=lambda: create_probes(pool))
    server.bind()
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.run())
            yield server
            task.cancel()
    finally:
        server.close()


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


NOTHING = [("GET", "/no/such/path"), ("DELETE", "/v1/groups/k"), ("TRACE", "/health")]


def endpoints() -> list[tuple[str, str]]:
    paths = create_app(FakeInspector(), Metrics(), version="1").openapi()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [*found, ("GET", "/openapi.json"), *NOTHING]


def filled(path: str) -> str:
    return re.sub(r"\{.*?\}", "e1", path)


BAD_HEADERS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "expired": [("authorization", f"Bearer {SECRETS['expired']}")],
    "revoked": [("authorization", f"Bearer {SECRETS['revoked']}")],
    "empty": [("authorization", "Bearer")],
    "truncated": [("authorization", f"Bearer {SECRETS['operator'][:-1]}")],
    "extended": [("authorization", f"Bearer {SECRETS['operator']}A")],
    "huge": [("authorization", f"Bearer {SECRETS['operator']}{'A' * 30_000}")],
    "basic": [("authorization", f"Basic {SECRETS['operator']}")],
    "digest": [("authorization", f"Bearer {digest_of(SECRETS['operator'])}")],
    "two": [("authorization", f"Bearer {SECRETS['operator']}")] * 2,
    "two kinds": [("authorization", f"Bearer {SECRETS['operator']}"), ("Authorization", "Basic eDp5")],
    "two in one": [("authorization", f"Bearer {SECRETS['operator']}, Bearer {SECRETS['operator']}")],
    "two blanks": [("authorization", f"Bearer  {SECRETS['operator']}")],
    "tab": [("authorization", f"Bearer\t{SECRETS['operator']}")],
    "no scheme": [("authorization", SECRETS["operator"])],
    "other case": [("authorization", f"Bearer {SECRETS['operator'].swapcase()}")],
    "jwt without signature": [("authorization", "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJhIiwicm9sZSI6ImFkbWluIn0.")],
    "latin": [("authorization", "Bearer osr_\xe9\xff")],
}


async def test_no_endpoint_but_probes_and_registry_is_open_to_a_request_without_a_valid_token(tokens_file):
    pool = FakeInspector(poison_views=[poison_view("e1")])
    pool.queue_views[Key("k")] = RegisteredQueue(Key("k"), "osr-k", exists=True, record=None, policy=None)
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    async with serving(pool, settings) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        for (method, path), (kind, given) in itertools.product(endpoints(), BAD_HEADERS.items()):
            headers = [*given, ("content-type", "application/json")]
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            answer = await client.request(method, filled(path), headers=raw, params={"key": "k", "author": "a"})
            if kind == "none" and (method, path) in PUBLIC:
                assert answer.status_code == PUBLIC[method, path], (method, path, kind)
                assert "osr-k" not in answer.text, (method, path, kind)
                continue
            assert answer.status_code == 401, (method, path, kind)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json().get("grant") == find_endpoint(method, filled(path))[0].grant
            assert SECRETS["operator"] not in answer.text
        ready = (await client.get("/ready")).json()
        assert (ready["components"], ready["leader"]) == ([], None)
        assert (await client.get("/ready", headers=bearer(SECRETS["viewer"]))).json()["components"] != []
    assert (pool.group_views, pool.replayed, len(pool.poison_views)) == ({}, [], 1)


def may(name: str, method: str, path: str) -> bool:
    """Whether a token may use an endpoint for the key `k` and the poison entry of that key."""
    endpoint, _ = find_endpoint(method, filled(path))
    scope = GRANTS[name].get(endpoint.grant) if endpoint.grant is not None else ALL_KEYS
    if scope is None:
        return False
    if path == "/v1/poison/{entry}" and Grant.VIEW not in GRANTS[name]:
        return False
    if not scope.is_limited or endpoint.keys is KeysOf.NONE:
        return True
    if endpoint.keys is KeysOf.ALL:
        return False
    filters = path in {"/v1/groups", "/v1/lag", "/status"}
    return filters or name == "limited"


async def test_each_token_reaches_what_the_table_allows_and_nothing_else(tokens_file):
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    pool = FakeInspector()
    async with serving(pool, settings) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        for name, (method, path) in itertools.product(GRANTS, endpoints()):
            if name == "expired":
                continue
            pool.poison_views, pool.group_views, pool.replayed = [poison_view("e1", key=Key("k"))], {}, []
            pool.versions.clear()
            answer = await client.request(
                method, filled(path), headers=bearer(SECRETS[name]) | JSON,
                params={"key": "k", "id": "e1", "author": "a"},
                content='{"key": "k"}' if path == "/v1/explain" else None,
            )  # fmt: skip
            if may(name, method, path):
                assert answer.status_code not in {401, 403}, (name, method, path, answer.text)
            else:
                assert answer.status_code == 403, (name, method, path)
                assert answer.json()["grant"] in list(Grant)
                assert (pool.group_views, pool.replayed, len(pool.poison_views)) == ({}, [], 1)
                assert pool.versions == {}
        for spelling in ("bodies=true", "bodies=1", "%62odies=on", "bodies=false&bodies=yes"):
            answer = await client.get(f"/v1/poison?{spelling}", headers=bearer(SECRETS["admin"]))
            assert (answer.status_code, answer.json()["grant"]) == (403, "bodies"), spelling


ODD_TARGETS = (
    "GET /v1/groups?access_token={token}&token={token}", "GET /v1/groups#{token}", "GET //v1/groups", "GET /v1//groups",
    "GET /v1/groups/", "GET /V1/GROUPS", "GET /health/../v1/groups", "GET /health%2f..%2fv1/groups", "GET /./v1/groups",
    "GET /%76%31/groups", "GET /v1/groups%00", "GET /health%00", "GET /health/", "GET //health", "GET /HEALTH",
    "GET /health;a=b", "GET http://127.0.0.1/v1/groups", "GET http://127.0.0.1/health", "GET /v1/queues/",
    "GET /v1/queues%2f",
    "HEAD /v1/groups", "OPTIONS /v1/groups", "OPTIONS *", "PATCH /v1/routes", "QUERY /v1/groups", "get /v1/groups",
    "POST /health", "PUT /ready", "CONNECT 127.0.0.1:1", "GET /v1/groups/../../health", "GET /v1/metrics", "GET /docs",
)  # fmt: skip
"""Method and target as a client that rewrites nothing sends them. Each would change or show something by mistake."""
HOSTS = {
    "127.0.0.1": 200, "localhost:1": 200, "LOCALHOST": 200, "[::1]": 200, "evil.example": 421, "localhost.": 421,
    "localhost.evil.example": 421, "127.0.0.1.evil.example": 421, "localhost@evil.example": 421, "[::1": 421,
    "evil.example@localhost": 421, "0.0.0.0": 421, "2130706433": 421, "localhost,evil.example": 421, "localhost/a": 421,
    "": 421,
}  # fmt: skip


async def raw_status(port: int, *lines: str) -> int:
    """The status of the answer to these lines, exactly as they are."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("".join(f"{line}\r\n" for line in [*lines, "connection: close", ""]).encode("latin-1"))
    try:
        async with asyncio.timeout(PATIENCE):
            return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def test_odd_targets_and_hosts_open_nothing(tokens_file):
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    async with serving(FakeInspector(), settings) as server:
        host, secret = "host: 127.0.0.1", SECRETS["all"]
        for target in ODD_TARGETS:
            line = f"{target.replace('{token}', secret)} HTTP/1.1"
            assert await raw_status(server.port, line, host) in {400, 401}, target
            # A token without `admin` reaches no endpoint with them either.
            found = await raw_status(server.port, line, host, f"authorization: Bearer {SECRETS['sender']}")
            assert found in {400, 403}, target
        for name, status in HOSTS.items():
            assert await raw_status(server.port, "GET /health HTTP/1.1", f"host: {name}") == status, name
        for more in ((), (host, "host: evil.example"), (host, host)):
            assert await raw_status(server.port, "GET /health HTTP/1.1", *more) == 400, more
        for scheme in ("Bearer", "bearer", "BEARER"):
            allowed = f"authorization: {scheme} {secret} "
            assert await raw_status(server.port, "GET /v1/groups HTTP/1.1", host, allowed) == 200, scheme


@pytest.mark.proves("api/token-limited-some-keys")
async def test_limited_token_sees_its_keys_only(tokens_file):
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    pool = FakeInspector(poison_views=[poison_view("e1", key=Key("k")), poison_view("e2", key=Key("secret"))])
    async with serving(pool, settings) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        client.headers = httpx.Headers(bearer(SECRETS["limited"]) | JSON)
        for key in ("k", "secret"):
            await pool.start_group(Key(key))
        listed = (await client.get("/v1/groups")).json()["groups"]
        assert [group["key"] for group in listed] == ["k"]
        assert (await client.get("/v1/groups", params={"key": "secret"})).json()["groups"] == []
        assert "secret" not in (await client.get("/status?keys=secret")).text
        forbidden = [
            ("GET", "/v1/poison"), ("GET", "/v1/poison?key=k&key=secret"), ("GET", "/v1/poison/e2"),
            ("POST", "/v1/poison/drop?id=e1&id=e2"), ("POST", "/v1/groups/secret/stop"),
            ("POST", "/v1/groups/k%2f/stop"), ("GET", "/v1/group?key=secret"), ("GET", "/v1/groups/secret/logs"),
            ("GET", "/metrics"), ("GET", "/v1/processes/e1/logs"), ("GET", "/v1/audit?principal=limited"),
        ]  # fmt: skip
        for method, path in forbidden:
            answer = await client.request(method, path)
            assert answer.status_code == 403, path
        for path in ("/v1/group?key=k&key=secret", "/v1/group", "/v1/group?key=%ff"):
            assert (await client.get(path)).status_code == 400, path
        assert (await client.get("/v1/poison?key=k")).json()["total"] == 1
        ready = (await client.get("/ready")).json()
        assert (ready["components"], ready["leader"]) == ([], "http://leader:4242")  # details of components name keys
    assert len(pool.poison_views) == 2


def test_file_of_an_earlier_version_keeps_its_rights():
    entry = {"name": "a", "sha256": "0" * 64, "created": NOW.isoformat(), "expires": None}
    text = json.dumps({"tokens": [entry | {"role": "read"}, entry | {"name": "b", "role": "operate"}]})
    viewer, admin = parse_tokens(text, "file")
    assert viewer.grants == grants_of(Role.VIEWER)
    assert admin.grants == grants_of(Role.ADMIN, [Grant.BODIES])


@pytest.mark.proves("api/file-api-tokens-damaged")
async def test_token_counts_from_its_creation_to_its_removal_without_a_restart(tokens_file, capsys):
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    async with serving(FakeInspector(), settings) as server:
        options = ["--file", str(tokens_file)]
        create = ["token", "create", "new", "--role", "viewer", *options]
        assert await asyncio.to_thread(execute, create, debug=False) == 0
        secret = capsys.readouterr().out.strip()
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            assert (await client.get("/v1/groups", headers=bearer(secret))).status_code == 200
            assert await asyncio.to_thread(execute, ["token", "revoke", "new", *options], debug=False) == 0
            assert (await client.get("/v1/groups", headers=bearer(secret))).status_code == 401
            tokens_file.write_text("{")  # a file that cannot be read has no token
            assert (await client.get("/v1/groups", headers=bearer(SECRETS["operator"]))).status_code == 401
            tokens_file.write_text(render_tokens(TOKENS))
            assert (await client.get("/v1/groups", headers=bearer(SECRETS["operator"]))).status_code == 200
            tokens_file.unlink()
            os.mkfifo(tokens_file)  # a named pipe stops nothing and opens nothing
            assert (await client.get("/v1/groups", headers=bearer(SECRETS["operator"]))).status_code == 401
            assert (await client.get("/health")).status_code == 200


async def test_large_token_file_is_read_off_the_loop_and_no_request_is_judged_by_the_former_one(
    tokens_file, monkeypatch
):
    file = TokenFile(str(tokens_file))
    assert await file.current() == TOKENS
    reading, go_on, read = threading.Event(), threading.Event(), TokenFile.read

    def read_slowly(self: TokenFile) -> tuple[Token, ...]:
        reading.set()
        assert go_on.wait(PATIENCE)
        return read(self)

    monkeypatch.setattr(TokenFile, "read", read_slowly)
    changed = tokens_file.with_name("changed")
    changed.write_text(render_tokens(TOKENS[:1]))
    changed.rename(tokens_file)
    requests = [asyncio.create_task(file.current()) for _ in range(3)]
    assert await asyncio.to_thread(reading.wait, PATIENCE)
    requests[0].cancel()  # the client that began it is gone
    await asyncio.wait(requests[:1])
    assert not any(request.done() for request in requests[1:])
    go_on.set()
    assert await asyncio.gather(*requests[1:]) == [TOKENS[:1]] * 2


def test_token_file_keeps_digests_only_and_every_one_of_many_at_once(tmp_path, capsys):
    file = tmp_path / "tokens.json"

    def create(name):
        return execute(
            ["token", "create", name, "--role", "viewer", "--expires", "30d", "--file", str(file)], debug=False
        )

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(create, [f"t{number}" for number in range(8)])) == [0] * 8
    secrets = capsys.readouterr().out.split()
    text = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {token.sha256 for token in TokenFile(str(file)).read()} == {digest_of(secret) for secret in secrets}
    assert not any(secret in text for secret in secrets)
    assert create("t1") == 2
    assert "'t1'" in capsys.readouterr().err
    assert execute(["token", "list", "--file", str(file), "-o", "json"], debug=False) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["role"] for one in listed] == ["viewer"] * 8
    assert not any(
        secret in repr(TokenFile(str(file)).read()) or digest_of(secret) in repr(listed) for secret in secrets
    )


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("{", "line 1, column 2"),
        ("[]", "tokens"),
        ('{"tokens": [{"name": "a"}]}', r"tokens\[0\]"),
        (render_tokens(TOKENS).replace('"view": null', '"own": null'), r"tokens\[0\]\.grants\.own"),
        (render_tokens(TOKENS).replace('"view": null', '"view": 7'), r"tokens\[0\]\.grants\.view"),
        (render_tokens(TOKENS).replace("other/", "{(:"), r"tokens\[6\]\.grants\.view: "),
        (render_tokens(TOKENS).replace("+00:00", ""), r"tokens\[0\]"),
        (render_tokens([TOKENS[0], TOKENS[0]]), "'viewer'"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_token_file_with_a_mistake_stops_the_start(tmp_path, content, place):
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(ConfigurationError, match=place):
        authenticators_of(ApiSettings(tokens_file=str(tmp_path / "tokens")), clock=SystemClock())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["api.host=0.0.0.0", 'api.allowed_hosts=["a"]'], "api.host"),
        (["api.host=", 'api.allowed_hosts=["a"]'], "api.host"),
        (["api.host=::", "api.allow_anonymous=true"], "api.allowed_hosts"),
        (["api.tokens_file=/no/such/file"], "/no/such/file"),
        (["api.host=192.0.2.7"], "192.0.2.7"),
    ],
)
def test_daemon_that_would_be_open_to_the_network_does_not_start(settings, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [word for setting in settings for word in ("--set", setting)]
    for command in ("run", "check-config"):
        assert execute([command, *options], debug=False) == 2
        assert named in capsys.readouterr().err


def test_exposed_api_warns_at_the_start(tokens_file):
    def warnings(**settings):
        return authenticators_of(ApiSettings.model_validate(settings), clock=SystemClock())[1]

    exposed = {"host": "0.0.0.0", "allowed_hosts": ("a",)}
    [of_anonymous] = warnings(**exposed, allow_anonymous=True)
    [of_plain_text] = warnings(**exposed, tokens_file=str(tokens_file))
    assert ("api.allow_anonymous" in of_anonymous, "api.tls" in of_plain_text, warnings()) == (True, True, [])


async def test_host_names_are_checked_off_loopback_and_the_address_itself_is_answered(tokens_file):
    settings = ApiSettings(host="0.0.0.0", port=0, tokens_file=str(tokens_file), allowed_hosts=("osrdyne.example",))
    async with serving(FakeInspector(), settings) as server, httpx.AsyncClient(timeout=PATIENCE) as client:
        for host, status in (
            ("osrdyne.example", 200), ("127.0.0.1", 200), (socket.gethostname(), 200), ("evil.example", 421),
        ):  # fmt: skip
            answer = await client.get(f"{server.url}/health", headers={"host": host})
            assert answer.status_code == status, host


@pytest.mark.proves("api/client-sends-huge-bodies")
async def test_connections_that_send_their_headers_slowly_are_closed(tokens_file):
    settings = ApiSettings(port=0, tokens_file=str(tokens_file), header_timeout=0.5, limit_concurrency=20)
    async with serving(FakeInspector(), settings) as server, httpx.AsyncClient(timeout=PATIENCE) as client:

        async def attack(first):
            """Until the server has ended the connection."""
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            with suppress(ConnectionError):
                writer.write(first)
                while not reader.at_eof():
                    writer.write(b"a")
                    await writer.drain()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await reader.read(65536)
            writer.close()

        beginning = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-"
        refused = b"POST /v1/group/start HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(attack(first) for first in [b"", beginning, refused] * 20))
            while (await client.get(f"{server.url}/health")).status_code != 200:
                await asyncio.sleep(0.1)


async def test_body_that_arrives_slowly_is_given_up(tokens_file):
    settings = ApiSettings(port=0, body_timeout=0.5)
    async with serving(FakeInspector(), settings) as server, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = "POST /v1/group/start?key=k HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n[".encode())
        assert b" 408 " in await reader.readline()
        writer.close()


@pytest.mark.proves("api/client-sends-huge-bodies")
async def test_connections_above_the_limit_are_refused_and_the_unix_socket_still_answers(tmp_path):
    settings = ApiSettings(port=0, limit_concurrency=3)
    local = tmp_path / "api.sock"
    async with serving(FakeInspector(), settings, open_local=lambda: UnixListener(local)) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        with pytest.raises(OsrdyneError, match=r"api\.limit_concurrency|No osrdyne daemon"):
            await asyncio.to_thread(DaemonApi(server.url).get, "/health")
        assert await asyncio.to_thread(DaemonApi(f"unix:{local}").get, "/health") == {"status": "ok"}
        for _, writer in idle:
            writer.close()


@pytest.mark.proves("api/client-sends-huge-bodies")
async def test_probe_has_a_socket_of_its_own_that_answers_nothing_else():
    pool = FakeInspector()
    async with (
        serving(pool, ApiSettings(port=0, probe_port=0, limit_concurrency=3)) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.probe_port}", timeout=PATIENCE) as probe,
    ):
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        answers = [await probe.get(path) for path in ("/health", "/ready", "/v1/groups", "/metrics")]
        answers.append(await probe.post("/health"))
        pool.component_views = [ComponentView("broker", False, "lost")]
        answers += [await probe.get(path) for path in ("/health", "/ready")]
        for _, writer in idle:
            writer.close()
    assert [answer.status_code for answer in answers] == [200, 200, 404, 404, 405, 200, 503]
    assert answers[-1].json() == {"ready": False}


HEAD = "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HUGE = 100 * 2**20


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/group/start?key=k"), ("POST", "/v1/explain"), ("PUT", "/v1/routes?author=a"), ("GET", "/v1/groups")],
)
@pytest.mark.proves("api/client-sends-huge-bodies")
async def test_huge_body_is_refused_before_it_is_read(method, path):
    pool = FakeInspector()
    async with serving(pool, ApiSettings(port=0)) as server, asyncio.timeout(PATIENCE):
        head = HEAD.format(method=method, path=path)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"{head}Content-Length: {HUGE}\r\n\r\n".encode())  # and nothing of the body
        assert b" 413 " in await reader.readline()
        writer.close()

        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        sent = 0
        with suppress(ConnectionError):
            while sent < HUGE and not reader.at_eof():
                writer.write(b"10000\r\n" + b"[],x" * 0x4000 + b"\r\n")
                await writer.drain()
                sent += 0x10000
        writer.close()
        assert sent < HUGE / 2
    assert pool.group_views == {}


@pytest.mark.proves("api/manifest-expensive-parse-applied")
async def test_leader_goes_on_while_the_largest_manifests_are_refused():
    """A document of small values is the most expensive to read: 16 MiB of them are 5.6 million."""
    pool = FakeInspector()
    silences = [0.0]

    async def heartbeat():
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(0.05)
            silences.append(loop.time() - last)
            last = loop.time()

    body = b'{"routes": [' + b"[]," * (16 * 2**20 // 3 - 10) + b"[]]}"
    async with serving(pool, ApiSettings(port=0)) as server, httpx.AsyncClient(timeout=PATIENCE) as client:
        beating = asyncio.create_task(heartbeat())
        put = (client.put(f"{server.url}/v1/routes?author=a", content=body, headers=JSON) for _ in range(3))
        answers = await asyncio.gather(*put)
        beating.cancel()
    assert [answer.status_code for answer in answers] == [422] * 3
    assert max(silences) < SILENCE


async def test_unix_socket_needs_no_token_and_is_closed_to_other_users(tokens_file, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    api = ApiSettings(port=0, tokens_file=str(tokens_file))
    settings = Settings(pool=PoolSettings(id="auto"), api=api)
    (tmp_path / "osrdyne.yaml").write_text(f"pool: {{id: auto}}\napi: {{port: 0, tokens_file: {tokens_file}}}\n")
    pool = FakeInspector()
    async with serving(pool, api, open_local=lambda: open_listener(settings)) as server:
        path = server.local_path
        assert path is not None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert find_socket(settings) == path
        assert await asyncio.to_thread(execute, ["groups", "start", "k"], debug=False) == 0  # the CLI finds it
        assert list(pool.group_views) == ["k"]
        with pytest.raises(OsrdyneError, match="operate"):
            await asyncio.to_thread(lambda: DaemonApi(server.url).post("/v1/group/start", key="x"))
        another = open_listener(settings)  # a second daemon with these settings does not take it over
        assert another is None or another.path != path
        if another is not None:
            another.close()
        with pytest.raises(PortTakenError):
            UnixListener(path)
        await asyncio.to_thread(DaemonApi(f"unix:{path}").get, "/health")
    assert not path.exists()
    assert list(pool.group_views) == ["k"]


def test_socket_of_a_killed_process_is_replaced_and_another_file_is_not(tmp_path):
    path = tmp_path / "api.sock"
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert path.is_socket()
    UnixListener(path).close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"api\.socket"):
        open_listener(Settings(api=ApiSettings(socket=str(path))))
    assert path.read_text() == "mine"


async def test_command_line_takes_its_token_from_the_environment_or_a_file(tokens_file, monkeypatch, tmp_path, capsys):
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    async with serving(FakeInspector(), settings) as server:

        async def status():
            code = await asyncio.to_thread(execute, ["groups", "list", "--api", server.url], debug=False)
            return code, capsys.readouterr().err

        code, said = await status()
        assert (code, "OSRDYNE_API_TOKEN" in said) == (1, True)
        monkeypatch.setenv("OSRDYNE_API_TOKEN", SECRETS["viewer"])
        assert await status() == (0, "")
        (tmp_path / "token").write_text(f"{SECRETS['viewer']}\n")
        monkeypatch.setenv("OSRDYNE_API_TOKEN_FILE", str(tmp_path / "token"))
        assert "not both" in (await status())[1]
        monkeypatch.delenv("OSRDYNE_API_TOKEN")
        assert await status() == (0, "")
        monkeypatch.setenv("OSRDYNE_API_TOKEN_FILE", str(tmp_path / "nothing"))
        assert (await status())[0] == 2


def test_token_is_not_sent_unencrypted_where_tls_was_asked_for():
    api = DaemonApi("https://daemon.example", token=SECRETS["viewer"])
    assert api._may_send_token_to("https://leader.example")
    assert not api._may_send_token_to("http://leader.example")


def make_certificate(certificate: Path, key: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=api", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip


@pytest.mark.proves("api/renewed-certificate-api-damaged")
async def test_renewed_certificate_is_used_without_a_restart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("osrdyne.api.server.RENEWAL_INTERVAL", 0.05)
    certificate, key, new = tmp_path / "api.pem", tmp_path / "api.key", tmp_path / "new.pem"
    make_certificate(certificate, key)
    first = certificate.read_text()
    tls = ApiTlsSettings(certificate_file=str(certificate), key_file=str(key))
    async with serving(FakeInspector(), ApiSettings(port=0, tls=tls)) as server:

        async def shown():
            """The certificate that the server presents now."""
            return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port), timeout=PATIENCE)

        async def wait_until(holds):
            async with asyncio.timeout(PATIENCE):
                while not holds(await shown()):
                    await asyncio.sleep(0.05)

        await wait_until(lambda text: text.split() == first.split())
        make_certificate(new, tmp_path / "new.key")
        new.rename(certificate)  # without its key, it cannot be used
        said = ""
        async with asyncio.timeout(PATIENCE):
            while "renewed certificate unusable" not in said:
                await asyncio.sleep(0.05)
                said += "".join(capsys.readouterr())
        assert (await shown()).split() == first.split()
        (tmp_path / "new.key").rename(key)
        await wait_until(lambda text: text.split() == certificate.read_text().split())


async def test_api_speaks_tls(tmp_path, tokens_file):
    certificate, key = tmp_path / "api.pem", tmp_path / "api.key"
    make_certificate(certificate, key)
    tls = ApiTlsSettings(certificate_file=str(certificate), key_file=str(key))
    async with serving(FakeInspector(), ApiSettings(port=0, tls=tls, tokens_file=str(tokens_file))) as server:
        assert server.url.startswith("https://")
        trusting = DaemonApi(server.url, token=SECRETS["viewer"], ca_file=str(certificate))
        assert (await asyncio.to_thread(trusting.get, "/v1/groups"))["pool"] == "fake"
        for url in (server.url, server.url.replace("https", "HTTPS")):
            with pytest.raises(OsrdyneError, match="certificate"):
                await asyncio.to_thread(DaemonApi(url).get, "/v1/groups")
        with pytest.raises(OsrdyneError):
            await asyncio.to_thread(DaemonApi(server.url.replace("https", "http")).get, "/v1/groups")
    wrong = ApiTlsSettings(certificate_file=str(key), key_file=str(certificate))
    with pytest.raises(ConfigurationError, match=r"api\.tls"):
        ApiServer(lambda: create_app(FakeInspector(), Metrics(), version="1"), ApiSettings(port=0, tls=wrong)).bind()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 202),
        ({"sec-fetch-site": "none"}, 202),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"content-type": "text/plain"}, 415),
        ({}, 202),
    ],
)
async def test_page_of_another_site_changes_nothing(headers, status):
    pool = FakeInspector()
    app = create_app(pool, Metrics(), version="1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        answer = await client.post("/v1/group/start?key=k", headers=JSON | headers)
    assert (answer.status_code, bool(pool.group_views)) == (status, status == 202)
