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


@pytest.mark.parametrize(
    ("uri", "files", "written"),
    [
        ("amqps://u:p%2F@h:5671/v%2Fw?a=5", "/ca.pem", "amqps://u:p%2F@h:5671/v%2Fw?a=5&cacertfile=/ca.pem"),
        ("amqps://h/?cafile=/old.pem", "/ca.pem", "amqps://h/?cacertfile=/ca.pem"),
        ("amqps://h/", None, "amqps://h/"),
        ("amqp://h/", "/ca.pem", "amqp://h/"),
    ],
    ids=["other parameters stay", "given authority counts", "no files", "no TLS"],
)
def test_files_are_parameters_of_the_uri(uri: str, files: str | None, written: str) -> None:
    assert with_tls(uri, TlsFiles(ca_file=files)) == written


def test_verify_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="verify_peer or verify_none"):
        tls_of("amqps://h/?verify=maybe")
    with pytest.raises(ValidationError, match="verify_peer or verify_none"):
        BrokerSettings(uri=SecretStr("amqps://h/?verify=no"))


def test_other_user_takes_the_place_of_the_first() -> None:
    parts = urlsplit(with_user("amqps://u:p@[::1]:5671/v?verify=verify_none", "osrdyne-a-+2F", "x/:@"))
    assert (unquote(parts.username or ""), unquote(parts.password or "")) == ("osrdyne-a-+2F", "x/:@")
    assert (parts.hostname, parts.port, parts.path, parts.query) == ("::1", 5671, "/v", "verify=verify_none")


def test_workers_get_the_files_of_the_controller_unless_they_have_a_uri_of_their_own() -> None:
    files = TlsFiles(ca_file="/ca.pem")
    settings = BrokerSettings(uri=SecretStr("amqps://h/"), tls=TlsSettings(ca_file="/ca.pem"))
    assert tls_of(settings.effective_worker_uri()) == settings.effective_tls() == files
    own = settings.model_copy(update={"worker_uri": SecretStr("amqps://inside/")})
    assert own.effective_worker_uri() == "amqps://inside/"
    for name in ("cacertfile", "cafile"):
        assert BrokerSettings(uri=SecretStr(f"amqps://h/?{name}=/ca.pem")).effective_tls() == files
