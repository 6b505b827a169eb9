"""Finding a driver by name, its options, and what it is given."""

from __future__ import annotations

import sys

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.config.models import BrokerSettings, DriverSettings, PoolSettings, Settings, WorkerSettings
from osrdyne.drivers import registry
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.noop import NoopDriver
from osrdyne.errors import ConfigurationError

CONTEXT = DriverContext(pool="pool", stack="localhost:5672//", clock=SystemClock(), worker_command=("worker",))


def test_known_name_gives_its_driver():
    assert isinstance(registry.create_driver(DriverSettings(name="noop"), CONTEXT), NoopDriver)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"unknown driver 'dokcer'; known drivers: .*noop.*subprocess"):
        registry.create_driver(DriverSettings(name="dokcer"), CONTEXT)


def test_unknown_option_is_refused_with_its_path():
    with pytest.raises(ConfigurationError, match=r"driver\.options\.colour: there is no such .*noop has no options"):
        registry.create_driver(DriverSettings(name="noop", options={"colour": "red"}), CONTEXT)


def test_wrong_option_is_reported_with_the_valid_ones():
    with pytest.raises(ConfigurationError, match=r"The options of systemd: template, manager, bus, environment"):
        registry.create_driver(DriverSettings(name="systemd", options={"unit": "x"}), CONTEXT)


class FakeEntryPoint:
    name, value = "odd", "odd:thing"

    def __init__(self, loaded: object) -> None:
        self.loaded = loaded

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        pytest.param(ImportError("no module named docker"), "cannot be loaded: no module named docker", id="import"),
        pytest.param(dict, "odd:thing is not an osrdyne driver class", id="no-driver"),
        pytest.param(lambda: None, "odd:thing is not an osrdyne driver class", id="no-class"),
    ],
)
def test_entry_point_that_is_not_a_driver_is_refused(monkeypatch, loaded, message):
    monkeypatch.setattr(registry, "entry_points", lambda **_: [FakeEntryPoint(loaded)])
    with pytest.raises(ConfigurationError, match=message):
        registry.load_driver_class("odd")


@pytest.mark.parametrize(
    ("uri", "stack"),
    [
        ("amqp://guest:guest@localhost:5672/", "localhost:5672//"),
        ("amqp://other:secret@127.0.0.1", "localhost:5672//"),
        ("amqps://a:b@Rabbit.example/blue%2Fgreen", "rabbit.example:5671/blue/green"),
        ("amqp://[::1]:5673/x", "localhost:5673/x"),
    ],
)
def test_stack_names_the_broker_without_credentials(uri, stack):
    assert registry.stack_of(uri) == stack


def test_context_is_made_of_the_settings():
    settings = Settings(
        broker=BrokerSettings(uri="amqp://u:p@broker/v"),
        pool=PoolSettings(id="blue"),
        worker=WorkerSettings(app="mine:app", concurrency=3),
    )
    context = registry.driver_context(settings, clock=SystemClock())
    assert (context.pool, context.stack) == ("blue", "broker:5672/v")
    assert context.worker_config == settings.worker_config()
    assert context.worker_command[-1] == "mine:app"


def test_worker_command_is_the_script_beside_python(tmp_path, monkeypatch):
    (tmp_path / "osrdyne-worker").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert registry.worker_command("a:b") == (str(tmp_path / "osrdyne-worker"), "a:b")


def test_worker_command_without_the_script_runs_the_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert registry.worker_command("a:b") == (str(tmp_path / "python"), "-m", "osrdyne_worker.main", "a:b")
