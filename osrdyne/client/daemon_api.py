"""Talks to a daemon's HTTP API, blocking. Keys always travel in the query, where every key is possible.

Used by the command line and by the poison client. A daemon that stands by names the one that leads: that one is asked
then, once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from osrdyne.errors import ConfigurationError, OsrdyneError
from osrdyne.logs import mask_uri
from osrdyne.protocol.leaders import leader_to_ask

TIMEOUT = 30.0

Parameter = str | int | float | bool | Sequence[str] | None


class DaemonApi:
    """One pool, by the base address of the API of one of its daemons. `timeout` in seconds, for one answer."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        try:
            usable = httpx.URL(url).scheme in {"http", "https"} and bool(httpx.URL(url).host)
        except httpx.InvalidURL:
            usable = False
        if not usable:
            raise ConfigurationError("--api must be an address such as http://127.0.0.1:4242.")

    def get(self, path: str, /, **parameters: Parameter) -> Any:
        """The JSON answer; also that of a daemon that says it is not ready. Raises `OsrdyneError`."""
        return self._ask("GET", path, parameters)

    def post(self, path: str, /, **parameters: Parameter) -> Any:
        """Ask for a change. Raises `OsrdyneError`."""
        return self._ask("POST", path, parameters)

    def send(self, method: str, path: str, document: object, /, **parameters: Parameter) -> Any:
        """Ask with a JSON document: a change, or a question that does not fit into a query. Raises `OsrdyneError`."""
        return self._ask(method, path, parameters, document)

    def _ask(self, method: str, path: str, parameters: Mapping[str, Parameter], document: object | None = None) -> Any:
        answer = self._send(self._url, method, path, parameters, document)
        content = _content(answer, self._url)
        leader = None if answer.is_success else leader_to_ask(self._url, content)
        if leader is not None:
            answer = self._send(leader, method, path, parameters, document)
            content = _content(answer, leader)
        if answer.is_success or "components" in content:
            return content
        detail, remedy = content.get("detail", f"HTTP status {answer.status_code}."), content.get("remedy", "")
        raise OsrdyneError(f"{detail} {remedy}".strip())

    def _send(
        self, url: str, method: str, path: str, parameters: Mapping[str, Parameter], document: object | None
    ) -> httpx.Response:
        given = {name: value for name, value in parameters.items() if value is not None}
        headers = {"content-type": "application/json"} if method != "GET" else None
        content = None if document is None else json.dumps(document)
        try:
            # The environment's proxies are for the internet, not for a daemon next door.
            with httpx.Client(timeout=self._timeout, trust_env=False) as client:
                return client.request(method, f"{url}{path}", params=given, headers=headers, content=content)
        except httpx.TimeoutException as error:
            raise OsrdyneError(
                f"The daemon at {mask_uri(url)} did not answer within {self._timeout:g} seconds."
            ) from error
        except httpx.HTTPError as error:
            raise OsrdyneError(
                f"No osrdyne daemon answers at {mask_uri(url)}: start one with `osrdyne run`, or name its address with "
                "--api."
            ) from error


def _content(answer: httpx.Response, url: str) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise OsrdyneError(f"What answers at {mask_uri(url)} is not an osrdyne daemon: name its address with --api.")
    return content
