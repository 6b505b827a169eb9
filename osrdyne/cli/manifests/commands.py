"""The commands of every kind of manifest: `check`, `show`, `apply`, `diff`, `history`, `rollback` and `clear`. Used by
`routes`, `splitter`, `profiles`, `policies`, `quota` and `circuits config`, which add their own commands."""

from __future__ import annotations

import getpass
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TextIO

import typer

from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, load, remote
from osrdyne.cli.output import ago, print_json, print_table, printable
from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.pool.routing.manifest_store import D, ManifestKind

if TYPE_CHECKING:
    from osrdyne.client.daemon_api import DaemonApi

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="File, JSON or YAML; - reads standard input.")]
AuthorOption = Annotated[
    str | None, typer.Option("--author", metavar="NAME", help="Author stored with the version. Default: user@host.")
]
ExpectOption = Annotated[
    int | None,
    typer.Option(
        "--expect-version",
        metavar="VERSION",
        min=0,
        help="Active version expected; otherwise nothing changes. 0: no version yet.",
    ),
]
VersionArgument = Annotated[
    int, typer.Argument(metavar="VERSION", min=1, help="Version number, as listed by `history`.")
]


class ManifestCommands(Generic[D]):
    """The commands of one kind of manifest.

    `load` parses a manifest, `print_meaning` prints its meaning. `none`: the behaviour without a manifest, as a
    sentence. `warnings`: those that depend on the configuration. `size`: the plural of its entries, such as routes.
    `applies`: the effect of a change, as the end of a sentence. `noun`: the word for it in help and messages.
    """

    def __init__(
        self,
        kind: ManifestKind,
        *,
        load: Callable[[str], D],
        print_meaning: Callable[[D], None],
        none: str,
        size: str,
        applies: str = "for all new requests. Waiting requests are not affected",
        warnings: Callable[[D, Settings], Iterable[Problem]] = lambda manifest, settings: (),
        noun: str = "manifest",
    ) -> None:
        self._kind = kind
        self._load = load
        self._print_meaning = print_meaning
        self._none = none
        self._size = size
        self._applies = applies
        self._warnings = warnings
        self._noun = noun

    def add_to(self, app: typer.Typer) -> None:
        for command in (self.check, self.show, self.apply, self.diff, self.history, self.rollback, self.clear):
            help_text = inspect.getdoc(command) or ""
            if command == self.apply:
                help_text = f"Make a manifest the active one, {self._applies}."
            app.command(help=help_text.replace("manifest", self._noun))(command)

    def read(self, file: str) -> D:
        """Raises `InvalidDocumentError`, a `ConfigurationError` that lists all errors."""
        with opened(file) as text:
            written = text.read()
        if not written.strip():
            raise ConfigurationError(f"{file} is empty: write an empty {self._noun} as {{}}.")
        try:
            return self._load(written)
        except InvalidDocumentError as error:
            raise error.in_file("standard input" if file == "-" else file) from None

    def check(self, file: FileArgument, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
        """Check a manifest: print every error with its place, or the meaning of the manifest in this pool."""
        manifest = self.read(file)
        for warning in (*manifest.warnings, *self._warnings(manifest, load(config, None).settings)):
            typer.echo(f"warning: {printable(warning)}", err=True)
        if output is Output.JSON:
            print_json(manifest.document())
            return
        self._print_meaning(manifest)

    def show(self, api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
        """Show the active manifest. With --output json the output is a manifest for `apply`."""
        current = self._current(remote(api, config))
        if output is Output.JSON:
            print_json(current["manifest"] if current else None)
        elif current is None:
            typer.echo(f"There is no {self._noun}: {self._none}")
        else:
            typer.echo(f"version {current['version']}, by {printable(current['author'])}, {ago(current['at'])}")
            self._print_meaning(self._load(json.dumps(current["manifest"])))

    def apply(
        self,
        file: FileArgument,
        author: AuthorOption = None,
        expect_version: ExpectOption = None,
        api: ApiOption = None,
        config: ConfigOption = None,
    ) -> None:
        """Make a manifest the active one."""
        document = self.read(file).document()
        daemon = remote(api, config)
        path, who = f"/v1/{self._kind.path}", author or own_name()
        report(daemon.send("PUT", path, document, author=who, if_match=expect_version), daemon)

    def diff(self, file: FileArgument, api: ApiOption = None, config: ConfigOption = None) -> None:
        """Show what `apply` would change. Exit code 1 when there is a difference."""
        current = self._current(remote(api, config))
        before, after = (current["manifest"] if current else {}), self.read(file).document()
        lines = list(unified_diff(_lines(before), _lines(after), "active", file, lineterm=""))
        typer.echo("\n".join(lines) if lines else "No difference.")
        if lines:
            raise typer.Exit(1)

    def history(self, api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
        """List the stored versions, newest first."""
        as_json = output is Output.JSON
        versions = remote(api, config).get(f"/v1/{self._kind.path}/history", manifests=as_json)["versions"]
        if as_json:
            print_json(versions)
            return
        rows = ((one["version"], one["author"], ago(one["at"]), one["size"]) for one in versions)
        print_table(("version", "author", "applied", self._size), rows, empty=f"There has never been a {self._noun}.")

    def rollback(
        self,
        version: VersionArgument,
        author: AuthorOption = None,
        expect_version: ExpectOption = None,
        api: ApiOption = None,
        config: ConfigOption = None,
    ) -> None:
        """Make an earlier version active again, as a new version."""
        daemon, path = remote(api, config), f"/v1/{self._kind.path}/rollback"
        report(daemon.post(path, version=version, author=author or own_name(), if_match=expect_version), daemon)

    def clear(
        self,
        author: AuthorOption = None,
        expect_version: ExpectOption = None,
        api: ApiOption = None,
        config: ConfigOption = None,
    ) -> None:
        """Remove the active manifest, as a new version; `rollback` restores an earlier one."""
        daemon, path = remote(api, config), f"/v1/{self._kind.path}"
        report(daemon.send("DELETE", path, None, author=author or own_name(), if_match=expect_version), daemon)
        typer.echo(f"There is no {self._noun} now: {self._none}")

    def active(self, daemon: DaemonApi) -> D | None:
        """The active manifest. Raises `OsrdyneError`."""
        current = self._current(daemon)
        return None if current is None else self._load(json.dumps(current["manifest"]))

    def _current(self, daemon: DaemonApi) -> Any:
        return daemon.get(f"/v1/{self._kind.path}")["current"]


@contextmanager
def opened(file: str) -> Iterator[TextIO]:
    """The file of an argument, or standard input for `-`."""
    if file == "-":
        yield sys.stdin
        return
    try:
        with Path(file).open(encoding="utf-8-sig", errors="replace") as text:
            yield text
    except OSError as error:
        raise ConfigurationError(f"Cannot read {file}: {error.strerror}.") from error


def _lines(document: Any) -> list[str]:
    return json.dumps(document, indent=2, ensure_ascii=False).splitlines()


def report(change: Any, daemon: DaemonApi) -> None:
    """Print the result of a change."""
    for warning in change["warnings"]:
        typer.echo(f"warning: {printable(warning)}", err=True)
    place = f"pool {printable(change['pool'])}, daemon at {printable(daemon.answered_by)}"
    typer.echo(f"Version {change['version']} is active in the {place}.")
    for text, name in (
        ("New priorities, each group has a queue for each", "added_priorities"),
        ("Priorities that no route has any more", "removed_priorities"),
    ):
        if change.get(name):
            typer.echo(f"{text}: {', '.join(map(str, change[name]))}.")
    if change.get("changed_groups"):
        typer.echo(f"Groups whose workers are replaced: {change['changed_groups']}.")
    for priority, requests in change.get("pending", {}).items():
        typer.echo(f"Requests that still wait with priority {priority}, and are served: {requests}.")


def own_name() -> str:
    """The author of a change where none is given."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container that runs with any user id
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"
