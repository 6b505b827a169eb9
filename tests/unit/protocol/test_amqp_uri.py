"""Users and TLS options in an AMQP URI survive writing and reading it."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import pytest
from pydantic import SecretStr, ValidationError

from osrdyne.config.models import BrokerSettings, TlsSettings
from osrdyne.protocol.uri import TlsFiles, tls_of, with_tls, with_user

FILES = TlsFiles("/etc/a b/ca+1.pem", "/c=d&e.pem", "/é#?%2F@.key", verify=False)


def test_files_come_out_as_they_went_in() -> None:
    assert tls_of(with_tls("amqps://u:p@h:5671/v?heartbeat=5", FILES)) == FILES


def test_other_parameters_and_the_rest_of_the_uri_stay() -> None:
    uri = with_tls("amqps://u:p%2F@h:5671/v%2Fw?heartbeat=5", TlsFiles(ca_file="/ca.pem"))
    assert uri == "amqps://u:p%2F@h:5671/v%2Fw?heartbeat=5&cacertfile=/ca.pem"


def test_nothing_is_printed_without_content() -> None:
    assert with_tls("amqps://h/", TlsFiles()) == "amqps://h/"


def test_plain_uri_gets_no_files() -> None:
    assert with_tls("amqp://h/", FILES) == "amqp://h/"


def test_given_authority_replaces_the_one_of_the_uri() -> None:
    assert with_tls("amqps://h/?cafile=/old.pem", TlsFiles(ca_file="/new.pem")) == "amqps://h/?cacertfile=/new.pem"


def test_parameter_cafile_is_an_alias() -> None:
    assert tls_of("amqps://h/?cafile=/ca.pem") == TlsFiles(ca_file="/ca.pem")


def test_verify_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="verify_peer or verify_none"):
        tls_of("amqps://h/?verify=maybe")


def test_other_user_takes_the_place_of_the_first() -> None:
    parts = urlsplit(with_user("amqps://u:p@[::1]:5671/v?verify=verify_none", "osrdyne-a-+2F", "x/:@"))
    assert (unquote(parts.username or ""), unquote(parts.password or "")) == ("osrdyne-a-+2F", "x/:@")
    assert (parts.hostname, parts.port, parts.path, parts.query) == ("::1", 5671, "/v", "verify=verify_none")


def test_workers_get_the_files_of_the_controller() -> None:
    settings = BrokerSettings(uri=SecretStr("amqps://h/"), tls=TlsSettings(ca_file="/ca.pem"))
    assert tls_of(settings.effective_worker_uri()) == settings.effective_tls() == TlsFiles(ca_file="/ca.pem")


def test_worker_uri_is_given_as_it_is() -> None:
    settings = BrokerSettings(
        uri=SecretStr("amqps://h/"), worker_uri=SecretStr("amqps://inside/"), tls=TlsSettings(ca_file="/ca.pem")
    )
    assert settings.effective_worker_uri() == "amqps://inside/"


def test_files_in_the_uri_are_the_controllers_own() -> None:
    assert BrokerSettings(uri=SecretStr("amqps://h/?cacertfile=/ca.pem")).effective_tls().ca_file == "/ca.pem"


def test_configuration_refuses_a_verify_that_means_nothing() -> None:
    with pytest.raises(ValidationError, match="verify_peer or verify_none"):
        BrokerSettings(uri=SecretStr("amqps://h/?verify=no"))
