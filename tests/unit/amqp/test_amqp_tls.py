"""Files for TLS become a context, or an error that names the file; a failed handshake has a remedy."""

from __future__ import annotations

import ssl
from pathlib import Path

import certifi
import pytest

from osrdyne.amqp.tls import describe_tls_error, ssl_context
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.uri import TlsFiles


def test_broker_is_checked_unless_that_is_turned_off() -> None:
    contexts = [ssl_context(TlsFiles()), ssl_context(TlsFiles(verify=False))]
    assert [(context.verify_mode, context.check_hostname) for context in contexts] == [
        (ssl.CERT_REQUIRED, True),
        (ssl.CERT_NONE, False),
    ]


def test_authorities_of_a_file_are_the_only_ones(tmp_path: Path) -> None:
    pem = Path(certifi.where()).read_text(encoding="utf-8")
    (tmp_path / "ca.pem").write_text(pem[pem.index("-----BEGIN") : pem.index("-----END") + 25] + "\n")
    assert ssl_context(TlsFiles(ca_file=str(tmp_path / "ca.pem"))).cert_store_stats()["x509_ca"] == 1


def test_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"broker\.tls: .*/nowhere/ca\.pem"):
        ssl_context(TlsFiles(ca_file="/nowhere/ca.pem"), place="broker.tls")
    authority, certificate, key = (tmp_path / name for name in ("ca.pem", "c.pem", "k.pem"))
    for file in (authority, certificate, key):
        file.write_text("not a certificate")
    with pytest.raises(ConfigurationError, match=r"ca\.pem"):
        ssl_context(TlsFiles(ca_file=str(authority)))
    with pytest.raises(ConfigurationError, match=r"c\.pem and .*k\.pem"):
        ssl_context(TlsFiles(certificate_file=str(certificate), key_file=str(key)))


def refusal(code: int, message: str) -> ssl.SSLError:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.verify_code, error.verify_message = code, message
    return error


def alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("fault", "marker"),
    [
        (refusal(20, "unable to get local issuer"), "ca_file"),
        (refusal(10, "certificate has expired"), "expired"),
        (refusal(62, "Hostname mismatch."), "host name"),
        (refusal(64, "IP address mismatch."), "host name"),
        (alert("WRONG_VERSION_NUMBER"), "TLS"),
        (alert("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "client certificate"),
        (alert("TLSV1_ALERT_UNKNOWN_CA"), "unknown ca"),
        (alert("UNEXPECTED_EOF"), "unexpected eof"),
    ],
    ids=["authority", "expired", "host", "address", "plain port", "no certificate", "foreign certificate", "else"],
)
def test_failed_handshake_is_described_also_behind_another_error(fault: ssl.SSLError, marker: str) -> None:
    error = ConnectionError("lost")
    error.__cause__ = fault
    assert marker in (describe_tls_error(error) or "")


def test_errors_that_are_causes_of_each_other_end() -> None:
    one, other = ConnectionError("one"), ConnectionError("other")
    one.__cause__, other.__cause__ = other, one
    assert describe_tls_error(one) is None
