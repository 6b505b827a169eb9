"""`osrdyne doctor`: check everything that the daemon needs, and name the remedy for each failure."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from osrdyne.aio.clock import SystemClock
from osrdyne.cli.daemon.app_check import check_app
from osrdyne.cli.options import ConfigOption, DriverOption, JsonOption, PoolOption, SetOption, load, local_address
from osrdyne.cli.output import print_json, print_table
from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError, OsrdyneError
from osrdyne.findings import Finding
from osrdyne.protocol.spark_master import MasterKind, SparkMaster, find_reachable, parse_spark_master, shown_master

if TYPE_CHECKING:
    from osrdyne.ingress.routes.manifest import Manifest


def doctor(
    config: ConfigOption = None,
    assignments: SetOption = None,
    pool: PoolOption = None,
    driver: DriverOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check broker, permissions, driver and Java. Exit code 1 if a check that the daemon depends on fails."""
    # Beside `osrdyne dev` its broker is checked, as other commands use it.
    settings = load(config, assignments, pool=pool, driver=driver, client=True).settings
    findings = [*asyncio.run(_examine(settings)), *check_answers(settings)]
    failed = [finding for finding in findings if finding.fatal and not finding.ok]
    if as_json:
        print_json([_as_dict(finding) for finding in findings])
    else:
        print_findings(findings)
        typer.echo(f"{len(failed)} of {len(findings)} checks failed." if failed else "All checks passed.")
    raise typer.Exit(1 if failed else 0)


async def _examine(settings: Settings) -> list[Finding]:
    from osrdyne.broker.doctor.run import run_broker_checks
    from osrdyne.drivers.registry import create_pool_driver
    from osrdyne.ingress.acceptance import TtlLimits, longest_ttl

    driver = create_pool_driver(settings, clock=SystemClock())
    try:
        manifest = await _active_routes(settings)
        if manifest is None:
            of_broker = await run_broker_checks(settings)
        else:
            limits = TtlLimits(settings.requests.ttl, settings.requests.longest_ttl)
            of_broker = await run_broker_checks(
                settings,
                priorities=manifest.priorities,
                delays_ms=manifest.retry_delays,
                longest_ttl=longest_ttl(manifest, limits),
            )
        java = await asyncio.to_thread(check_java, settings)
        master = await asyncio.to_thread(check_spark_master, settings)
        application = await asyncio.to_thread(check_application, settings)
        return [*of_broker, *await driver.check(), java, *master, *application]
    finally:
        await driver.close()


