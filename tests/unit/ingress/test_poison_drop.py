"""PoisonMessageDrop: which addresses a policy may name, and which hosts the daemon may send to."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from osrdyne.ingress.policies.poison_drop import AmqpDrop, HttpDrop, parse_poison_drop, refuse_address

ADDRESSES = {
    "amqp:/queues/failed": AmqpDrop("", "failed"),
    "amqp:/queues/a%2Fb": AmqpDrop("", "a/b"),
    "amqp:/exchanges/alerts": AmqpDrop("alerts", ""),
    "amqp:/exchanges/alerts/a%20key": AmqpDrop("alerts", "a key"),
    "https://example.org/hook?token=1": HttpDrop("https://example.org/hook?token=1", "example.org", 443, True),
    "http://[2001:db8::1]:8080/": HttpDrop("http://[2001:db8::1]:8080/", "2001:db8::1", 8080, False),
}
REFUSED = [
    "", "amqp:/queues/", "amqp:queues/failed", "amqp://host/queues/failed", "amqp:/exchanges/a/b/c",
    "amqp:/queues/a%0Ab", "ftp://example.org", "https://user:pass@example.org", "https:///path",
    "https://example.org:99999/", "https://example.org/#part", "https://example.org/a b", "https://exämple.org/",
    f"https://example.org/{'a' * 1000}",
]  # fmt: skip


@pytest.mark.parametrize(("text", "drop"), ADDRESSES.items(), ids=ADDRESSES.keys())
def test_address_is_parsed(text: str, drop: object) -> None:
    assert parse_poison_drop(text) == drop


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:30])
def test_invalid_address_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_poison_drop(text)
    assert "pass" not in str(caught.value).replace("password", "")


@given(st.text(max_size=60), st.text(max_size=60))
def test_what_logs_show_of_a_url_has_no_secret(path: str, query: str) -> None:
    try:
        drop = parse_poison_drop(f"https://example.org/{path}?{query}")
    except ValueError:
        return
    assert drop.shown == "https://example.org:443"
    assert isinstance(drop, HttpDrop)
    assert drop.url not in repr(drop)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "169.254.169.254", "fe80::1", "fe80::1%eth0", "224.0.0.1",
     "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:224.0.0.1"],
)  # fmt: skip
def test_local_address_is_refused(address: str) -> None:
    assert refuse_address(address) is not None


@given(st.ip_addresses().filter(lambda address: address.is_global and not address.is_multicast))
@example(ip_address("2606:4700::1111"))
def test_global_address_is_allowed(address: IPv4Address | IPv6Address) -> None:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    # A mapped address counts as the one that it stands for, which may be a multicast address.
    assume(mapped is None or (mapped.is_global and not mapped.is_multicast))
    assert refuse_address(str(address)) is None


def test_configured_network_allows_its_own_addresses_only() -> None:
    allowed = (ip_network("127.0.0.0/8"),)
    assert refuse_address("127.0.0.1", allowed) is None
    assert refuse_address(str(ip_address("::1")), allowed) is not None
