"""The parts of an AMQP URI besides the broker's address: the user, and the files for TLS as query parameters.

A worker gets only a URI, so the URI contains these, too. The parameters have the names of RabbitMQ's own clients
(RabbitMQ docs: URI Query Parameters): `cacertfile`, `certfile`, `keyfile` and `verify`, which is `verify_peer` or
`verify_none`. Pure: reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for TLS. Without `ca_file` the system's authorities are trusted."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    verify: bool = True


def tls_of(uri: str) -> TlsFiles:
    """The TLS parameters of an AMQP URI. Raises ValueError for an unknown value of `verify`."""
    query = dict(parse_qsl(urlsplit(uri).query))
    verify = query.get("verify", "verify_peer")
    if verify not in {"verify_peer", "verify_none"}:
        raise ValueError("the parameter verify of the URI must be verify_peer or verify_none")
    return TlsFiles(
        ca_file=query.get("cacertfile") or query.get("cafile"),
        certificate_file=query.get("certfile"),
        key_file=query.get("keyfile"),
        verify=verify == "verify_peer",
    )


def with_tls(uri: str, files: TlsFiles) -> str:
    """The URI with these files as parameters; they replace its own. An `amqp://` URI does not change."""
    parts = urlsplit(uri)
    if parts.scheme != "amqps":
        return uri
    given = {
        "cacertfile": files.ca_file,
        "certfile": files.certificate_file,
        "keyfile": files.key_file,
        "verify": None if files.verify else "verify_none",
    }
    replaced = {name: value for name, value in given.items() if value is not None}
    if "cacertfile" in replaced:
        replaced["cafile"] = ""
    query = {name: value for name, value in (dict(parse_qsl(parts.query)) | replaced).items() if value}
    return parts._replace(query=urlencode(query, quote_via=quote, safe="/")).geturl()


def with_user(uri: str, user: str, password: str) -> str:
    """The URI with this user and password."""
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{host}").geturl()
