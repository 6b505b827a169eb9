"""Nothing that a user can set, run or read is missing from the documentation; nor what code sends and understands."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from worker_environments import worker_environment

from osrdyne.api.app import create_app
from osrdyne.auth.endpoints import find_endpoint
from osrdyne.auth.grants import Grant
from osrdyne.cli.main import full_command_line
from osrdyne.config.document import update
from osrdyne.config.loading import load_settings
from osrdyne.config.models import Settings
from osrdyne.config.schema import all_settings
from osrdyne.drivers.registry import known_drivers, load_driver_class
from osrdyne.metrics import Metrics
from osrdyne.protocol import activity, data_versions, deadlines, environment, messages, retries, streams
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Command
from osrdyne.protocol.names import KEY_ARGUMENT, PoolNames
from osrdyne.protocol.statuses import CODES, Status
from osrdyne.testing.fakes.inspector import FakeInspector
from osrdyne_worker.pipelines.views.datasets import SqlConfig

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "config" / "osrdyne.yaml"


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def commands(group: Any, above: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above} {name}")
        else:
            yield f"{above} {name}"


@pytest.fixture(scope="module")
def endpoints():
    paths = create_app(FakeInspector(), Metrics(), version="1").openapi()["paths"]
    return [
        f"`{method.upper()} {path}{'?key=' if path.startswith('/v1/group/') or path == '/v1/group' else ''}`"
        for path, methods in paths.items()
        for method in methods
    ]


def test_settings_page_is_what_the_models_say():
    settings = page("configuration/settings.md")
    assert settings == update(settings), "run `python -m osrdyne.config.document`"
    assert all(f"| `{setting.name}` |" in settings for setting in all_settings().values())


def test_every_command_and_metric_is_documented():
    found = list(commands(typer.main.get_command(full_command_line()), "osrdyne"))
    assert len(found) > 12
    assert [name for name in found if f"`{name}`" not in page("cli.md")] == []
    metrics = Metrics().registry.collect()
    names = [f"{metric.name}{'_total' if metric.type == 'counter' else ''}" for metric in metrics]
    assert [name for name in names if f"`{name}`" not in page("metrics.md")] == []


def test_every_endpoint_is_documented(endpoints):
    assert len(endpoints) > 15
    assert [endpoint for endpoint in endpoints if endpoint not in page("http-api/index.md")] == []


def test_every_endpoint_needs_the_grant_of_its_own_row(endpoints):
    """A new endpoint gets a row in `osrdyne.auth.endpoints.ENDPOINTS`; without one it needs `admin` for all keys."""
    for endpoint in endpoints:
        method, path = endpoint.strip("`").removesuffix("?key=").split(" ")
        found, _ = find_endpoint(method, re.sub(r"\{.*?\}", "e1", path))
        assert (found.method, found.path.replace(":path", "")) == (method, path)
        if method == "GET":
            expected = {Grant.ADMIN} if path == "/v1/audit" else {None, Grant.VIEW, Grant.BODIES}
            assert found.grant in expected, path


def switched_on(text: str) -> str:
    """What is commented out made real: `#name: value`; comments for people have a blank after the `#`."""
    return re.sub(r"^( *)#(?=\w|  \w)", r"\1", text, flags=re.MULTILINE)


def test_example_configuration_loads_also_where_it_is_commented_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(file=str(EXAMPLE), environment={}).settings
    assert settings.pool.id == "example"
    assert SqlConfig.model_validate(settings.worker.config).datasets[0].pattern.match("tpch/sf=1") == {"scale": "1"}
    Path("uri").write_text("amqp://user:password@broker/")
    Path("management-uri").write_text("http://user:password@broker:15672")
    Path("postgresql-uri").write_text("postgresql://user:password@host/database")
    text = EXAMPLE.read_text(encoding="utf-8").replace("/run/secrets/", "")
    Path("all.yaml").write_text(switched_on(text), encoding="utf-8")
    loaded = load_settings(file="all.yaml", environment={})
    assert loaded.settings.requests.max_length == 100_000
    assert [".".join(path) for path, origin in loaded.origins.items() if origin == "default"] == []


EXAMPLES = [ROOT / "deploy" / "config" / f"{name}.yaml" for name in ("compose", "docker", "kubernetes", "systemd")]


@pytest.mark.parametrize("name", known_drivers())
def test_every_driver_and_option_is_documented(name):
    options = load_driver_class(name).options_model.model_fields
    assert [option for option in options if f"\n| `{option}` |" not in page(f"drivers/{name}.md")] == []
    assert f"| [`{name}`]({name}.md) |" in page("drivers/index.md")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_configuration_of_a_driver_is_right_where_it_is_commented_out(example):
    text = example.read_text(encoding="utf-8")
    for document in (text, switched_on(text)):
        driver = Settings.model_validate(yaml.safe_load(document)).driver
        load_driver_class(driver.name).options_model.model_validate(driver.options)


DOCS = ROOT / "docs" / "reference" / "protocol"
DOCUMENT: dict[str, Any] = yaml.safe_load((DOCS / "asyncapi.yaml").read_text(encoding="utf-8"))
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
MESSAGES = DOCUMENT["components"]["messages"]

HEADERS = {
    value
    for module in (activity, data_versions, deadlines, messages, retries, streams)
    for name, value in vars(module).items()
    if name.endswith("_HEADER")
}
NAMES = {name: getattr(PoolNames("P"), name) for name, kind in vars(PoolNames).items() if isinstance(kind, property)}
EXCHANGES = {value for name, value in NAMES.items() if name.endswith("_exchange")}
QUEUES = {value for name, value in NAMES.items() if name.endswith("_queue")}


def test_document_has_every_status_event_command_header_and_exchange():
    assert MESSAGES["response"]["headers"]["properties"]["x-status"]["enum"] == list(Status)
    assert MESSAGES["report"]["headers"]["properties"]["x-event"]["enum"] == list(Event)
    assert MESSAGES["control"]["payload"]["properties"]["command"]["enum"] == list(Command)
    described = {name for message in MESSAGES.values() for name in message.get("headers", {}).get("properties", {})}
    addresses = {(channel["address"] or "").replace("{pool}", "P") for channel in DOCUMENT["channels"].values()}
    assert (len(HEADERS) > 10, len(EXCHANGES) > 5) == (True, True)
    assert (described >= HEADERS, addresses >= EXCHANGES) == (True, True)
    for channel in DOCUMENT["channels"].values():
        exchange = channel.get("bindings", {}).get("amqp", {}).get("exchange")
        assert exchange is None or exchange["name"] == channel["address"]


def test_page_names_every_status_header_event_command_variable_and_all_that_is_on_the_broker():
    rows = dict(re.findall(r"^\| `([\w-]+)` †? ?\| (\d{3}) \|", PAGE, re.MULTILINE))
    assert rows == {str(status): str(code) for status, code in CODES.items()}
    variables = set(re.findall(r"WORKER_[A-Z_]+", Path(environment.__file__).read_text(encoding="utf-8")))
    assert set(worker_environment().to_variables()) <= variables
    names = {*EXCHANGES, *QUEUES, *HEADERS, *Event, *Command, *variables, KEY_ARGUMENT}
    assert [name for name in sorted(names) if f"`{name}`" not in PAGE] == []
