"""`osrdyne quota …`: how much clients may send, and how much they have sent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osrdyne.cli.manifests.commands import AuthorOption, ManifestCommands, own_name, report
from osrdyne.cli.options import ApiOption, ConfigOption, Output, OutputOption, remote
from osrdyne.cli.output import ago, hours_and_minutes, print_json, print_table, printable
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.quotas.document import Per, QuotaManifest, Share, describe, describe_rate, load_quotas
from osrdyne.pool.routing.manifest_store import ManifestKind

if TYPE_CHECKING:
    from osrdyne.client.daemon_api import DaemonApi

app = typer.Typer(
    help="Manage the quotas of a managed pool: how much clients may send, and at which rate workers serve.",
    no_args_is_help=True,
)


def print_quotas(manifest: QuotaManifest) -> None:
    rows = []
    if manifest.pool is not None:
        shared = "all requests" if manifest.share is Share.NONE else f"shared by every {manifest.share}"
        rows.append(("pool", shared, describe(manifest.pool)))
    for rule in manifest.rules:
        patterns = [
            f"{word} {pattern.text}"
            for word, pattern in (("keys", rule.keys), ("principals", rule.principals))
            if pattern is not None
        ]
        each = [] if rule.per is Per.RULE else [f"each {rule.per}"]
        rows.append((f"rule {rule.name}", ", ".join([*patterns, *each]) or "all requests", describe(rule.limits)))
    rows += [
        (f"rate {one.name}", "all keys" if one.keys is None else f"keys {one.keys.text}", describe_rate(one))
        for one in manifest.rates
    ]
    print_table(("meter", "of", "limits"), rows, empty="No limits: clients may send as much as they want.")


class QuotaCommands(ManifestCommands[QuotaManifest]):
    """The commands of the document; `show` includes the usage."""

    def show(self, api: ApiOption = None, config: ConfigOption = None, output: OutputOption = Output.TABLE) -> None:
        """Show the limits, today's usage, and when a quota will be used up."""
        answer = remote(api, config).get("/v1/quota")
        if output is Output.JSON:
            print_json(answer)
            return
        current = answer["current"]
        if current is None or current["manifest"] is None:
            typer.echo("There are no quotas: clients may send as much as they want.")
            return
        typer.echo(f"version {current['version']}, by {printable(current['author'])}, {ago(current['at'])}")
        print_quotas(load_quotas(json.dumps(current["manifest"])))
        if answer["usage"] is not None:
            print_usage(answer["usage"])


def print_usage(usage: Any) -> None:
    rows = []
    for meter in usage["meters"]:
        ratio = "-" if meter["ratio"] is None else f"{100 * meter['ratio']:.1f} %"
        rows.append(
            (meter["name"], f"{meter['used']:,}", ratio, "" if meter["shared"] or not meter["each"] else "most")
        )
        rows += [(f"  {printable(one['name'])}", f"{one['used']:,}", "", "") for one in meter["largest"][:10]]
    print_table(("meter", "used today", "", ""), rows, empty="")
    typer.echo(f"The quotas are reset in {hours_and_minutes(usage['remaining'])}.")
    if (forecast := usage["forecast"]) is not None:
        typer.echo(forecast_text(forecast))


def forecast_text(forecast: Any) -> str:
    """The forecast in a sentence or two."""
    if forecast["earliest"] == 0:
        text = "The quota of the pool is used up."
    elif forecast["earliest"] is None:
        text = "At the current rate the quota of the pool lasts for the day."
    else:
        latest = forecast["latest"]
        until = "or not today" if latest is None else f"to {hours_and_minutes(latest)}"
        earliest = hours_and_minutes(forecast["earliest"])
        text = f"At the current rate the quota of the pool is used up in {earliest} {until}."
    if forecast["by_history"]:
        text += f" By the same time of earlier days: in {hours_and_minutes(forecast['by_history'])}."
    if forecast["yesterdays_error"] is not None:
        text += f" Yesterday's forecast was off by {100 * forecast['yesterdays_error']:+.0f} %."
    return text


commands = QuotaCommands(
    ManifestKind.QUOTA,
    load=load_quotas,
    print_meaning=print_quotas,
    none="clients may send as much as they want.",
    size="rules",
    noun="document",
)
commands.add_to(app)


