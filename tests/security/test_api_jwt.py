"""JWTs and trusted proxies at the HTTP API: what counts, and every way in which a token may be wrong."""

import asyncio
import base64
import gzip
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jwt
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from osrdyne.api.access.authenticators import Authenticators, authenticators_of
from osrdyne.api.access.checks import Access
from osrdyne.api.access.jwt import MAX_KEY_AGE, MAX_TOKEN, REFRESH_INTERVAL, JwtVerifier
from osrdyne.api.access.token_file import TokenFile
from osrdyne.api.app import create_app
from osrdyne.auth.claims import principal_of_claims
from osrdyne.auth.decision import AccessRefusal
from osrdyne.auth.grants import ALL_KEYS, Grant, Principal, Role, grants_of, parse_scope
from osrdyne.auth.tokens import Token, digest_of, generate_token, render_tokens
from osrdyne.config.models import ApiSettings, JwtSettings
from osrdyne.errors import ConfigurationError
from osrdyne.metrics import Metrics
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.inspector import FakeInspector
from tests.security.http_server import Answer, answering

ISSUER, AUDIENCE = "https://issuer.example", "osrdyne"
ROLES = {"viewer": "viewer", "team": "operator", "bodies": "bodies"}
RSA, OTHER = RSAKey.generate_key(2048, {"kid": "one"}), RSAKey.generate_key(2048, {"kid": "one"})
EC, OKP, SECRET = ECKey.generate_key("P-256"), OKPKey.generate_key("Ed25519"), OctKey.generate_key(256)


def claims(clock: VirtualClock, **changes: Any) -> dict[str, Any]:
    sound = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(clock.time()) + 300, "role": "viewer"}
    return {name: value for name, value in (sound | changes).items() if value is not None}


def signed(content: dict[str, Any], key: Key = RSA, algorithm: str = "RS256", **header: Any) -> str:
    return jwt.encode({"alg": algorithm, **header}, content, key, algorithms=[algorithm])


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def settings_of(file: Path, algorithm: str = "RS256", **changes: Any) -> JwtSettings:
    sound = {"key_file": str(file), "issuer": ISSUER, "audience": AUDIENCE, "roles": ROLES}
    return JwtSettings.model_validate({"algorithm": algorithm, **sound, **changes})


def of_url(url: str, clock: VirtualClock) -> JwtVerifier:
    return JwtVerifier(settings_of(Path("unused"), key_file=None, jwks_url=url), clock=clock)


def of_jwks(keys: list[Any], directory: Path, clock: VirtualClock) -> JwtVerifier:
    file = directory / "keys"
    file.write_text(json.dumps({"keys": keys}))
    return JwtVerifier(settings_of(file, "ES256", key_file=None, jwks_file=str(file)), clock=clock)


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def public_key(tmp_path):
    file = tmp_path / "issuer.pem"
    file.write_bytes(RSA.as_pem(private=False))
    return file


@pytest.fixture
def verifier(public_key, clock):
    return JwtVerifier(settings_of(public_key), clock=clock)


