"""TLS settings become a context, or an error that names the file."""

from __future__ import annotations

import ssl
from pathlib import Path

import certifi
import pytest

from osrdyne.config.models import TlsSettings
from osrdyne.config.tls import ssl_context
from osrdyne.errors import ConfigurationError


def test_defaults_check_the_broker() -> None:
    context = ssl_context(TlsSettings())
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_verification_can_be_turned_off() -> None:
    context = ssl_context(TlsSettings(verify=False))
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


def test_authorities_of_a_file_are_trusted() -> None:
    assert ssl_context(TlsSettings(ca_file=certifi.where())).cert_store_stats()["x509_ca"] > 0


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"broker\.tls\.ca_file: cannot read /nowhere/ca\.pem: No such file"):
        ssl_context(TlsSettings(ca_file="/nowhere/ca.pem"))


def test_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("not a certificate")
    with pytest.raises(ConfigurationError, match=r"ca\.pem holds no PEM certificate"):
        ssl_context(TlsSettings(ca_file=str(file)))


def test_client_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("x")
    (tmp_path / "k.pem").write_text("x")
    with pytest.raises(ConfigurationError, match=r"c\.pem and .*k\.pem are no PEM certificate"):
        ssl_context(TlsSettings(certificate_file=str(tmp_path / "c.pem"), key_file=str(tmp_path / "k.pem")))
