"""Finds driver classes by the names of their entry points, and builds the driver that the settings name.

Called by the composition root and by `doctor`. A package adds a driver with an entry point in the group
`osrdyne.drivers` (`docs/how-to/write-a-driver.md`).
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from osrdyne.aio.clock import Clock
from osrdyne.config.models import DriverSettings, Settings
from osrdyne.config.profiles import Profile
from osrdyne.drivers.base import Driver, DriverContext, DriverOptions
from osrdyne.drivers.pooled.driver import PooledDriver
from osrdyne.drivers.pooled.placement import PooledRules
from osrdyne.errors import ConfigurationError

GROUP = "osrdyne.drivers"

_DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def create_driver(settings: DriverSettings, context: DriverContext) -> Driver:
    """Build the driver that the settings name, with its options validated.

    Raises `ConfigurationError` if the name is not registered, the class is not a driver, or an option is invalid.
    """
    driver_class = load_driver_class(settings.name)
    options = _parse_options(driver_class, settings)
    if (contradiction := options.contradiction(context)) is not None:
        raise ConfigurationError(f"driver.options.{contradiction}")
    return driver_class(options, context)


def create_pool_driver(settings: Settings, *, clock: Clock) -> Driver:
    """The driver of the pool: the one that the settings name, wrapped by the pooled driver if workers are pooled.

    Raises `ConfigurationError`, also if the named driver does not support pooled workers.
    """
    driver = create_driver(settings.driver, driver_context(settings, clock=clock))
    if (setting := _pooled_setting(settings)) is not None:
        if (obstacle := _obstacle_to_pooling(settings, driver)) is not None:
            raise ConfigurationError(f"{setting}: {obstacle} Write placement: dedicated there, or change the driver.")
        if settings.worker.placement == "dedicated" and not driver.instance_is_worker:
            raise ConfigurationError(f"{setting}: {_one_placement(settings)}.")
        driver = PooledDriver(driver, pooled_rules(settings))
    for number, profile in enumerate(settings.worker.profiles):
        if (obstacle := profile_obstacle(settings, profile, driver)) is not None:
            raise ConfigurationError(f"worker.profiles.{number}: {obstacle}")
    return driver


def _pooled_setting(settings: Settings) -> str | None:
    """The path of the first setting that requires pooled workers; None if none does."""
    if settings.worker.placement == "pooled":
        return "worker.placement"
    profiles = enumerate(settings.worker.profiles)
    return next((f"worker.profiles.{number}.placement" for number, one in profiles if one.placement == "pooled"), None)


def pooled_rules(settings: Settings) -> PooledRules:
    """The rules of pooled workers in these settings."""
    return PooledRules(
        **settings.worker.pooled.model_dump(),
        start_timeout=settings.lifecycle.start_timeout,
        start_attempts=settings.lifecycle.start_attempts,
        stop_grace=settings.worker.stop_grace,
    )


def profile_obstacle(settings: Settings, profile: Profile, driver: Driver) -> str | None:
    """Why the driver cannot have workers of this profile, with the remedy; None if it can."""
    effective = settings.with_profile(profile)
    if effective.worker.placement == "pooled" and not isinstance(driver, PooledDriver):
        return (
            "this daemon was started without pooled workers: write placement: pooled in a profile of worker.profiles, "
            "or in worker.placement, and restart it"
        )
    if isinstance(driver, PooledDriver):
        driver = driver.inner
        if effective.worker.placement == "dedicated" and not driver.instance_is_worker:
            return _one_placement(settings)
    config = effective.worker_config()
    if config == settings.worker_config():
        return None
    if not inspect.signature(driver.spec_hash).parameters:
        return (
            f"the driver {settings.driver.name} has no worker settings by key: its spec_hash takes no configuration. "
            "Update the driver, or remove the settings of workers from the profile."
        )
    options = _parse_options(type(driver), settings.driver)
    contradiction = options.contradiction(replace(driver.context, worker_config=config))
    return None if contradiction is None else f"driver.options.{contradiction}"


def _one_placement(settings: Settings) -> str:
    """Why keys of this pool cannot have different placements."""
    return (
        f"with the driver {settings.driver.name} the platform counts dedicated workers itself, so all keys of a pool "
        "have the same placement: remove placement from the profiles, or run a second pool"
    )


def _obstacle_to_pooling(settings: Settings, driver: Driver) -> str | None:
    if (obstacle := driver.obstacle_to_processes()) is not None:
        return obstacle
    if settings.worker.environment == "reference":
        return "workers of the reference (worker.environment: reference) cannot share a process."
    return None


def environment_warning(settings: Settings, *, manages_workers: bool) -> str | None:
    """Why `worker.environment: reference` is useless or unsafe with the other settings; None if it is neither."""
    if settings.worker.environment != "reference":
        return None
    if not manages_workers:
        return (
            f"worker.environment: reference has no effect with the driver {settings.driver.name}, which starts no "
            "workers; `osrdyne groups env` prints WORKER_AMQP_URI in any case"
        )
    if settings.broker.scoped_credentials or settings.broker.worker_uri is not None:
        return None
    return (
        "worker.environment: reference passes broker.uri with the password of the daemon in the environment of every "
        "worker; turn on broker.scoped_credentials, or set broker.worker_uri to a user with fewer rights"
    )


def load_driver_class(name: str) -> type[Driver]:
    """The driver class registered as `name`."""
    found = entry_points(group=GROUP, name=name)
    if not found:
        known = ", ".join(known_drivers()) or "none: is the package installed?"
        raise ConfigurationError(
            f"driver.name: unknown driver {name!r}; known drivers: {known}. "
            "Install the package that contains the driver.",
            driver=name,
        )
    entry_point = next(iter(found))
    try:
        loaded = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"driver.name: the driver {name!r} ({entry_point.value}) cannot be loaded: {error}. "
            "Install its dependencies.",
            driver=name,
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Driver)):
        raise ConfigurationError(f"driver.name: {entry_point.value} is not an osrdyne driver class.", driver=name)
    return loaded


def known_drivers() -> tuple[str, ...]:
    """The registered names of drivers, sorted."""
    return tuple(sorted({entry_point.name for entry_point in entry_points(group=GROUP)}))


def driver_context(settings: Settings, *, clock: Clock) -> DriverContext:
    """The context of the driver of these settings."""
    return DriverContext(
        pool=settings.pool.id,
        stack=stack_of(settings.broker.uri.get_secret_value()),
        clock=clock,
        worker_command=worker_command(settings.worker.app),
        worker_app=settings.worker.app,
        worker_config=settings.worker_config(),
        uri_in_environment=settings.worker.environment == "reference",
        pooled=_pooled_setting(settings) is not None,
    )


def stack_of(amqp_uri: str) -> str:
    """`host:port/vhost` of a broker, without credentials. All names of loopback become `localhost`."""
    parts = urlsplit(amqp_uri)
    host = (parts.hostname or "localhost").lower()
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 5672)
    vhost = unquote(parts.path.removeprefix("/")) or "/"
    return f"{'localhost' if host in _LOOPBACK else host}:{port}/{vhost}"


def worker_command(app: str) -> tuple[str, ...]:
    """The command that runs `app` with the Python installation of this process, independent of PATH."""
    script = Path(sys.executable).with_name("osrdyne-worker")
    if script.is_file():
        return (str(script), app)
    return (sys.executable, "-m", "osrdyne_worker.main", app)


def _parse_options(driver_class: type[Driver], settings: DriverSettings) -> DriverOptions:
    try:
        return driver_class.options_model.model_validate(settings.options)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(('driver', 'options', *map(str, detail['loc'])))}: {_problem(detail['type'], detail['msg'])}"
            for detail in error.errors(include_input=False, include_url=False, include_context=False)
        )
        names = ", ".join(driver_class.options_model.model_fields)
        known = f"The options of {settings.name}: {names}." if names else f"{settings.name} has no options."
        raise ConfigurationError(f"{problems}. {known}") from None


def _problem(kind: str, message: str) -> str:
    return "there is no such option" if kind == "extra_forbidden" else message.removeprefix("Value error, ")