async def _active_routes(settings: Settings) -> Manifest | None:
    """The active route manifest, for which the daemon declares exchanges and queues; None if it cannot be read."""
    from osrdyne.broker.management.client import ManagementClient
    from osrdyne.pool.routing.routes import RouteStore

    if settings.pool.is_managed:
        with suppress(OsrdyneError):  # the checks of the HTTP API report the fault
            async with ManagementClient(settings.broker) as management:
                store = RouteStore(management, pool=settings.pool.id)
                if (kept := await store.current()) is not None:
                    return await store.load_kept(kept)
    return None


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table: ✔ passed, ✘ failed, ! a failure that is not fatal."""
    rows = [
        ("✔" if finding.ok else "✘" if finding.fatal else "!", finding.subject, _sentence(finding))
        for finding in findings
    ]
    print_table(("", "check", "result"), rows, empty="Nothing was checked.")


def _sentence(finding: Finding) -> str:
    return finding.message if finding.ok or finding.remedy is None else f"{finding.message} {finding.remedy}"


def _as_dict(finding: Finding) -> dict[str, object]:
    return {
        "subject": finding.subject,
        "ok": finding.ok,
        "fatal": finding.fatal,
        "message": finding.message,
        "remedy": finding.remedy,
    }


def check_answers(settings: Settings) -> list[Finding]:
    """What the daemon of the pool on this host reports about its answers, and those of its workers, that wait. No
    finding if none waits, or if no daemon answers."""
    from osrdyne.client.daemon_api import DaemonApi

    url, ca_file = local_address(settings)
    try:
        ready = DaemonApi(url, ca_file=ca_file, timeout=REACH_TIMEOUT).get("/ready")
    except OsrdyneError:
        return []
    components = ready.get("components", []) if ready.get("pool") == settings.pool.id else []
    remedy = "Read the reply queues or make them larger, or let daemon and workers publish to the default exchange."
    return [
        Finding(ANSWERS, False, f"{one['detail']}.", remedy, fatal=False)
        for one in components
        if one["name"] == ANSWERS
    ]


ANSWERS = "answers"  # A component of a leader.
REACH_TIMEOUT = 5.0  # Seconds for each address of a Spark master.


def check_application(settings: Settings) -> list[Finding]:
    """Check that workers of this host can import the application and that it accepts its configuration. No finding if
    both are true, or workers start elsewhere."""
    try:
        check_app(settings)
    except ConfigurationError as error:
        return [Finding("worker application", ok=False, message=error.message, remedy=None, fatal=True)]
    return []


def check_spark_master(settings: Settings) -> list[Finding]:
    """Check that the clusters of `worker.spark_master` and of the profiles accept connections from this host. No
    finding for a local Spark."""
    masters = [settings.worker.spark_master, *(one.spark_master for one in settings.worker.profiles)]
    distinct = dict.fromkeys(text for text in masters if text is not None)
    found = {text: one for text in distinct if (one := _check_master(parse_spark_master(text))) is not None}
    if len(found) < 2:
        return list(found.values())
    return [replace(one, subject=f"{one.subject} {shown_master(text)}") for text, one in found.items()]


def _check_master(master: SparkMaster) -> Finding | None:
    """Check that the cluster accepts connections. None for a local Spark."""
    subject = "spark master"
    if master.kind is MasterKind.YARN:
        known = os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")
        message = (
            f"YARN's configuration is in {known}." if known else "Neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set."
        )
        remedy = None if known else "Set HADOOP_CONF_DIR for the workers."
        return Finding(subject, ok=bool(known), message=message, remedy=remedy, fatal=False)
    if not master.addresses:
        return None
    failure = find_reachable(master.addresses, timeout=REACH_TIMEOUT)
    if failure is None:
        return Finding(subject, ok=True, message="It accepts connections from this host.")
    # Not fatal: workers may be on other hosts.
    remedy = "Start the cluster, or correct spark_master (worker.spark_master, or that of a profile)."
    return Finding(subject, ok=False, message=f"{failure}.", remedy=remedy, fatal=False)


MIN_JAVA = 17
_JAVA_REMEDY = "Install Java 17 or later (Debian: apt install default-jre-headless), or set JAVA_HOME."
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def check_java(settings: Settings, *, environment: Mapping[str, str] | None = None) -> Finding:
    """Check the Java for Spark on this host. Fatal only if workers of this host run Spark."""
    master = parse_spark_master(settings.worker.spark_master)
    fatal = settings.driver.name == "subprocess" and not master.is_connect
    program = _find_java(os.environ if environment is None else environment)
    if program is None:
        return Finding("java", ok=False, message="No Java was found.", remedy=_JAVA_REMEDY, fatal=fatal)
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Finding("java", ok=False, message=f"{program} does not run.", remedy=_JAVA_REMEDY, fatal=fatal)
    version = _JAVA_VERSION.search(done.stderr + done.stdout)
    if version is None or int(version[1]) < MIN_JAVA:
        found = f"version {version[1]}" if version else "of an unknown version"
        return Finding("java", ok=False, message=f"{program} is {found}.", remedy=_JAVA_REMEDY, fatal=fatal)
    return Finding("java", ok=True, message=f"{program} is version {version[1]}.")


def _find_java(environment: Mapping[str, str]) -> str | None:
    """The Java that Spark finds: by `JAVA_HOME`, then `PATH`."""
    home = environment.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environment.get("PATH"))
