"""TLS to the broker: an `ssl.SSLContext` from the settings. Reads the files they name; keeps nothing."""

from __future__ import annotations

import ssl
from pathlib import Path

from osrdyne.config.models import TlsSettings
from osrdyne.errors import ConfigurationError


def ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """For `amqps` and `https` connections. Raises `ConfigurationError` naming the file that cannot be used."""
    context = ssl.create_default_context()
    if tls.ca_file is not None:
        _readable("broker.tls.ca_file", tls.ca_file)
        try:
            context.load_verify_locations(cafile=tls.ca_file)
        except ssl.SSLError as error:
            raise ConfigurationError(f"broker.tls.ca_file: {tls.ca_file} holds no PEM certificate.") from error
    if tls.certificate_file is not None and tls.key_file is not None:
        _load_client_certificate(context, tls.certificate_file, tls.key_file)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _load_client_certificate(context: ssl.SSLContext, certificate_file: str, key_file: str) -> None:
    _readable("broker.tls.certificate_file", certificate_file)
    _readable("broker.tls.key_file", key_file)
    try:
        # The empty password keeps OpenSSL from asking on the terminal for that of an encrypted key.
        context.load_cert_chain(certificate_file, key_file, password="")
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"broker.tls: {certificate_file} and {key_file} are no PEM certificate with its unencrypted private key."
        ) from error


def _readable(setting: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise ConfigurationError(f"{setting}: cannot read {file}: {error.strerror}.") from error
