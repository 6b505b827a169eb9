"""The options that many commands share, and the parsing of their values."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osrdyne.api.unix_socket import find_socket
from osrdyne.config.loading import DEFAULT_FILE, FILE_VARIABLE, LoadedSettings, load_settings
from osrdyne.config.models import ApiSettings, Settings
from osrdyne.config.types import parse_duration
from osrdyne.dev.announcement import find_announcement
from osrdyne.protocol.messages import AUTHORIZATION_HEADER

if TYPE_CHECKING:
    from osrdyne.client.daemon_api import DaemonApi


class Output(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"


ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Configuration file. Default: $OSRDYNE_CONFIG, or ./osrdyne.yaml if it exists.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="One setting, e.g. pool.id=example; repeatable."),
]
PoolOption = Annotated[str | None, typer.Option("--pool", metavar="ID", help="Short for --set pool.id=ID.")]
DriverOption = Annotated[str | None, typer.Option("--driver", metavar="NAME", help="Short for --set driver.name=NAME.")]
LogLevelOption = Annotated[
    str | None, typer.Option("--log-level", metavar="LEVEL", help="Short for --set log.level=LEVEL.")
]
ApiOption = Annotated[
    str | None,
    typer.Option("--api", metavar="URL", help="Address of the daemon's HTTP API. Default: from the configuration."),
]
TokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with an API token or JWT. Default: OSRDYNE_CALL_TOKEN or OSRDYNE_CALL_TOKEN_FILE.",
    ),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="Raw key; put -- before a key that begins with a dash.")
]


def load(
    config: str | None,
    assignments: list[str] | None,
    *,
    pool: str | None = None,
    driver: str | None = None,
    log_level: str | None = None,
    client: bool = False,
) -> LoadedSettings:
    """The settings of a command. Raises `ConfigurationError`.

    `client`: the command connects to a running pool. Without a configuration file it then uses that of a running
    `osrdyne dev`.
    """
    file = config or os.environ.get(FILE_VARIABLE) or (None if Path(DEFAULT_FILE).exists() else _dev_stack(client))
    given = {"--pool": ("pool.id", pool), "--driver": ("driver.name", driver), "--log-level": ("log.level", log_level)}
    flags = {flag: f"{path}={value}" for flag, (path, value) in given.items() if value is not None}
    return load_settings(file=file, assignments=assignments or (), flags=flags)


def _dev_stack(client: bool) -> str | None:
    return find_announcement() if client else None


def remote(api: str | None, config: str | None, *, timeout: float | None = None) -> DaemonApi:
    """The daemon's HTTP API; `timeout`: seconds for one answer, if not the default."""
    from osrdyne.client.daemon_api import DaemonApi  # only commands that need it: the import takes a while

    url, ca_file = daemon_address(api, config)
    return DaemonApi(url, ca_file=ca_file) if timeout is None else DaemonApi(url, ca_file=ca_file, timeout=timeout)


def daemon_address(api: str | None, config: str | None) -> tuple[str, str | None]:
    """The address of the daemon's HTTP API and the file of trusted authorities: `--api`, else the Unix socket of a
    daemon on this host, else the address of the configuration."""
    if api is not None:
        is_https = api.partition("://")[0].lower() == "https"
        return api, load(config, None, client=True).settings.api.tls.ca_file if is_https else None
    return local_address(load(config, None, client=True).settings)


def local_address(settings: Settings) -> tuple[str, str | None]:
    """The same for a daemon with these settings on this host."""
    from osrdyne.client.daemon_api import UNIX

    socket = find_socket(settings)
    return api_url(settings.api) if socket is None else f"{UNIX}{socket}", settings.api.tls.ca_file


def api_url(settings: ApiSettings) -> str:
    """The address on this host of a daemon with these settings."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # nosec B104
    scheme = "http" if settings.tls.certificate_file is None and settings.tls.ca_file is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def positive_seconds(text: str, *, option: str, at_most: float = float("inf")) -> float:
    """The seconds of a duration such as `30s`. Raises `BadParameter` for one that is not greater than zero, or longer
    than `at_most`."""
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if not isinstance(duration, float) or duration <= 0:
        raise typer.BadParameter("must be greater than zero", param_hint=option)
    if duration > at_most:
        raise typer.BadParameter(f"must be at most {at_most / 86_400:g} days", param_hint=option)
    return duration


def parse_header(text: str, *, option: str = "--header") -> tuple[str, str]:
    """Name and value of `name=value`. Raises `BadParameter`."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not in the form name=value", param_hint=option)
    if name.lower() == AUTHORIZATION_HEADER:
        raise typer.BadParameter(
            "options show in the process list: `osrdyne call` takes the token from --token-file or OSRDYNE_CALL_TOKEN, "
            "`osrdyne explain` its owner from --principal",
            param_hint=option,
        )
    return name, value


def read_body(data: str | None) -> bytes | None:
    """The bytes of `-d`, checked to be JSON in UTF-8; None without it, and empty for an empty text or file. A file may
    begin with a byte order mark, and be in UTF-16, as programs of Windows write it."""
    if data is None:
        return None
    try:
        if data == "-":
            body = sys.stdin.buffer.read()
        elif data.startswith("@"):
            body = Path(data[1:]).read_bytes()
        else:
            body = data.encode("utf-8", "surrogateescape")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {data[1:]}: {error.strerror}", param_hint="--data") from error
    if not body:
        return body
    try:
        text = body.decode(json.detect_encoding(body))
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"this is not JSON: {error}", param_hint="--data") from error
    return text.encode()
