"""The settings: defaults that hold together, and refusals that name the field."""

import pytest
from pydantic import ValidationError

from osrdyne.config.models import BrokerSettings, Model, Settings
from osrdyne_worker.runtime.settings import runtime_settings


def broker(uri: str, **more: object) -> BrokerSettings:
    return BrokerSettings.model_validate({"uri": uri, **more})


def models(model: type[Model]) -> dict[str, type[Model]]:
    found: dict[str, type[Model]] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Model):
            found |= {name: field.annotation} | {f"{name}.{inner}": m for inner, m in models(field.annotation).items()}
    return found


def test_every_setting_has_a_description():
    found = {"": Settings, **models(Settings)}
    assert len(found) > 8
    fields = [
        (f"{place}.{name}", field) for place, model in found.items() for name, field in model.model_fields.items()
    ]
    assert [name for name, field in fields if not field.description] == []


def test_management_uri_follows_from_the_amqp_uri_and_an_invalid_one_is_refused_without_showing_it():
    derived = {
        "amqp://u:p@host:5672/vhost": "http://u:p@host:15672",
        "amqps://u:p@host": "https://u:p@host:15671",
        "amqp://host": "http://guest:guest@host:15672",
        "amqp://u:p%40%2F@[::1]:5672/": "http://u:p%40%2F@[::1]:15672",
        "amqp://a%20b:p@host": "http://a%20b:p@host:15672",
    }
    assert {uri: broker(uri).effective_management_uri() for uri in derived} == derived
    assert broker("amqp://host", management_uri="http://x:y@z:1").effective_management_uri() == "http://x:y@z:1"
    for uri in ("", "host", "http://u:s3cret@h", "amqp://u:s3cret@", "amqp://u:s3cret@[::1", "amqp://h:x"):
        with pytest.raises(ValidationError, match="amqp://user:password@host") as caught:
            broker(uri)
        assert "s3cret" not in str(caught.value)


def test_worker_configuration_is_what_the_runtime_reads():
    settings = Settings.model_validate({"worker": {"config": {"a": 1}, "stop_grace": "5s"}})
    config = settings.worker_config()
    assert (set(config), config["app"]) == ({"runtime", "spark", "app"}, {"a": 1})
    assert config["runtime"]["stop_grace"] == 5  # type: ignore[index]
    mapped = Settings.model_validate({"requests": {"statuses": "reference", "consumer_timeout": "1h"}})
    found = [runtime_settings(one.worker_config()).statuses for one in (settings, mapped)]
    assert found == ["full", "reference"]
    assert [one.effective_consumer_timeout() for one in (settings, mapped)] == [2100, 3600]
