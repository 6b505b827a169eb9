"""Files for TLS become a context, or an error that names the file; a failed handshake becomes a sentence."""

from __future__ import annotations

import ssl
from pathlib import Path

import certifi
import pytest

from osrdyne.amqp.tls import describe_tls_error, ssl_context
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.uri import TlsFiles


def test_defaults_check_the_broker() -> None:
    context = ssl_context(TlsFiles())
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_verification_can_be_turned_off() -> None:
    context = ssl_context(TlsFiles(verify=False))
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)


def test_authorities_of_a_file_are_the_only_ones(tmp_path: Path) -> None:
    pem = Path(certifi.where()).read_text(encoding="utf-8")
    (tmp_path / "ca.pem").write_text(pem[pem.index("-----BEGIN") : pem.index("-----END") + 25] + "\n")
    assert ssl_context(TlsFiles(ca_file=str(tmp_path / "ca.pem"))).cert_store_stats()["x509_ca"] == 1


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"broker\.tls: cannot read /nowhere/ca\.pem: No such file"):
        ssl_context(TlsFiles(ca_file="/nowhere/ca.pem"), place="broker.tls")


def test_file_that_is_not_a_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("not a certificate")
    with pytest.raises(ConfigurationError, match=r"ca\.pem contains no PEM certificate"):
        ssl_context(TlsFiles(ca_file=str(file)))


def test_invalid_client_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("x")
    (tmp_path / "k.pem").write_text("x")
    with pytest.raises(ConfigurationError, match=r"c\.pem and .*k\.pem are not a PEM certificate"):
        ssl_context(TlsFiles(certificate_file=str(tmp_path / "c.pem"), key_file=str(tmp_path / "k.pem")))


def refusal(code: int, message: str) -> ssl.SSLError:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED]")
    error.verify_code, error.verify_message = code, message
    return error


def alert(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(refusal(20, "unable to get local issuer"), "set ca_file", id="authority"),
        pytest.param(refusal(10, "certificate has expired"), "the broker needs a new one", id="expired"),
        pytest.param(refusal(62, "Hostname mismatch."), "use a host name that", id="host"),
        pytest.param(refusal(64, "IP address mismatch."), "use a host name that", id="address"),
        pytest.param(alert("WRONG_VERSION_NUMBER"), "does not speak TLS", id="plain port"),
        pytest.param(alert("TLSV13_ALERT_CERTIFICATE_REQUIRED"), "demands a client certificate", id="no certificate"),
        pytest.param(
            alert("TLSV1_ALERT_UNKNOWN_CA"), r"refused the connection \(unknown ca\)", id="foreign certificate"
        ),
        pytest.param(alert("UNEXPECTED_EOF"), "unexpected eof", id="anything else"),
    ],
)
def test_failed_handshake_has_a_remedy(fault: ssl.SSLError, words: str) -> None:
    description = describe_tls_error(fault)
    assert description is not None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(description)


def test_fault_behind_others_is_found() -> None:
    error = ConnectionError("lost")
    error.__cause__ = alert("WRONG_VERSION_NUMBER")
    assert "TLS" in str(describe_tls_error(error))


def test_errors_that_are_causes_of_each_other_end() -> None:
    one, other = ConnectionError("one"), ConnectionError("other")
    one.__cause__, other.__cause__ = other, one
    assert describe_tls_error(one) is None