@pytest.mark.parametrize(
    ("algorithm", "key", "content"),
    [
        ("HS256", SECRET, SECRET.get_op_key("sign")),
        ("RS256", RSA, RSA.as_pem(private=False)),
        ("ES256", EC, EC.as_pem(private=False)),
        ("EdDSA", OKP, OKP.as_pem(private=False)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_token_of_each_algorithm_counts_only_where_that_one_is_configured(
    algorithm, key, content, clock, tmp_path, public_key
):
    file = tmp_path / "key"
    file.write_bytes(base64.b64encode(content) if algorithm == "HS256" else content)
    if algorithm == "HS256":
        key = OctKey.import_key(file.read_bytes())
    name = "Ed25519" if algorithm == "EdDSA" else algorithm
    token = signed(claims(clock), key, name)
    found = await JwtVerifier(settings_of(file, algorithm), clock=clock).verify(token)
    assert isinstance(found, Principal)
    assert (found.name, found.role) == ("alice", Role.VIEWER)
    for other in {"HS256", "RS256", "ES256", "EdDSA"} - {algorithm}:
        of_another = public_key if algorithm == "HS256" and other != "RS256" else file
        with pytest.raises(ConfigurationError, match=other):
            JwtVerifier(settings_of(of_another, other), clock=clock)
    if algorithm != "RS256":
        assert await JwtVerifier(settings_of(public_key), clock=clock).verify(token) is AccessRefusal.SIGNATURE


def forged_tokens(clock: VirtualClock) -> dict[str, str]:
    sound = claims(clock)
    header, content = part({"alg": "none", "typ": "JWT"}), part(sound)
    as_secret = f"{part({'alg': 'HS256'})}.{content}"
    public = RSA.as_pem(private=False)
    mac = base64.urlsafe_b64encode(hmac.new(public, as_secret.encode(), hashlib.sha256).digest()).rstrip(b"=").decode()
    own_key = signed(sound, OTHER, jwk=OTHER.as_dict(private=False))
    start, middle, end = signed(sound).split(".")
    return {
        "none": f"{header}.{content}.",
        "NONE": f"{part({'alg': 'NoNe'})}.{content}.",
        "hs256 with the public key": f"{as_secret}.{mac}",
        "key in the header": own_key,
        "another key": signed(sound, OTHER),
        "changed claims": f"{start}.{part(sound | {'role': 'team'})}.{end}",
        "no signature": f"{start}.{middle}.",
        "two parts": f"{start}.{middle}",
        "algorithm of another size": signed(sound, RSA, "RS512"),
        "critical header": f"{part({'alg': 'RS256', 'crit': ['x'], 'x': 1})}.{middle}.{end}",
        "critical header without names": signed(sound, crit=[]),
        "list as claims": f"{start}.{part([1])}.{end}",
        "deep": f"{base64.urlsafe_b64encode(b'[' * 3000).decode()}.{middle}.{end}",
        "empty": "",
        "dots": "..",
    }


@pytest.mark.proves("api/token-forged-algorithm-none")
async def test_forged_token_is_refused_by_its_signature(verifier, clock):
    for name, token in forged_tokens(clock).items():
        assert await verifier.verify(token) is AccessRefusal.SIGNATURE, name
    assert await verifier.verify(signed(claims(clock, more="x" * MAX_TOKEN))) is AccessRefusal.MALFORMED
    assert await verifier.verify("ä.b.c") is AccessRefusal.MALFORMED


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"exp": -61}, AccessRefusal.EXPIRED),
        ({"exp": None}, AccessRefusal.CLAIMS),
        ({"exp": "x"}, AccessRefusal.CLAIMS),
        ({"nbf": 70}, AccessRefusal.CLAIMS),
        ({"iss": "https://other.example"}, AccessRefusal.CLAIMS),
        ({"iss": None}, AccessRefusal.CLAIMS),
        ({"aud": "other"}, AccessRefusal.CLAIMS),
        ({"aud": None}, AccessRefusal.CLAIMS),
        ({"sub": None}, AccessRefusal.CLAIMS),
        ({"sub": "a\nb"}, AccessRefusal.CLAIMS),
        ({"sub": 7}, AccessRefusal.CLAIMS),
        ({"Send": "{(:"}, AccessRefusal.CLAIMS),
        ({"Manage": 1}, AccessRefusal.CLAIMS),
    ],
    ids=str,
)
async def test_token_with_a_wrong_claim_is_refused(verifier, clock, changes, refusal):
    now = int(clock.time())
    changes = {
        name: now + value if name in {"exp", "nbf"} and isinstance(value, int) else value
        for name, value in changes.items()
    }
    assert await verifier.verify(signed(claims(clock, **changes))) is refusal


