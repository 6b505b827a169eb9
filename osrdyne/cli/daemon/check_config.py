"""`osrdyne check-config`: the effective settings, each with its origin, secrets masked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

import typer
from pydantic import BaseModel

from osrdyne.aio.clock import SystemClock
from osrdyne.api.access.authenticators import authenticators_of
from osrdyne.cli.daemon.app_check import start_check, start_check_of_own_app
from osrdyne.cli.options import ConfigOption, DriverOption, JsonOption, PoolOption, SetOption, load
from osrdyne.cli.output import print_json
from osrdyne.config.display import Shown, shown_settings
from osrdyne.config.models import Settings
from osrdyne.config.spark_names import spark_warnings
from osrdyne.pool.workers.key_check import load_key_test


def check_config(
    config: ConfigOption = None,
    assignments: SetOption = None,
    pool: PoolOption = None,
    driver: DriverOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the configuration and print the effective settings, each with its source."""
    loaded = load(config, assignments, pool=pool, driver=driver)
    application_checked = start_check(loaded.settings)
    own_app_checked = start_check_of_own_app(loaded.settings)
    load_key_test(loaded.settings.worker.key_exists)
    options, doubt = asyncio.run(_check_driver(loaded.settings))
    application_checked()
    for warning in [
        *authenticators_of(loaded.settings.api, clock=SystemClock())[1],
        *([] if doubt is None else [doubt]),
        *spark_warnings(loaded.settings),
        *([] if (problem := own_app_checked()) is None else [problem]),
    ]:
        typer.echo(f"warning: {warning}", err=True)
    shown = shown_settings(loaded, driver_options=options)
    if as_json:
        print_json([{"path": list(one.path), "value": one.value, "origin": one.origin} for one in shown])
    else:
        typer.echo("\n".join(_as_yaml(shown)))


async def _check_driver(settings: Settings) -> tuple[type[BaseModel], str | None]:
    """Check the driver's options, and return their model and a warning. Raises `ConfigurationError`."""
    from osrdyne.drivers.registry import create_pool_driver, environment_warning, load_driver_class

    driver = create_pool_driver(settings, clock=SystemClock())
    await driver.close()
    options = load_driver_class(settings.driver.name).options_model
    return options, environment_warning(settings, manages_workers=driver.manages_workers)


def _as_yaml(shown: Sequence[Shown]) -> Iterator[str]:
    above: tuple[str, ...] = ()
    for one in shown:
        parents = one.path[:-1]
        common = next(
            (depth for depth, part in enumerate(parents) if above[depth : depth + 1] != (part,)), len(parents)
        )
        for depth in range(common, len(parents)):
            yield f"{'  ' * depth}{_yaml(parents[depth])}:"
        above = parents
        yield f"{'  ' * len(parents)}{_yaml(one.path[-1])}: {json.dumps(one.value, ensure_ascii=False)}  # {one.origin}"


def _yaml(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name, ensure_ascii=False)
