"""PoisonMessageDrop: where a copy of a poison request is sent. Pure: parses and describes an address, sends nothing.

An address is a queue or an exchange of the pool's virtual host, written as RabbitMQ writes its AMQP 1.0 addresses
(`amqp:/queues/NAME`, `amqp:/exchanges/NAME`, `amqp:/exchanges/NAME/ROUTING-KEY`, percent-encoded), or an `http:` or
`https:` URL. Source: RabbitMQ docs: AMQP 1.0 address format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import unquote, urlsplit

MAX_CHARACTERS = 1000

# Names of queues and exchanges that the AMQP library accepts (broker: pamqp-names).
_NAME = re.compile(r"[a-zA-Z0-9\-_.:@#,/+ ]{1,127}", re.ASCII)
FORMS = "amqp:/queues/NAME, amqp:/exchanges/NAME, amqp:/exchanges/NAME/ROUTING-KEY, or an http: or https: URL"

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class AmqpDrop:
    """An exchange of the pool's virtual host. A queue is addressed by the default exchange, whose name is empty."""

    exchange: str
    routing_key: str

    @property
    def shown(self) -> str:
        """The address for logs."""
        return f"exchange {self.exchange}" if self.exchange else f"queue {self.routing_key}"


@dataclass(frozen=True, slots=True)
class HttpDrop:
    """An HTTP endpoint. `url` may hold a secret in its path or query, so that logs show `shown` instead."""

    url: str = field(repr=False)
    host: str
    port: int
    secure: bool

    @property
    def shown(self) -> str:
        """Scheme, host and port, for logs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


PoisonDrop = AmqpDrop | HttpDrop


def parse_poison_drop(text: str) -> PoisonDrop:
    """Raises `ValueError` with what is wrong and what is expected. The message does not quote the text."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the address has {len(text)} characters; at most {MAX_CHARACTERS} are possible")
    if not text.isprintable() or " " in text:
        raise ValueError("the address has a blank or a control character; encode it as %20 or alike")
    scheme = text.partition(":")[0].lower()
    if scheme == "amqp":
        return _amqp(text[len("amqp:") :])
    if scheme in {"http", "https"}:
        return _http(text)
    raise ValueError(f"expected {FORMS}")


def _amqp(path: str) -> AmqpDrop:
    kind, *parts = path.removeprefix("/").split("/")
    names = [unquote(part, errors="strict") for part in parts] if path.startswith("/") else []
    match kind, names:
        case "queues", [queue]:
            return AmqpDrop("", _name(queue))
        case "exchanges", [exchange]:
            return AmqpDrop(_name(exchange), "")
        case "exchanges", [exchange, routing_key]:
            if len(routing_key.encode()) > 255:
                raise ValueError("the routing key is longer than 255 bytes")
            return AmqpDrop(_name(exchange), routing_key)
        case _:
            raise ValueError(f"expected {FORMS}; queues and exchanges are those of the pool's virtual host")


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ValueError("a name of a queue or exchange has 1 to 127 characters of a-z A-Z 0-9 - _ . : @ # , / + blank")
    return text


def _http(text: str) -> HttpDrop:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError("the host or port of the URL is not valid") from error
    if not host:
        raise ValueError("the URL has no host")
    if not text.isascii():
        raise ValueError("the URL has characters that are not ASCII; encode them, and write the host in Punycode")
    if "@" in parts.netloc:
        raise ValueError("a stored policy is no place for a secret: remove user and password from the URL")
    if parts.fragment:
        raise ValueError("the URL has a fragment (#...), which is never sent; leave it out")
    secure = parts.scheme.lower() == "https"
    return HttpDrop(text, host, port if port is not None else 443 if secure else 80, secure)


def refuse_address(address: str, allowed: tuple[Network, ...] = ()) -> str | None:
    """Why an HTTP endpoint may not have this IP address, or None if it may.

    Loopback and link-local addresses are refused unless one of the `allowed` networks holds them: a policy must not
    make the daemon send requests to services of its own host or to the metadata service of a cloud.
    """
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if any(_holds(network, found) for network in allowed):
        return None
    if found.is_loopback or found.is_unspecified:
        return "it is an address of the daemon's own host"
    if found.is_link_local:
        return "it is a link-local address"
    return "it is a multicast address" if found.is_multicast else None


def _holds(network: Network, address: IPv4Address | IPv6Address) -> bool:
    return network.version == address.version and address in network