async def test_only_what_was_verified_before_is_known_without_a_thread(verifier, clock, monkeypatch):
    sound = claims(clock, exp=int(clock.time()) + 10, aud=["other", AUDIENCE])
    token, forged = signed(sound), signed(claims(clock), OTHER)
    assert (verifier.verify_cached(token), verifier.verify_cached(forged)) == (None, None)
    assert verifier.verify_cached("x" * (MAX_TOKEN + 1)) is AccessRefusal.MALFORMED
    authenticators = Authenticators(jwt=verifier, clock=clock)
    assert isinstance(await authenticators.identify(token), Principal)
    assert await authenticators.identify(forged) is AccessRefusal.SIGNATURE
    monkeypatch.setattr(verifier, "_decode", None)  # from here on nothing may be decoded
    assert isinstance(authenticators.identify_cached(token), Principal)
    assert authenticators.identify_cached(forged) is None
    assert authenticators.identify_cached("osr_" + "A" * 43) is AccessRefusal.MALFORMED
    await clock.advance(69)
    assert isinstance(authenticators.identify_cached(token), Principal)
    await clock.advance(2)
    assert authenticators.identify_cached(token) is AccessRefusal.EXPIRED
    await clock.advance(MAX_KEY_AGE)  # a key in a file does not grow old
    assert authenticators.identify_cached(token) is AccessRefusal.EXPIRED
    assert Authenticators().identify_cached(token) is AccessRefusal.NO_KEYS


async def test_api_token_is_known_once_its_file_was_read(tmp_path, clock):
    file, text = tmp_path / "tokens.json", generate_token()
    created = datetime.fromtimestamp(clock.time(), UTC)
    token = Token("bob", grants_of(None, [Grant.SEND]), digest_of(text), created, created + timedelta(seconds=10))
    file.write_text(render_tokens([token]))
    authenticators = Authenticators(tokens=TokenFile(str(file)), clock=clock)
    assert authenticators.identify_cached(text) is None
    assert isinstance(await authenticators.identify(text), Principal)
    assert isinstance(authenticators.identify_cached(text), Principal)
    assert authenticators.identify_cached(generate_token()) is AccessRefusal.UNKNOWN
    await clock.advance(10)
    assert authenticators.identify_cached(text) is AccessRefusal.EXPIRED
    file.unlink()
    assert (authenticators.identify_cached(text), await authenticators.identify(text)) == (None, AccessRefusal.UNKNOWN)


@given(
    st.text(max_size=300) | st.lists(st.sampled_from(["eyJ", ".", "A", "=", "-", '{"'])).map("".join),
    st.integers(0, 400),
)
def test_text_that_the_issuer_has_not_signed_is_never_a_principal(text, at):
    found = KNOWN._decode(text)
    assert isinstance(found, AccessRefusal)
    token = SOUND[:at] + text + SOUND[at + len(text) :]
    changed = KNOWN._decode(token)
    assert isinstance(changed, AccessRefusal) or changed == jwt.decode(SOUND, RSA).claims


def test_claims_become_grants():
    def grants(**given):
        found = principal_of_claims({"sub": "a", **given}, role_claim="groups", roles=ROLES)
        return None if found is None else found.grants

    assert grants(groups="team") == grants_of(Role.OPERATOR)
    assert grants(groups=["team", "bodies", "unknown", 7, None]) == grants_of(Role.OPERATOR, [Grant.BODIES])
    assert grants(groups="admin") == {}  # not a value of `roles`
    assert grants(Send=True, Listen=False) == {Grant.SEND: ALL_KEYS}
    assert grants(Send="tpch/{table}") == {Grant.SEND: parse_scope("tpch/{table}")}
    assert grants(Manage="a") == grants_of(Role.ADMIN, keys=parse_scope("a"))
    assert grants(groups="viewer", Manage="a") == {
        Grant.VIEW: ALL_KEYS, Grant.OPERATE: parse_scope("a"), Grant.ADMIN: parse_scope("a"),
    }  # fmt: skip


@dataclass
class Issuer:
    """Serves a JWKS."""

    keys: list[Key] = field(default_factory=lambda: [RSA])
    status: int = 200
    asked: int = 0
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    pack: Callable[[bytes], bytes] = bytes


@contextmanager
def issuing() -> Iterator[Issuer]:
    issuer = Issuer()

    def answer(_: str) -> Answer:
        issuer.asked += 1
        content = json.dumps({"keys": [key.as_dict(private=False) for key in issuer.keys]})
        return issuer.status, issuer.headers, issuer.pack(content.encode())

    with answering(answer) as url:
        issuer.url = f"{url}/keys"
        yield issuer


