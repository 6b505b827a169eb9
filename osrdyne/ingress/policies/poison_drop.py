"""PoisonMessageDrop: where a copy of a poison request is sent. Pure: parses and describes an address, sends nothing.

An address is a queue or an exchange of the pool's virtual host, written as RabbitMQ writes its AMQP 1.0 addresses
(`amqp:/queues/NAME`, `amqp:/exchanges/NAME`, `amqp:/exchanges/NAME/ROUTING-KEY`, percent-encoded), or an `http:` or
`https:` URL. Source: RabbitMQ docs: AMQP 1.0 address format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import unquote, urlsplit

MAX_CHARACTERS = 1000

# Names of queues and exchanges that the AMQP library accepts (broker: pamqp-names).
_NAME = re.compile(r"[a-zA-Z0-9\-_.:@#,/+ ]{1,127}", re.ASCII)
FORMS = "amqp:/queues/NAME, amqp:/exchanges/NAME, amqp:/exchanges/NAME/ROUTING-KEY, or an http: or https: URL"

Network = IPv4Network | IPv6Network

_THIS_NETWORK = IPv4Network("0.0.0.0/8")
_BROADCAST = IPv4Address("255.255.255.255")
# Besides link-local ones: Alibaba, Azure, Oracle; Amazon, Amazon EKS, Google, Scaleway.
_METADATA = frozenset(
    map(
        ip_address,
        (
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:42::42",
        ),
    )
)
# IPv4-compatible (RFC 4291), translated (RFC 2765), and behind a NAT64 (RFC 6052): the IPv4 address in the last bits.
_IN_LAST_BITS = (IPv6Network("::/96"), IPv6Network("::ffff:0:0:0/96"), IPv6Network("64:ff9b::/96"))
# NAT64 of a local network (RFC 8215), in which the place of the IPv4 address is not known.
_LOCAL_TRANSLATION = IPv6Network("64:ff9b:1::/48")
# In the middle of an ISATAP address (RFC 5214), before the IPv4 address.
_ISATAP = (bytes.fromhex("00005efe"), bytes.fromhex("02005efe"))


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

    Addresses of the daemon's own host, link-local ones and those of metadata services of clouds are refused unless one
    of the `allowed` networks holds them: a policy must not make the daemon send requests there. An IPv6 address counts
    as every IPv4 address that a gateway may translate it to.
    """
    found = ip_address(address.partition("%")[0])
    if any(_holds(network, found) for network in allowed):
        return None
    # The address itself and each that it stands for.
    for one in (found, *_embedded(found)):
        if not any(_holds(network, one) for network in allowed) and (why := _refuse(one)) is not None:
            return why
    return None


def _refuse(address: IPv4Address | IPv6Address) -> str | None:
    if address.is_loopback or address.is_unspecified or _holds(_THIS_NETWORK, address):
        return "it is an address of the daemon's own host"
    if address in _METADATA:
        return "it is the address of a metadata service"
    if address.is_link_local:
        return "it is a link-local address"
    if _holds(_LOCAL_TRANSLATION, address):
        return "it is an address of a local IPv4 translation"
    return "it is a multicast address" if address.is_multicast or address == _BROADCAST else None


def _embedded(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address]:
    """The IPv4 addresses that an IPv6 address may stand for."""
    if isinstance(address, IPv4Address):
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if any(address in network for network in _IN_LAST_BITS) or address.packed[8:12] in _ISATAP:
        yield IPv4Address(address.packed[12:])


def _holds(network: Network, address: IPv4Address | IPv6Address) -> bool:
    return network.version == address.version and address in network
