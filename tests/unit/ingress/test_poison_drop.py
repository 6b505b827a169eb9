"""PoisonMessageDrop: which addresses a policy may name, and which hosts the daemon may send to."""

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
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


def test_address_is_parsed_or_refused_without_quoting_it():
    assert {text: parse_poison_drop(text) for text in ADDRESSES} == ADDRESSES
    for text in REFUSED:
        with pytest.raises(ValueError, match=r".") as caught:
            parse_poison_drop(text)
        assert "pass" not in str(caught.value).replace("password", "")


@given(st.text(max_size=60), st.text(max_size=60))
def test_what_logs_show_of_a_url_has_no_secret(path, query):
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
     "0.1.2.3", "255.255.255.255", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:224.0.0.1", "::127.0.0.1",
     "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1:a9fe:a9:fe00::", "2002:a9fe:a9fe::1", "2001:0:7f00:1::",
     "2001:0:808:808::80ff:fffe", "fe80::5efe:7f00:1", "2606:4700::200:5efe:a9fe:a9fe", "100.100.100.200",
     "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "::ffff:100.100.100.200", "64:ff9b::6464:64c8"],
)  # fmt: skip
def test_local_address_is_refused(address):
    assert refuse_address(address) is not None


@given(
    st.ip_addresses(v=4).filter(lambda address: address.is_global and not address.is_multicast),
    st.sampled_from(["", "::ffff:", "64:ff9b::"]),
    st.ip_addresses(network="2606:4700::/32"),
)
def test_global_address_is_allowed(address, prefix, newer):
    assert refuse_address(f"{prefix}{address}") is None
    assert refuse_address(str(newer)) is None


def test_configured_network_allows_its_own_addresses_only():
    allowed = (ip_network("127.0.0.0/8"),)
    assert refuse_address("127.0.0.1", allowed) is None
    assert refuse_address(str(ip_address("::1")), allowed) is not None
    assert refuse_address("64:ff9b::7f00:1", allowed) is None
    assert refuse_address("64:ff9b::a9fe:a9fe", allowed) is not None
    assert refuse_address("64:ff9b::a9fe:a9fe", (ip_network("64:ff9b::/96"),)) is None
