"""Attacks on the HTTP API over real sockets: every endpoint with each kind of token, slow and huge requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.api.access import access_of
from osrdyne.api.app import create_app
from osrdyne.api.bodies import BodyLimits
from osrdyne.api.guard import hosts_of
from osrdyne.api.server import ApiServer
from osrdyne.api.token_file import TokenFile
from osrdyne.api.unix_socket import UnixListener, find_socket, open_listener
from osrdyne.auth.tokens import Role, Token, digest_of, generate_token, render_tokens
from osrdyne.cli.main import execute
from osrdyne.client.daemon_api import DaemonApi
from osrdyne.config.models import ApiSettings, ApiTlsSettings, PoolSettings, Settings
from osrdyne.errors import ConfigurationError, OsrdyneError, PortTakenError
from osrdyne.metrics import Metrics
from osrdyne.testing.inspector import FakeInspector, poison_view

PATIENCE = 120.0
SILENCE = 6.0
"""Seconds of silence after which RabbitMQ gives the leader up: three heartbeats."""
JSON = {"content-type": "application/json"}
NOW = datetime.now(UTC).replace(microsecond=0)
SECRETS = {name: generate_token() for name in ("reader", "operator", "expired", "revoked")}
PUBLIC = {("GET", "/health"), ("GET", "/ready")}


def kept(name: str, role: Role, expires: datetime | None = None) -> Token:
    return Token(name, role, digest_of(SECRETS[name]), NOW, expires)


TOKENS = (
    kept("reader", Role.READ, NOW + timedelta(days=1)),
    kept("operator", Role.OPERATE),
    kept("expired", Role.OPERATE, NOW - timedelta(seconds=1)),
)


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens.json"
    file.write_text(render_tokens(TOKENS))
    return file


@asynccontextmanager
async def serving(
    pool: FakeInspector, settings: ApiSettings, *, open_local: Callable[[], UnixListener | None] | None = None
) -> AsyncIterator[ApiServer]:
    """The application as the daemon builds it."""
    access, _ = access_of(settings, clock=SystemClock())
    limits = BodyLimits(settings.max_body, settings.max_manifest, settings.body_timeout)
    hosts = hosts_of(settings.host, settings.allowed_hosts)
    app = create_app(pool, Metrics(), version="1", allowed_hosts=hosts, access=access, limits=limits)
    server = ApiServer(lambda: app, settings, open_local=open_local)
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


def endpoints() -> list[tuple[str, str]]:
    paths = create_app(FakeInspector(), Metrics(), version="1").openapi()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [
        *found,
        ("GET", "/openapi.json"),
        ("GET", "/no/such/path"),
        ("DELETE", "/v1/groups/k"),
        ("TRACE", "/health"),
    ]


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
    "latin": [("authorization", "Bearer osr_\xe9\xff")],
}


async def test_no_endpoint_but_the_probes_is_open_to_a_request_without_a_valid_token(tokens_file: Path) -> None:
    pool = FakeInspector(poison_views=[poison_view("e1")])
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    async with serving(pool, settings) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        for (method, path), (kind, given) in itertools.product(endpoints(), BAD_HEADERS.items()):
            headers = [*given, ("content-type", "application/json")]
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            answer = await client.request(method, filled(path), headers=raw, params={"key": "k", "author": "a"})
            if (method, path) in PUBLIC:
                assert answer.status_code == 200, (method, path, kind)
                continue
            assert answer.status_code == 401, (method, path, kind)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["role"] in {"read", "operate"}
            assert SECRETS["operator"] not in answer.text
        ready = (await client.get("/ready")).json()
        assert (ready["components"], ready["leader"]) == ([], None)
        assert (await client.get("/ready", headers=bearer(SECRETS["reader"]))).json()["components"] != []
    assert (pool.group_views, pool.replayed, len(pool.poison_views)) == ({}, [], 1)


async def test_each_role_reaches_what_it_may_and_nothing_else(tokens_file: Path) -> None:
    needs_operate = {("GET", "/v1/poison/{entry}")}
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    pool = FakeInspector(poison_views=[poison_view("e1")])
    async with serving(pool, settings) as server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:

        async def ask(method: str, path: str, secret: str, **parameters: str) -> httpx.Response:
            return await client.request(method, filled(path), headers=bearer(secret) | JSON, params=parameters)

        for method, path in endpoints():
            reads = method == "GET" or (method, path) == ("POST", "/v1/explain")
            answer = await ask(method, path, SECRETS["reader"], key="k")
            if reads and (method, path) not in needs_operate:
                assert answer.status_code not in {401, 403}, (method, path)
            else:
                assert (answer.status_code, answer.json()["role"]) == (403, "operate"), (method, path)
                assert "operate" in answer.json()["detail"]
        assert (pool.group_views, pool.replayed, len(pool.poison_views)) == ({}, [], 1)
        for spelling in ("bodies=true", "bodies=1", "%62odies=on", "bodies=false&bodies=yes"):
            answer = await client.get(f"/v1/poison?{spelling}", headers=bearer(SECRETS["reader"]))
            assert answer.status_code == 403, spelling
        for method, path in endpoints():
            answer = await ask(method, path, SECRETS["operator"], key="k")
            assert answer.status_code not in {401, 403}, (method, path)


async def test_token_counts_from_its_creation_to_its_removal_without_a_restart(
    tokens_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    async with serving(FakeInspector(), settings) as server:
        options = ["--file", str(tokens_file)]
        assert (
            await asyncio.to_thread(execute, ["token", "create", "new", "--role", "read", *options], debug=False) == 0
        )
        secret = capsys.readouterr().out.strip()
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            assert (await client.get("/v1/groups", headers=bearer(secret))).status_code == 200
            assert await asyncio.to_thread(execute, ["token", "revoke", "new", *options], debug=False) == 0
            assert (await client.get("/v1/groups", headers=bearer(secret))).status_code == 401
            tokens_file.write_text("{")  # a file that cannot be read has no token
            assert (await client.get("/v1/groups", headers=bearer(SECRETS["operator"]))).status_code == 401
            tokens_file.write_text(render_tokens(TOKENS))
            assert (await client.get("/v1/groups", headers=bearer(SECRETS["operator"]))).status_code == 200


def test_token_file_keeps_digests_only_and_every_one_of_many_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.json"

    def create(name: str) -> int:
        return execute(
            ["token", "create", name, "--role", "read", "--expires", "30d", "--file", str(file)], debug=False
        )

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(create, [f"t{number}" for number in range(8)])) == [0] * 8
    secrets = capsys.readouterr().out.split()
    text = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {token.sha256 for token in TokenFile(str(file)).read()} == {digest_of(secret) for secret in secrets}
    assert not any(secret in text for secret in secrets)
    assert create("t1") == 2
    assert "revoke it first" in capsys.readouterr().err
    assert execute(["token", "list", "--file", str(file), "-o", "json"], debug=False) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["role"] for one in listed] == ["read"] * 8
    assert not any(
        secret in repr(TokenFile(str(file)).read()) or digest_of(secret) in repr(listed) for secret in secrets
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "line 1, column 2"),
        ("[]", r'\{"tokens": \[…\]\} expected'),
        ('{"tokens": [{"name": "a"}]}', r"tokens\[0\]: an object with"),
        (render_tokens(TOKENS).replace('"read"', '"admin"'), r"tokens\[0\]\.role: must be read or operate"),
        (render_tokens(TOKENS).replace("+00:00", ""), "a time with a time zone"),
        (render_tokens([TOKENS[0], TOKENS[0]]), "two tokens have the name 'reader'"),
        ("[" * 100_000, "invalid JSON"),
    ],
)
def test_token_file_with_a_mistake_stops_the_start(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(ConfigurationError, match=said):
        access_of(ApiSettings(tokens_file=str(tmp_path / "tokens")), clock=SystemClock())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["api.host=0.0.0.0", 'api.allowed_hosts=["a"]'], "the API has no tokens"),
        (["api.host=", 'api.allowed_hosts=["a"]'], "the API has no tokens"),
        (["api.host=::", "api.insecure=true"], "api.allowed_hosts: required"),
        (["api.tokens_file=/no/such/file"], "cannot read the API tokens"),
        (["api.host=192.0.2.7"], "192.0.2.7, and the API has no tokens"),
    ],
)
def test_daemon_that_would_be_open_to_the_network_does_not_start(
    settings: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [word for setting in settings for word in ("--set", setting)]
    for command in ("run", "check-config"):
        assert execute([command, *options], debug=False) == 2
        assert said in capsys.readouterr().err


def test_exposed_api_warns_at_the_start(tokens_file: Path) -> None:
    open_to_all = ApiSettings(host="0.0.0.0", insecure=True, allowed_hosts=("a",))
    [warning] = access_of(open_to_all, clock=SystemClock())[1]
    assert "without a token" in warning
    [warning] = access_of(
        ApiSettings(host="0.0.0.0", tokens_file=str(tokens_file), allowed_hosts=("a",)), clock=SystemClock()
    )[1]
    assert "no TLS" in warning
    assert access_of(ApiSettings(), clock=SystemClock())[1] == []


async def test_host_names_are_checked_off_loopback_and_the_address_itself_is_answered(tokens_file: Path) -> None:
    settings = ApiSettings(host="0.0.0.0", port=0, tokens_file=str(tokens_file), allowed_hosts=("osrdyne.example",))
    async with serving(FakeInspector(), settings) as server, httpx.AsyncClient(timeout=PATIENCE) as client:
        for host, status in (
            ("osrdyne.example", 200), ("127.0.0.1", 200), (socket.gethostname(), 200), ("evil.example", 421),
        ):  # fmt: skip
            answer = await client.get(f"{server.url}/health", headers={"host": host})
            assert answer.status_code == status, host


async def test_connections_that_send_their_headers_slowly_are_closed(tokens_file: Path) -> None:
    settings = ApiSettings(port=0, tokens_file=str(tokens_file), header_timeout=0.5, limit_concurrency=20)
    async with serving(FakeInspector(), settings) as server, httpx.AsyncClient(timeout=PATIENCE) as client:

        async def attack(first: bytes) -> None:
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


async def test_body_that_arrives_slowly_is_given_up(tokens_file: Path) -> None:
    settings = ApiSettings(port=0, body_timeout=0.5)
    async with serving(FakeInspector(), settings) as server, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = "POST /v1/group/start?key=k HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n[".encode())
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_connections_above_the_limit_are_refused_and_the_unix_socket_still_answers(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, limit_concurrency=3)
    local = tmp_path / "api.sock"
    async with serving(FakeInspector(), settings, open_local=lambda: UnixListener(local)) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        with pytest.raises(OsrdyneError, match=r"too many connections|No osrdyne daemon answers"):
            await asyncio.to_thread(DaemonApi(server.url).get, "/health")
        assert await asyncio.to_thread(DaemonApi(f"unix:{local}").get, "/health") == {"status": "ok"}
        for _, writer in idle:
            writer.close()


HEAD = "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HUGE = 100 * 2**20


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/group/start?key=k"), ("POST", "/v1/explain"), ("PUT", "/v1/routes?author=a"), ("GET", "/v1/groups")],
)
async def test_huge_body_is_refused_before_it_is_read(method: str, path: str) -> None:
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


async def test_leader_goes_on_while_the_largest_manifests_are_refused() -> None:
    """A document of small values is the most expensive to read: 16 MiB of them are 5.6 million."""
    pool = FakeInspector()
    silences = [0.0]

    async def heartbeat() -> None:
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
    assert "at most" in answers[0].json()["detail"]
    assert max(silences) < SILENCE


async def test_unix_socket_needs_no_token_and_is_closed_to_other_users(
    tokens_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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
        with pytest.raises(OsrdyneError, match="needs a token with the role operate"):
            await asyncio.to_thread(lambda: DaemonApi(server.url).post("/v1/group/start", key="x"))
        another = open_listener(settings)  # a second daemon with these settings does not take it over
        assert another is None or another.path != path
        if another is not None:
            another.close()
        with pytest.raises(PortTakenError, match="Another process listens"):
            UnixListener(path)
        await asyncio.to_thread(DaemonApi(f"unix:{path}").get, "/health")
    assert not path.exists()
    assert list(pool.group_views) == ["k"]


def test_socket_of_a_killed_process_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert path.is_socket()
    UnixListener(path).close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"api\.socket: cannot listen"):
        open_listener(Settings(api=ApiSettings(socket=str(path))))
    assert path.read_text() == "mine"


async def test_command_line_takes_its_token_from_the_environment_or_a_file(
    tokens_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ApiSettings(port=0, tokens_file=str(tokens_file))
    async with serving(FakeInspector(), settings) as server:

        async def status() -> tuple[int, str]:
            code = await asyncio.to_thread(execute, ["groups", "list", "--api", server.url], debug=False)
            return code, capsys.readouterr().err

        code, said = await status()
        assert (code, "OSRDYNE_API_TOKEN" in said) == (1, True)
        monkeypatch.setenv("OSRDYNE_API_TOKEN", SECRETS["reader"])
        assert await status() == (0, "")
        (tmp_path / "token").write_text(f"{SECRETS['reader']}\n")
        monkeypatch.setenv("OSRDYNE_API_TOKEN_FILE", str(tmp_path / "token"))
        assert "not both" in (await status())[1]
        monkeypatch.delenv("OSRDYNE_API_TOKEN")
        assert await status() == (0, "")
        monkeypatch.setenv("OSRDYNE_API_TOKEN_FILE", str(tmp_path / "nothing"))
        assert (await status())[0] == 2


def test_token_is_not_sent_unencrypted_where_tls_was_asked_for() -> None:
    api = DaemonApi("https://daemon.example", token=SECRETS["reader"])
    assert api._may_send_token_to("https://leader.example")
    assert not api._may_send_token_to("http://leader.example")


async def test_api_speaks_tls(tmp_path: Path, tokens_file: Path) -> None:
    certificate, key = tmp_path / "api.pem", tmp_path / "api.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=api", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    tls = ApiTlsSettings(certificate_file=str(certificate), key_file=str(key))
    async with serving(FakeInspector(), ApiSettings(port=0, tls=tls, tokens_file=str(tokens_file))) as server:
        assert server.url.startswith("https://")
        trusting = DaemonApi(server.url, token=SECRETS["reader"], ca_file=str(certificate))
        assert (await asyncio.to_thread(trusting.get, "/v1/groups"))["pool"] == "fake"
        with pytest.raises(OsrdyneError, match="certificate of the daemon"):
            await asyncio.to_thread(DaemonApi(server.url).get, "/v1/groups")
        with pytest.raises(OsrdyneError):
            await asyncio.to_thread(DaemonApi(server.url.replace("https", "http")).get, "/v1/groups")
    wrong = ApiTlsSettings(certificate_file=str(key), key_file=str(certificate))
    with pytest.raises(ConfigurationError, match=r"api\.tls: cannot use"):
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
async def test_page_of_another_site_changes_nothing(headers: dict[str, str], status: int) -> None:
    pool = FakeInspector()
    app = create_app(pool, Metrics(), version="1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        answer = await client.post("/v1/group/start?key=k", headers=JSON | headers)
    assert (answer.status_code, bool(pool.group_views)) == (status, status == 202)