@app.command("set")
def set_quota(
    rule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Rule to change or to add. Default: the limits of the pool.")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="TIER", help="iot-hub-free, -s1, -s2 or -s3.")] = None,
    units: Annotated[int | None, typer.Option(metavar="NUMBER", help="Units of the daily quota.")] = None,
    messages_per_day: Annotated[int | None, typer.Option(metavar="NUMBER", help="Blocks a day and unit.")] = None,
    block_bytes: Annotated[int | None, typer.Option(metavar="BYTES", help="Size of a block. Default: 4096.")] = None,
    send_rate: Annotated[float | None, typer.Option(metavar="NUMBER", help="Messages a second.")] = None,
    burst: Annotated[int | None, typer.Option(metavar="NUMBER", help="Messages at once.")] = None,
    share: Annotated[str | None, typer.Option(metavar="WHO", help="Pool only: none, key or principal.")] = None,
    keys: Annotated[str | None, typer.Option(metavar="PATTERN", help="Rule only: keys that it counts.")] = None,
    principals: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Rule only: users or applications that it counts.")
    ] = None,
    per: Annotated[str | None, typer.Option(metavar="WHO", help="Rule only: rule, key or principal.")] = None,
    author: AuthorOption = None,
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Replace the limits of the pool or of one rule."""
    limits = {"preset": preset, "units": units, "messages_per_day": messages_per_day, "block_bytes": block_bytes,
              "send_rate": send_rate, "burst": burst}  # fmt: skip
    own = {"share": share} if rule is None else {"keys": keys, "principals": principals, "per": per}
    other = {"keys": keys, "principals": principals, "per": per} if rule is None else {"share": share}
    for name, value in other.items():
        if value is not None:
            place = "--rule NAME" if rule is None else "the pool, so without --rule"
            raise typer.BadParameter(f"needs {place}", param_hint=f"--{name}")
    given = {name: value for name, value in (limits | own).items() if value is not None}
    with_place = given if rule is None else {"name": rule, **given}
    _replace("pool" if rule is None else "rules", with_place, author, remote(api, config))


@app.command()
def rate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Rate to change or to add.")],
    preset: Annotated[str | None, typer.Option(metavar="TIER", help="store-s1 or store-s2.")] = None,
    units: Annotated[int | None, typer.Option(metavar="NUMBER", help="Units of each worker. Default: 1.")] = None,
    max_units: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Units of all workers of a group. Default: 10.")
    ] = None,
    events_per_minute: Annotated[float | None, typer.Option(metavar="NUMBER", help="Events a minute and unit.")] = None,
    event_bytes: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Size of a block of an event. Default: 1024.")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Keys whose workers have it. Default: all.")
    ] = None,
    author: AuthorOption = None,
    api: ApiOption = None,
    config: ConfigOption = None,
) -> None:
    """Replace one rate at which workers serve events. Further requests wait in their queue."""
    given = {"name": name, "keys": keys, "preset": preset, "units": units, "max_units": max_units,
             "events_per_minute": events_per_minute, "event_bytes": event_bytes}  # fmt: skip
    present = {word: value for word, value in given.items() if value is not None}
    _replace("rates", present, author, remote(api, config))


def _replace(part: str, given: dict[str, Any], author: str | None, daemon: DaemonApi) -> None:
    """Replace the limits of the pool, or one rule or rate by its name, in the document of the daemon."""
    answer = daemon.get("/v1/quota")
    document = dict((answer["current"] or {}).get("manifest") or {})
    if part == "pool":
        document[part] = given
    else:
        listed = list(document.get(part, []))
        at = next((number for number, one in enumerate(listed) if one["name"] == given["name"]), len(listed))
        document[part] = [*listed[:at], given, *listed[at + 1 :]]
    try:
        checked = load_quotas(json.dumps(document)).document()
    except InvalidDocumentError as error:
        raise ConfigurationError(str(error)) from None
    # Refused if the document was changed since it was read.
    change = daemon.send("PUT", "/v1/quota", checked, author=author or own_name(), if_match=answer["version"])
    report(change, daemon)