async def test_keys_are_read_for_the_next_token_after_a_cancelled_read(clock, monkeypatch):
    with issuing() as issuer:
        verifier, token = of_url(issuer.url, clock), signed(claims(clock), kid="one")

        async def never_fetch():
            return await asyncio.Future()

        with monkeypatch.context() as patched:
            patched.setattr(verifier, "_fetch", never_fetch)
            reading = asyncio.create_task(verifier.verify(token))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
        assert isinstance(await verifier.verify(token), Principal)


@pytest.mark.proves("api/url-jwks-cannot-read")
async def test_keys_of_a_url_are_read_again_for_an_unknown_key_once_a_minute(clock):
    with issuing() as issuer:
        verifier = of_url(issuer.url, clock)
        new = RSAKey.generate_key(2048, {"kid": "two"})
        old_token, new_token = signed(claims(clock), kid="one"), signed(claims(clock), new, kid="two")
        assert isinstance(await verifier.verify(old_token), Principal)
        for _ in range(5):
            assert await verifier.verify(new_token) is AccessRefusal.UNKNOWN_KEY
        assert issuer.asked == 1
        issuer.keys = [RSA, new]
        await clock.advance(REFRESH_INTERVAL)
        issuer.status = 500  # the known keys stay
        assert await verifier.verify(new_token) is AccessRefusal.KEYS_UNAVAILABLE
        assert isinstance(await verifier.verify(old_token), Principal)
        issuer.status = 200
        await clock.advance(REFRESH_INTERVAL)
        assert isinstance(await verifier.verify(new_token), Principal)
        assert issuer.asked == 3
        issuer.keys = [new]  # the old key is withdrawn
        await clock.advance(MAX_KEY_AGE - 400)
        assert isinstance(await verifier.verify(signed(claims(clock), kid="one")), Principal)
        await clock.advance(401)
        assert await verifier.verify(signed(claims(clock), kid="one")) is AccessRefusal.UNKNOWN_KEY


async def test_issuer_that_sends_its_keys_slowly_is_given_up(clock, monkeypatch):
    monkeypatch.setattr("osrdyne.api.access.jwt.FETCH_TIMEOUT", 1.0)

    async def drip(_, writer):
        """Each part comes within the time that a single read may take."""
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with closing(writer), suppress(OSError):
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys"
    verifier = of_url(url, clock)
    try:
        async with asyncio.timeout(60):
            assert await verifier.verify(signed(claims(clock), kid="one")) is AccessRefusal.KEYS_UNAVAILABLE
    finally:
        server.close()


async def test_compressed_or_redirected_keys_are_not_read(clock):
    with issuing() as issuer, issuing() as other:
        for issuer.status, issuer.headers, issuer.pack in (
            (200, {"content-encoding": "gzip"}, gzip.compress),
            (302, {"location": other.url}, bytes),
        ):
            found = await of_url(issuer.url, clock).verify(signed(claims(clock), kid="one"))
            assert found is AccessRefusal.KEYS_UNAVAILABLE
        assert (issuer.asked, other.asked) == (2, 0)


async def test_entries_of_a_jwks_that_cannot_be_used_are_ignored(clock, tmp_path):
    own = EC.as_dict(private=False, kid="own")
    broken = [{"crv": "brainpoolP256r1"}, {"x": "!"}, {"x": own["y"]}, {"y": None}, {"use": "enc"}, {"kid": ["own"]}]
    keys = [*(own | {"kid": f"k{n}"} | one for n, one in enumerate(broken)), own]
    verifier = of_jwks(keys, tmp_path, clock)
    assert isinstance(await verifier.verify(signed(claims(clock), EC, "ES256", kid="own")), Principal)
    for number in range(len(broken)):
        found = await verifier.verify(signed(claims(clock), EC, "ES256", kid=f"k{number}"))
        assert found is AccessRefusal.UNKNOWN_KEY, broken[number]


async def test_key_without_an_id_stands_in_for_ids_that_no_key_has(clock, tmp_path):
    named, other, bare = (ECKey.generate_key("P-256") for _ in range(3))
    keys = [named.as_dict(private=False, kid="a"), other.as_dict(private=False, kid="b"), bare.as_dict(private=False)]
    keys = [{name: value for name, value in key.items() if name != "kid" or value in "ab"} for key in keys]
    verifier = of_jwks(keys, tmp_path, clock)

    async def found(key, **header):
        return await verifier.verify(signed(claims(clock), key, "ES256", **header))

    for key, name in ((named, "a"), (other, "b"), (bare, "c")):
        assert isinstance(await found(key, kid=name), Principal)
    assert await found(bare, kid="a") is AccessRefusal.SIGNATURE
    assert await found(bare) is AccessRefusal.UNKNOWN_KEY  # any of them may have signed it


