"""The settings, and durations and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from osrdyne.config.models import BrokerSettings, Model, Settings
from osrdyne.config.types import parse_duration, parse_size
from osrdyne_worker.runtime.settings import runtime_settings


def broker(uri: str, **more: object) -> BrokerSettings:
    return BrokerSettings.model_validate({"uri": uri, **more})


def models(model: type[Model]) -> dict[str, type[Model]]:
    found: dict[str, type[Model]] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Model):
            found |= {name: field.annotation} | {f"{name}.{inner}": m for inner, m in models(field.annotation).items()}
    return found


def test_every_setting_has_a_description() -> None:
    found = {"": Settings, **models(Settings)}
    assert len(found) > 8
    fields = [
        (f"{place}.{name}", field) for place, model in found.items() for name, field in model.model_fields.items()
    ]
    assert [name for name, field in fields if not field.description] == []


@pytest.mark.parametrize(
    ("section", "value", "location"),
    [
        ("pool", {"id": "Has-Dash"}, ("pool", "id")),
        ("pool", {"pinned_keys": ["ok", "é" * 200]}, ("pool", "pinned_keys")),
        ("lifecycle", {"stop_delay": "1s"}, ("lifecycle",)),
        ("lifecycle", {"unbind_delay": "soon"}, ("lifecycle", "unbind_delay")),
        ("requests", {"consumer_timeout": 0}, ("requests", "consumer_timeout")),  # to RabbitMQ not "no limit"
        ("requests", {"delivery_limit": 2}, ("requests", "delivery_limit")),
        ("broker", {"tls": {"key_file": "k.pem"}}, ("broker", "tls")),
        ("broker", {"usr": "x"}, ("broker", "usr")),
        ("driver", 7, ("driver",)),
        ("colour", "red", ("colour",)),
    ],
)
def test_wrong_setting_is_refused_with_its_path(section: str, value: object, location: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({section: value})
    assert [error["loc"] for error in caught.value.errors()] == [location]


@pytest.mark.parametrize(
    ("uri", "management"),
    [
        ("amqp://u:p@host:5672/vhost", "http://u:p@host:15672"),
        ("amqps://u:p@host", "https://u:p@host:15671"),
        ("amqp://host", "http://guest:guest@host:15672"),
        ("amqp://u:p%40%2F@[::1]:5672/", "http://u:p%40%2F@[::1]:15672"),
        ("amqp://a%20b:p@host", "http://a%20b:p@host:15672"),
    ],
)
def test_management_uri_follows_from_the_amqp_uri(uri: str, management: str) -> None:
    assert broker(uri).effective_management_uri() == management
    assert broker(uri, management_uri="http://x:y@z:1").effective_management_uri() == "http://x:y@z:1"


@pytest.mark.parametrize(
    "uri", ["", "host", "http://u:s3cret@h", "amqp://u:s3cret@", "amqp://u:s3cret@[::1", "amqp://h:x"]
)
def test_invalid_uri_is_refused_without_showing_it(uri: str) -> None:
    with pytest.raises(ValidationError, match="amqp://user:password@host") as caught:
        broker(uri)
    assert "s3cret" not in str(caught.value)


def test_consumer_timeout_is_longer_than_the_work_on_one_request() -> None:
    assert Settings().effective_consumer_timeout() == 2100
    assert Settings.model_validate({"requests": {"consumer_timeout": "1h"}}).effective_consumer_timeout() == 3600


def test_worker_configuration_is_what_the_runtime_reads() -> None:
    config = Settings.model_validate({"worker": {"config": {"a": 1}, "stop_grace": "5s"}}).worker_config()
    assert set(config) == {"runtime", "spark", "app"}
    assert config["app"] == {"a": 1}
    assert config["runtime"]["stop_grace"] == 5  # type: ignore[index]
    assert runtime_settings(config).statuses == "full"
    mapped = Settings.model_validate({"requests": {"statuses": "reference"}}).worker_config()
    assert runtime_settings(mapped).statuses == "reference"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10s", 10), ("5m", 300), ("5min", 300), ("1h30m", 5400), ("1h 30m", 5400), ("500ms", 0.5), ("2d", 172_800),
        ("1.5s", 1.5), ("2.5", 2.5), (" 7 ", 7), (3, 3), (0, 0), (0.25, 0.25), ("PT5M", 300), ("pt1h30m", 5400),
        ("P1DT1S", 86_401), ("PT0.5S", 0.5),
    ],
)  # fmt: skip
def test_duration_is_read(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    ["", " ", "soon", "10 years", "5minutes", "-5s", "s", "1e3s", "P", "PT", "5s5", True, None, [1], -1, float("nan"),
     float("inf"), 10**400, "9" * 400, "9" * 400 + "d", "9" * 20, "9" * 20 + "s", "P" + "9" * 20 + "D"],
)  # fmt: skip
def test_other_values_are_refused_and_the_error_lists_the_accepted_ones(value: object) -> None:
    with pytest.raises(ValueError, match=r"10s|not negative"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16MiB", 16 * 2**20),
        ("60 KiB", 61_440),
        ("1GB", 10**9),
        ("2.5KB", 2500),
        ("1.5KiB", 1536),
        ("1000", 1000),
        (7, 7),
    ],
)
def test_size_is_read(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("value", ["", "big", "16mib", "-1MiB", "1e3", True, None, 1.5, "9" * 400 + "GB"])
def test_anything_else_is_refused_as_a_size(value: object) -> None:
    with pytest.raises(ValueError, match=r"KiB|EiB"):
        parse_size(value)


@given(st.text() | st.floats() | st.integers() | st.none())
def test_nothing_but_a_value_error_comes_out(value: object) -> None:
    for parse in (parse_duration, parse_size):
        try:
            parsed = parse(value)
        except ValueError:
            continue
        assert isinstance(parsed, int | float)
