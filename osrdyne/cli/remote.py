"""Talks to a daemon's HTTP API. Keys always travel in the query, where every key is possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from osrdyne.errors import ConfigurationError, OsrdyneError
from osrdyne.logs import mask_uri

_TIMEOUT = 30.0


class Remote:
    """One daemon, by the base address of its API."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            usable = httpx.URL(url).scheme in {"http", "https"} and bool(httpx.URL(url).host)
        except httpx.InvalidURL:
            usable = False
        if not usable:
            raise ConfigurationError("--api must be an address such as http://127.0.0.1:4242.")

    def get(self, path: str, **parameters: str | int) -> Any:
        """The JSON answer; also that of a daemon that says it is not ready. Raises `OsrdyneError`."""
        return self._ask("GET", path, parameters)

    def post(self, path: str, **parameters: str | int) -> Any:
        """Ask for a change. Raises `OsrdyneError`."""
        return self._ask("POST", path, parameters)

    def _ask(self, method: str, path: str, parameters: Mapping[str, str | int]) -> Any:
        where = mask_uri(self._url)
        try:
            # The environment's proxies are for the internet, not for a daemon next door.
            with httpx.Client(timeout=_TIMEOUT, trust_env=False) as client:
                headers = {"content-type": "application/json"} if method == "POST" else None
                answer = client.request(method, f"{self._url}{path}", params=parameters, headers=headers)
        except httpx.TimeoutException as error:
            raise OsrdyneError(f"The daemon at {where} did not answer within {_TIMEOUT:g} seconds.") from error
        except httpx.HTTPError as error:
            raise OsrdyneError(
                f"No osrdyne daemon answers at {where}: start one with `osrdyne run`, or name its address with --api."
            ) from error
        return _content(answer, where)


def _content(answer: httpx.Response, where: str) -> Any:
    try:
        content = answer.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise OsrdyneError(f"What answers at {where} is not an osrdyne daemon: name its address with --api.")
    if answer.is_success or "components" in content:
        return content
    detail, remedy = content.get("detail", f"HTTP status {answer.status_code}."), content.get("remedy", "")
    raise OsrdyneError(f"{detail} {remedy}".strip())
