"""The options that many commands share, and what they become."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from osrdyne.api.unix_socket import find_socket
from osrdyne.config.loading import DEFAULT_FILE, FILE_VARIABLE, LoadedSettings, load_settings
from osrdyne.config.models import ApiSettings
from osrdyne.dev.announcement import find_announcement

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

    `client`: the command talks to a daemon, so that without a configuration file a running `osrdyne dev` is meant.
    """
    file = config or os.environ.get(FILE_VARIABLE) or (None if Path(DEFAULT_FILE).exists() else _dev_stack(client))
    given = {"--pool": ("pool.id", pool), "--driver": ("driver.name", driver), "--log-level": ("log.level", log_level)}
    flags = {flag: f"{path}={value}" for flag, (path, value) in given.items() if value is not None}
    return load_settings(file=file, assignments=assignments or (), flags=flags)


def _dev_stack(client: bool) -> str | None:
    return find_announcement() if client else None


def remote(api: str | None, config: str | None, *, timeout: float | None = None) -> DaemonApi:
    """The daemon's HTTP API; `timeout`: seconds for one answer, if not the default."""
    from osrdyne.client.daemon_api import DaemonApi  # a daemon needs no client, which takes a while to import

    url, ca_file = daemon_address(api, config)
    return DaemonApi(url, ca_file=ca_file) if timeout is None else DaemonApi(url, ca_file=ca_file, timeout=timeout)


def daemon_address(api: str | None, config: str | None) -> tuple[str, str | None]:
    """Where the daemon's HTTP API is, and the authorities to trust there: `--api`, else the Unix socket of a daemon on
    this host, else the address that the configuration makes the daemon listen on."""
    if api is not None:
        ca_file = load(config, None, client=True).settings.api.tls.ca_file if urlsplit(api).scheme == "https" else None
        return api, ca_file
    from osrdyne.client.daemon_api import UNIX

    settings = load(config, None, client=True).settings
    socket = find_socket(settings)
    return api_url(settings.api) if socket is None else f"{UNIX}{socket}", settings.api.tls.ca_file


def api_url(settings: ApiSettings) -> str:
    """Where a daemon with these settings is reached from this host."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # nosec B104
    scheme = "http" if settings.tls.certificate_file is None and settings.tls.ca_file is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