async def test_token_of_a_key_that_was_withdrawn_while_it_was_verified_is_not_remembered(clock, monkeypatch):
    with issuing() as issuer:
        verifier = of_url(issuer.url, clock)
        token = signed(claims(clock, exp=int(clock.time()) + 9_000), kid="one")
        forged = signed(claims(clock), OTHER, kid="one")
        assert await verifier.verify(forged) is AccessRefusal.SIGNATURE  # reads the keys
        verified, go_on, decode = threading.Event(), threading.Event(), JwtVerifier._decode

        def decode_slowly(self: JwtVerifier, text: str) -> object:
            found = decode(self, text)
            verified.set()
            assert go_on.wait(60)
            return found

        with monkeypatch.context() as slow:
            slow.setattr(JwtVerifier, "_decode", decode_slowly)
            verifying = asyncio.create_task(verifier.verify(token))
            assert await asyncio.to_thread(verified.wait, 60)
        issuer.keys = [RSAKey.generate_key(2048, {"kid": "two"})]
        await clock.advance(MAX_KEY_AGE + 1)
        assert await verifier.verify(signed(claims(clock), kid="one")) is AccessRefusal.UNKNOWN_KEY
        go_on.set()
        assert isinstance(await verifying, Principal)
        assert await verifier.verify(token) is AccessRefusal.UNKNOWN_KEY


UNSAFE_URLS = (
    "http://a.example", "http://localhost:x@a.example/", "http://localhost@a.example/", "http://localhost:x/",
    "https://user:secret@a.example/", "http://localhost\\@a.example/", "http://127.0.0.1.a.example/", "https:///keys",
    "https://", "file:///etc/keys", "https://a.example/\tkeys", "https://a.example/ keys", "//a.example", "",
    "http://localhost.a.example/", "https://a.ex\u0430mple/", "http://[::1/", "http://0x7f.1/",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"algorithm": "none"}, "algorithm"),
        ({"algorithm": None}, "algorithm"),
        ({"key_file": None}, "key_file"),
        ({"jwks_file": "a"}, "key_file"),
        ({"issuer": None}, "issuer"),
        ({"algorithm": "HS256", "key_file": None, "jwks_url": "https://a.example"}, "HS256"),
        *(({"key_file": None, "jwks_url": url}, "jwks_url") for url in UNSAFE_URLS),
    ],
)
def test_settings_of_jwts_that_are_not_safe_are_refused(changes, setting):
    with pytest.raises(ValueError, match=setting):
        settings_of(Path("key"), **changes)
    for url in ("https://a.example", "https://a.example:8/k?x=1", "http://localhost:8/k", "http://[::1]/"):
        assert settings_of(Path("unused"), key_file=None, jwks_url=url).jwks_url == url


@pytest.mark.parametrize("content", ["", "short", '{"keys": []}', "[]", "{", '{"keys": [{"kty": "RSA"}]}'])
def test_keys_that_cannot_be_used_stop_the_start(content, clock, tmp_path):
    file = tmp_path / "keys"
    file.write_text(content)
    for algorithm in ("HS256", "RS256", "ES256", "EdDSA"):
        for changes in ({}, {"key_file": None, "jwks_file": str(file)}):
            if algorithm == "HS256" and len(content) >= 32 and not changes:
                continue
            with pytest.raises(ConfigurationError, match=r"api\.jwt"):
                JwtVerifier(settings_of(file, algorithm, **changes), clock=clock)


