"""A blocking client of a daemon's HTTP API. Keys are always in the query, which can hold any key.

Used by the command line and by the poison client. If a standby answers with the address of the leader, the request is
sent once more, to the leader.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from osrdyne.errors import ConfigurationError, OsrdyneError
from osrdyne.logs import mask_uri
from osrdyne.protocol.leaders import leader_to_ask

TIMEOUT = 30.0
TOKEN_VARIABLE = "OSRDYNE_API_TOKEN"
UNIX = "unix:"
"""What the address of a Unix socket begins with; its path follows."""

Parameter = str | int | float | bool | Sequence[str] | None


def token_from_environment(variable: str = TOKEN_VARIABLE) -> str | None:
    """The token in the variable (`OSRDYNE_API_TOKEN`), or in the file that the variable with `_FILE` names.

    Raises `ConfigurationError` if the file cannot be read, or if both variables are set.
    """
    token, file = os.environ.get(variable), os.environ.get(f"{variable}_FILE")
    if token and file:
        raise ConfigurationError(f"Set either {variable} or {variable}_FILE, not both.")
    return token_of_file(file, f"{variable}_FILE") if file else token or None


def token_of_file(file: str, place: str) -> str:
    """The token in a file. Raises `ConfigurationError`, which names `place`: the setting or variable of the file."""
    try:
        return Path(file).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"{place}: cannot read {file}: {reason}.") from error


class DaemonApi:
    """One pool, by the base address of the API of one of its daemons.

    `timeout` in seconds, for one answer. `token`: of the API; by default that of the environment. `ca_file`:
    authorities to trust for https; the system's by default.
    """

    def __init__(
        self, url: str, *, timeout: float = TIMEOUT, token: str | None = None, ca_file: str | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._ca_file = ca_file
        self._token = token_from_environment() if token is None else token
        self.answered_by = self._url
        """The address of the daemon that gave the latest answer."""
        if self._token is not None and not (self._token.isascii() and self._token.isprintable()):
            raise ConfigurationError(
                "The API token contains invalid characters. `osrdyne token create` creates a valid one."
            )
        try:
            address = httpx.URL(url)
            usable = url.startswith(f"{UNIX}/") or (address.scheme in {"http", "https"} and bool(address.host))
        except httpx.InvalidURL:
            usable = False
        if not usable:
            raise ConfigurationError("--api must be an address such as http://127.0.0.1:4242, or unix:/path/of/socket.")

    def get(self, path: str, /, **parameters: Parameter) -> Any:
        """Read a resource. Returns the JSON answer, also that of a daemon that is not ready. Raises `OsrdyneError`."""
        return self._ask("GET", path, parameters)

    def post(self, path: str, /, *, if_match: int | None = None, **parameters: Parameter) -> Any:
        """Make a change; `if_match`: only if this version is active. Raises `OsrdyneError`."""
        return self._ask("POST", path, parameters, if_match=if_match)

    def send(
        self, method: str, path: str, document: object, /, *, if_match: int | None = None, **parameters: Parameter
    ) -> Any:
        """Send a JSON document: a change, or a read whose arguments do not fit into a query. `if_match`: as in `post`.
        Raises `OsrdyneError`."""
        return self._ask(method, path, parameters, document, if_match=if_match)

    def _ask(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, Parameter],
        document: object | None = None,
        *,
        if_match: int | None = None,
    ) -> Any:
        headers = {} if if_match is None else {"if-match": f'"{if_match}"'}
        answer = self._send(self._url, method, path, parameters, document, headers)
        content = _content(answer, self._url)
        leader = None if answer.is_success else leader_to_ask(self._url, content)
        if leader is not None:
            answer = self._send(leader, method, path, parameters, document, headers)
            content = _content(answer, leader)
        if answer.is_success or "components" in content:
            return content
        if "detail" not in content:
            raise _other_server(self.answered_by)
        detail, remedy = str(content["detail"]), content.get("remedy", "")
        end = "." if remedy and not detail.endswith((".", "!", "?")) else ""
        raise OsrdyneError(f"{detail}{end} {remedy}".strip())

    def _send(
        self,
        url: str,
        method: str,
        path: str,
        parameters: Mapping[str, Parameter],
        document: object | None,
        further: Mapping[str, str],
    ) -> httpx.Response:
        given = {name: value for name, value in parameters.items() if value is not None}
        headers = {**further, **({"content-type": "application/json"} if method != "GET" else {})}
        if self._token is not None and self._may_send_token_to(url):
            headers["authorization"] = f"Bearer {self._token}"
        content = None if document is None else json.dumps(document)
        base, transport = url, None
        if url.startswith(UNIX):
            base, transport = "http://localhost", httpx.HTTPTransport(uds=url.removeprefix(UNIX), verify=False)
        self.answered_by = url
        try:
            # `trust_env=False`: proxies of the environment are for the internet, not for a daemon in the same network.
            with httpx.Client(
                timeout=self._timeout, trust_env=False, transport=transport, verify=self._trusted(url)
            ) as client:
                return client.request(method, f"{base}{path}", params=given, headers=headers, content=content)
        except httpx.TimeoutException as error:
            raise OsrdyneError(
                f"The daemon at {mask_uri(url)} did not answer within {self._timeout:g} seconds."
            ) from error
        except httpx.HTTPError as error:
            raise OsrdyneError(f"{_unreachable(error, url)}") from error

    def _may_send_token_to(self, url: str) -> bool:
        """Not without TLS if the standby was asked over TLS: the leader's address in its answer may be forged."""
        return urlsplit(url).scheme == urlsplit(self._url).scheme or urlsplit(self._url).scheme != "https"

    def _trusted(self, url: str) -> ssl.SSLContext | bool:
        """The authorities to trust; False without TLS, because it takes time to load those of the system."""
        if urlsplit(url).scheme != "https":  # in lower case, as httpx reads it
            return False
        if self._ca_file is None:
            return True
        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            reason = error.strerror or "it holds no certificate"
            raise ConfigurationError(f"api.tls.ca_file: cannot read {self._ca_file}: {reason}.") from error


def _unreachable(error: httpx.HTTPError, url: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"The certificate of the daemon at {mask_uri(url)} was refused. Set api.tls.ca_file to the authority that "
            "signed it, and use a name that the certificate is for."
        )
    return (
        f"No osrdyne daemon answers at {mask_uri(url)}: start one with `osrdyne run` or `osrdyne dev`, or name its "
        "address with --api."
    )


def _content(answer: httpx.Response, url: str) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError:
        content = None
    if content is None and answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise OsrdyneError(
            f"The daemon at {mask_uri(url)} has too many connections (api.limit_concurrency). Try again."
        )
    if not isinstance(content, dict):
        raise _other_server(url)
    return content


def _other_server(url: str) -> OsrdyneError:
    return OsrdyneError(f"The server at {mask_uri(url)} is not an osrdyne daemon: give its address with --api.")
