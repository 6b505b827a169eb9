"""`osrdyne token …`: the tokens of the HTTP API, in the file that `api.tokens_file` names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from osrdyne.api.access.token_file import TokenFile
from osrdyne.auth.grants import Grant, KeyScope, Principal, Role, grants_of, parse_scope
from osrdyne.auth.tokens import MAX_TOKENS, Token, check_name, digest_of, generate_token
from osrdyne.cli.options import ConfigOption, Output, OutputOption, load, positive_seconds
from osrdyne.cli.output import ago, ahead, print_json, print_table
from osrdyne.errors import ConfigurationError

app = typer.Typer(help="Create, list and revoke tokens of the HTTP API.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the user or program of the token.")]
FileOption = Annotated[str | None, typer.Option("--file", metavar="FILE", help="Token file. Default: api.tokens_file.")]


@app.command()
def create(
    name: NameArgument,
    role: Annotated[
        Role | None,
        typer.Option(
            "--role", help="`viewer` reads, `operator` also starts and stops groups, `admin` does everything."
        ),
    ] = None,
    grant: Annotated[
        list[str] | None,
        typer.Option(
            "--grant",
            metavar="GRANT[=PATTERN]",
            help="Further grant, repeatable: `bodies`, `send`, `listen`; e.g. `bodies=tpch/{table}` for some keys.",
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option("--keys", metavar="PATTERN", help="Keys of all grants, e.g. `tpch/{table}`. Default: all keys."),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="DURATION", help="Validity, e.g. 30d. Default: no expiry."),
    ] = None,
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Create a token and print it once: only its digest is stored. A running daemon accepts it immediately."""
    check_name(name)
    grants = _grants(role, grant or [], keys)
    text, created = generate_token(), datetime.now(UTC).replace(microsecond=0)
    try:
        until = None if expires is None else created + timedelta(seconds=positive_seconds(expires, option="--expires"))
    except OverflowError as error:
        raise ConfigurationError("--expires: too long; omit it for a token that does not expire.") from error

    def add(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        if any(token.name == name for token in tokens):
            raise ConfigurationError(f"There is a token {name!r} already: revoke it first, or choose another name.")
        if len(tokens) >= MAX_TOKENS:
            raise ConfigurationError(f"There are {MAX_TOKENS} tokens, which is the maximum: revoke some.")
        return (*tokens, Token(name, grants, digest_of(text), created, until))

    _file(file, config).change(add)
    typer.echo(text)


@app.command("list")
def list_tokens(file: FileOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
    """List the tokens: names, grants and when they expire."""
    tokens, now = _file(file, config).read(), datetime.now(UTC)
    if output is Output.JSON:
        print_json(
            [
                {
                    "name": token.name,
                    "role": _role(token),
                    "grants": {grant.value: scope.pattern for grant, scope in token.grants.items()},
                    "created": token.created.isoformat(),
                    "expires": None if token.expires is None else token.expires.isoformat(),
                    "expired": token.has_expired(now),
                }
                for token in tokens
            ]
        )
        return
    rows = (
        (token.name, _role(token) or "-", _shown(token), ago(token.created.timestamp()), _expiry(token, now))
        for token in tokens
    )
    print_table(("name", "role", "grants", "created", "expires"), rows, empty="There are no tokens.")


@app.command()
def revoke(name: NameArgument, file: FileOption = None, config: ConfigOption = None) -> None:
    """Remove a token. A running daemon refuses it from then on."""

    def remove(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        left = tuple(token for token in tokens if token.name != name)
        if len(left) == len(tokens):
            raise ConfigurationError(f"There is no token {name!r}: `osrdyne token list` shows them.")
        return left

    _file(file, config).change(remove)
    typer.echo(f"The token {name} is revoked.")


def _grants(role: Role | None, further: list[str], keys: str | None) -> dict[Grant, KeyScope]:
    """The grants of --role, --keys and --grant. Raises `ConfigurationError` for an unknown grant or pattern."""
    found = grants_of(role, keys=_scope(keys, "--keys"))
    for text in further:
        name, equals, pattern = text.partition("=")
        if name not in list(Grant):
            raise ConfigurationError(f"--grant: {name!r} is not a grant; the grants are {', '.join(Grant)}.")
        found[Grant(name)] = _scope(pattern if equals else keys, f"--grant {name}")
    if not found:
        raise ConfigurationError("A token needs a role or a grant: use --role or --grant.")
    return found


def _scope(pattern: str | None, option: str) -> KeyScope:
    try:
        return parse_scope(pattern)
    except ValueError as error:
        raise ConfigurationError(f"{option}: {error}.") from None


def _role(token: Token) -> str | None:
    role = Principal(token.name, token.grants).role
    return None if role is None else role.value


def _shown(token: Token) -> str:
    return ", ".join(
        grant.value if scope.pattern is None else f"{grant}={scope.pattern}" for grant, scope in token.grants.items()
    )


def _expiry(token: Token, now: datetime) -> str:
    if token.expires is None:
        return "never"
    return "expired" if token.has_expired(now) else ahead(token.expires.timestamp())


def _file(file: str | None, config: str | None) -> TokenFile:
    path = file or load(config, None).settings.api.tokens_file
    if path is None:
        raise ConfigurationError("No token file: set api.tokens_file, or use --file.")
    if Path(path).is_dir():
        raise ConfigurationError(f"{path}: this is a directory; name the file of API tokens.")
    return TokenFile(path)