def api(settings: ApiSettings, clock: VirtualClock, *, peer: str = "192.0.2.7") -> httpx.AsyncClient:
    access = Access(authenticators_of(settings, clock=clock)[0])
    app = create_app(FakeInspector(), Metrics(), version="1", access=access)
    transport = httpx.ASGITransport(app, client=(peer, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://api", headers={"content-type": "application/json"})


@pytest.mark.proves("api/token-forged-algorithm-none")
async def test_api_takes_jwts_and_names_what_is_wrong_without_repeating_the_token(public_key, clock, capsys):
    async with api(ApiSettings(jwt=settings_of(public_key)), clock) as client:

        async def ask(token: str, method: str = "GET", path: str = "/v1/groups") -> httpx.Response:
            return await client.request(method, path, headers={"authorization": f"Bearer {token}"})

        assert (await ask(signed(claims(clock)))).status_code == 200
        answer = await ask(signed(claims(clock)), "POST", "/v1/group/start?key=k")
        assert (answer.status_code, answer.json()["grant"]) == (403, "operate")
        assert (await ask(signed(claims(clock, role="team")), "POST", "/v1/group/start?key=k")).status_code == 202
        limited = signed(claims(clock, role=None, Manage="a/{b}"))
        assert (await ask(limited, "POST", "/v1/group/start?key=a/1")).status_code == 202
        assert (await ask(limited, "POST", "/v1/group/start?key=b/1")).status_code == 403
        for name, token in forged_tokens(clock).items():
            answer = await ask(token)
            assert answer.status_code == 401, name
            assert answer.json()["code"] == "invalid-token"
            assert not token or token == ".." or token not in answer.text
        assert (await ask("osr_" + "A" * 43)).status_code == 401
        assert (await client.get("/v1/groups")).json()["code"] == "token-required"
    assert "eyJ" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("peer", "headers", "status"),
    [
        ("10.0.0.9", [("x-user", "alice"), ("x-roles", "viewer, bodies")], 200),
        ("::ffff:10.0.0.9", [("x-user", "alice"), ("x-roles", "viewer")], 200),
        ("10.0.0.9", [("x-user", "alice")], 403),
        ("10.0.0.9", [("x-user", "alice"), ("x-roles", "root")], 401),
        ("10.0.0.9", [("x-user", "alice"), ("x-user", "bob"), ("x-roles", "viewer")], 401),
        ("10.0.0.9", [("x-user", "alice"), ("x-roles", "viewer"), ("x-roles", "admin")], 401),
        ("10.0.0.9", [("x-user", ""), ("x-roles", "viewer")], 401),
        ("10.0.0.9", [("x-roles", "viewer")], 401),
        ("10.0.0.9", [("authorization", "Basic x"), ("x-user", "alice"), ("x-roles", "viewer")], 401),
        ("10.0.1.9", [("x-user", "alice"), ("x-roles", "viewer")], 401),
        ("127.0.0.1", [("x-user", "alice"), ("x-roles", "viewer"), ("x-forwarded-for", "10.0.0.9")], 401),
    ],
    ids=str,
)
@pytest.mark.proves("api/client-proxy-sends-proxy")
async def test_proxy_identifies_users_only_from_its_own_address(clock, peer, headers, status):
    settings = ApiSettings(trusted_proxies=("10.0.0.0/24",), proxy_user_header="X-User", proxy_role_header="X-Roles")
    async with api(settings, clock, peer=peer) as client:
        assert (await client.get("/v1/groups", headers=headers)).status_code == status


def test_address_of_a_proxy_is_checked():
    for network in ("proxy.example", "0.0.0.0/0", "::/0", "0.0.0.0/1", "128.0.0.0/1", "2000::/3", "::ffff:0:0/0"):
        with pytest.raises(ValueError, match="trusted_proxies"):
            ApiSettings(trusted_proxies=(network,))
    assert ApiSettings(trusted_proxies=("10.0.0.0/8", "fc00::/7", "::1")).identifies


@pytest.fixture(scope="module", autouse=True)
def known_issuer(tmp_path_factory):
    """A verifier for the test that hypothesis repeats."""
    global KNOWN, SOUND
    file = tmp_path_factory.mktemp("issuer") / "key.pem"
    file.write_bytes(RSA.as_pem(private=False))
    KNOWN = JwtVerifier(settings_of(file), clock=VirtualClock())
    SOUND = signed({"sub": "alice", "exp": int(time.time())})


KNOWN: JwtVerifier
SOUND: str
