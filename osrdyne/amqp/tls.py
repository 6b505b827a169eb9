"""TLS to RabbitMQ: an `ssl.SSLContext` from files, and the description of a failed handshake with its remedy."""

from __future__ import annotations

import ssl
from pathlib import Path

from osrdyne.errors import ConfigurationError
from osrdyne.protocol.uri import TlsFiles

_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})
_CLIENT_CERTIFICATE_REQUIRED = frozenset({"TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"})


def ssl_context(files: TlsFiles, *, place: str = "The AMQP URI") -> ssl.SSLContext:
    """Build the context of `amqps` and `https` connections. Raises `ConfigurationError` naming `place` and the file."""
    if files.ca_file is not None:
        _require_readable(files.ca_file, place)
    try:
        context = ssl.create_default_context(cafile=files.ca_file)
    except ssl.SSLError as error:
        raise ConfigurationError(f"{place}: {files.ca_file} contains no PEM certificate.") from error
    if files.certificate_file is not None:
        _load_client_certificate(context, files.certificate_file, files.key_file, place)
    if not files.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _load_client_certificate(context: ssl.SSLContext, certificate: str, key: str | None, place: str) -> None:
    for file in (certificate, key):
        if file is not None:
            _require_readable(file, place)
    try:
        # Without a password OpenSSL would prompt on the terminal for that of an encrypted key.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"{place}: {certificate} and {key or certificate} are not a PEM certificate and unencrypted private key."
        ) from error


def _require_readable(file: str, place: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise ConfigurationError(f"{place}: cannot read {file}: {error.strerror}.") from error


def describe_tls_error(error: BaseException) -> str | None:
    """Describe the TLS error that caused `error`, with the remedy; None if there is none."""
    fault = _tls_error_behind(error)
    if fault is None:
        return None
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"its certificate was refused ({fault.verify_message.rstrip('.')}); {_remedy(fault.verify_code)}"
    reason: str = getattr(fault, "reason", None) or str(fault)
    if reason in _NOT_TLS:
        return "the server does not speak TLS on this port; use its TLS port (RabbitMQ 5671, HTTP API 15671) or no TLS"
    if reason in _CLIENT_CERTIFICATE_REQUIRED:
        return "it demands a client certificate; set certificate_file and key_file, or certfile and keyfile in the URI"
    if "_ALERT_" in reason:
        words = reason.partition("_ALERT_")[2].replace("_", " ").lower()
        return f"it refused the connection ({words}); give it a client certificate whose authority it trusts"
    return reason.replace("_", " ").lower()


def _tls_error_behind(error: BaseException) -> ssl.SSLError | None:
    seen: list[BaseException] = []  # the causes of aiormq's errors may form a cycle
    found: BaseException | None = error
    while found is not None and found not in seen:
        if isinstance(found, ssl.SSLError):
            return found
        seen.append(found)
        found = found.__cause__ or found.__context__
    return None


def _remedy(verify_code: int) -> str:
    """The remedy for a code of OpenSSL: 10 expired, 62 host name, 64 address; the others concern the signature."""
    if verify_code == 10:
        return "the broker needs a new one"
    if verify_code in {62, 64}:
        return "use a host name that the certificate is for"
    return "set ca_file, or cacertfile in the URI, to the authority that has signed it"
