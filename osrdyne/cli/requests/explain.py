"""`osrdyne explain KEY PATH`: the decisions of a managed pool about a request, step by step. Sends nothing."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Annotated, Any, get_args

import typer

from osrdyne.cli.manifests.policies import commands as policy_commands
from osrdyne.cli.manifests.profiles import commands as profile_commands
from osrdyne.cli.manifests.routes import commands as route_commands
from osrdyne.cli.manifests.splitter import commands as splitter_commands
from osrdyne.cli.options import (
    ApiOption,
    ConfigOption,
    KeyArgument,
    Output,
    OutputOption,
    load,
    parse_header,
    positive_seconds,
    read_body,
    remote,
)
from osrdyne.cli.output import print_json, printable
from osrdyne.config.profiles import describe_profile, profile_of
from osrdyne.errors import OsrdyneError
from osrdyne.ingress.acceptance import TtlLimits
from osrdyne.ingress.checks import KEY_CHECK, IngressChecks
from osrdyne.ingress.explain import explain as explained
from osrdyne.ingress.policies.authorization import authorization_check, delivery_authorization_check
from osrdyne.ingress.policies.limits import delivery_checks, request_checks
from osrdyne.ingress.policies.manifest import PolicyManifest
from osrdyne.ingress.policies.table import PolicyTable, bounds_of
from osrdyne.ingress.profiles import ProfileManifest
from osrdyne.ingress.requests import SystemName, sample_arrival
from osrdyne.ingress.routes.table import RouteTable
from osrdyne.ingress.splitter.rules import Splitter
from osrdyne.ingress.telemetry import Log
from osrdyne.protocol.names import PoolNames, parse_key


def explain(
    key: KeyArgument,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Handler of the worker, e.g. /sql.")],
    routes: Annotated[
        str | None,
        typer.Option("--routes", metavar="FILE", help="Route manifest to test. Default: the active one."),
    ] = None,
    splitter: Annotated[
        str | None,
        typer.Option("--splitter", metavar="FILE", help="Splitter manifest to test. Default: the active one."),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option("--policies", metavar="FILE", help="Queue policies to test. Default: the active ones."),
    ] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="Header as name=value; repeatable.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", metavar="JSON|@FILE|-", help="Request body; - reads standard input.")
    ] = None,
    content_type: Annotated[
        str | None,
        typer.Option(
            "--content-type",
            metavar="TYPE",
            help="Of the message. Default with a body: application/json in utf-8; with one of the two, the other is "
            "missing.",
        ),
    ] = None,
    content_encoding: Annotated[
        str | None, typer.Option("--content-encoding", metavar="NAME", help="Of the message; '' is none.")
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option("--system", metavar="NAME=VALUE", help="System property, e.g. messageId=1; repeatable."),
    ] = None,
    app_id: Annotated[str | None, typer.Option("--app-id", metavar="NAME", help="Name of the publisher.")] = None,
    principal: Annotated[
        str | None,
        typer.Option("--principal", metavar="NAME", help="Owner of the token, with the grant send for all keys."),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time limit of the request, e.g. 30s.")
    ] = None,
    api: ApiOption = None,
    config: ConfigOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show which rule splits a request, which routes match it, and its group, queue, priority and deadline."""
    given = dict(map(parse_header, headers or ()))
    body = read_body(data)
    properties = dict(map(_system_property, system or ()))
    limit = None if timeout is None else positive_seconds(timeout, option="--timeout")
    if routes is None and splitter is None and policies is None:
        sample = {
            "key": parse_key(key),
            "path": path,
            "headers": given,
            "app_id": app_id,
            "timeout": limit,
            "principal": principal,
            "content_type": content_type,
            "content_encoding": content_encoding,
            "system": properties,
        }
        document = {**sample, "body": json.loads(body) if body else None}
        print_explanation(remote(api, config).send("POST", "/v1/explain", document), output)
        return
    settings = load(config, None, client=True).settings
    arrival = sample_arrival(
        key,
        path,
        headers=given,
        body=body,
        app_id=app_id,
        timeout=limit,
        now=time.time(),
        principal=principal,
        content_type=content_type,
        content_encoding=content_encoding,
        system=properties,
    )
    own_routes = None if routes is None else route_commands.read(routes)
    own_rules = None if splitter is None else splitter_commands.read(splitter)
    own_policies = None if policies is None else policy_commands.read(policies)
    active_profiles: ProfileManifest | None = None
    files = {"routes": routes, "splitter": splitter, "policies": policies, "profiles": None}
    missing = [name for name, file in files.items() if file is None]
    try:
        daemon = remote(api, config)
        if own_routes is None:
            own_routes = route_commands.active(daemon)
            missing.remove("routes")
        if own_rules is None:
            own_rules = splitter_commands.active(daemon)
            missing.remove("splitter")
        if own_policies is None:
            own_policies = policy_commands.active(daemon)
            missing.remove("policies")
        active_profiles = profile_commands.active(daemon)
    except OsrdyneError as error:
        typer.echo(f"note: continuing without the active {', '.join(missing)}: {error}", err=True)
    now = datetime.fromtimestamp(arrival.accepted_ms / 1000, UTC)
    # Without stored profiles those of the configuration are active.
    profiles = settings.worker.profiles if active_profiles is None else active_profiles.profiles
    table = PolicyTable(own_policies or PolicyManifest(), bounds=bounds_of(settings), now=now)
    explanation = explained(
        arrival,
        None if own_routes is None else RouteTable(own_routes),
        splitter=None if own_rules is None or not own_rules.rules else Splitter(own_rules.rules),
        names=PoolNames(settings.pool.id),
        limits=TtlLimits(settings.requests.ttl, settings.requests.longest_ttl),
        checks=IngressChecks(
            [KEY_CHECK, authorization_check(table.of), *request_checks(table.of)],
            [delivery_authorization_check(table.of), *delivery_checks(table.of)],
        ),
        policy_of=table.of,
        log=Log(settings.telemetry.name, settings.telemetry.partitions if settings.telemetry.name else 0),
        profile_of=lambda key: describe_profile(profile_of(profiles, key)) if profiles else None,
    )
    print_explanation(explanation.to_json(), output)


def _system_property(text: str) -> tuple[SystemName, str]:
    """Raises `BadParameter` for a property that a publisher does not set, or that has an option of its own."""
    given, value = parse_header(text, option="--system")
    names: dict[str, SystemName] = {name.lower(): name for name in get_args(SystemName)}
    name = names.get(given.removeprefix("$").lower())
    if name is None:
        known = ", ".join(names.values())
        raise typer.BadParameter(
            f"{given!r} is none of {known}; others have an option, or osrdyne sets them", param_hint="--system"
        )
    return name, value


def print_explanation(explanation: Any, output: Output) -> None:
    """Print an explanation in the format of the API."""
    if output is Output.JSON:
        print_json(explanation)
        return
    for step in explanation["steps"]:
        typer.echo(f"{step['name']:9} {printable(step['text'])}")
