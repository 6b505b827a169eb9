"""`osrdyne profiles …`: the settings of workers by key."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from osrdyne.cli.manifests.commands import ManifestCommands
from osrdyne.cli.output import print_table
from osrdyne.config.models import Settings
from osrdyne.config.profiles import profile_problems
from osrdyne.config.types import duration_text, size_text
from osrdyne.ingress.documents.problems import Problem
from osrdyne.ingress.profiles import ProfileManifest, load_profiles
from osrdyne.pool.routing.manifest_store import ManifestKind

app = typer.Typer(
    help="Manage profiles: settings of workers by key, such as memory, Spark settings and idle times.",
    no_args_is_help=True,
)


def print_profiles(manifest: ProfileManifest) -> None:
    rows = (
        (place, profile.match, " · ".join(f"{name} {_text(name, value)}" for name, value in profile.given().items()))
        for place, profile in enumerate(manifest.profiles, start=1)
    )
    print_table(("", "keys", "settings"), rows, empty="No profile: every key has the settings of the pool.")


def _text(name: str, value: object) -> str:
    if name == "spark_conf" and isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items())
    if name.endswith("_delay") and isinstance(value, float):
        return duration_text(value)
    return size_text(value) if name == "memory" and isinstance(value, int) else str(value)


def _problems(manifest: ProfileManifest, settings: Settings) -> Iterator[Problem]:
    """What a daemon with this configuration would refuse."""
    for path, message in profile_problems(settings, manifest.profiles):
        yield Problem(message, path=f"profiles.{path}".rstrip("."))


commands = ManifestCommands(
    ManifestKind.PROFILES,
    load=load_profiles,
    print_meaning=print_profiles,
    none="the profiles of worker.profiles in the leader's configuration are active; `osrdyne check-config` shows them.",
    size="profiles",
    applies="and replace the workers whose settings change",
    warnings=_problems,
    noun="document",
)
commands.add_to(app)
