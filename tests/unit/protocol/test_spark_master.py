"""Which masters of Spark are valid, and where they are reached."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.protocol.spark_master import MasterKind, parse_spark_master, shown_master

hosts = st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{1,5}){0,2}", fullmatch=True)
ports = st.integers(1, 65535)


@given(st.lists(st.tuples(hosts, ports), min_size=1, max_size=4))
def test_standalone_master_has_its_addresses_in_order_and_a_local_one_none(addresses):
    master = parse_spark_master("spark://" + ",".join(f"{host}:{port}" for host, port in addresses))
    assert (master.kind, master.addresses, master.is_shared) == (MasterKind.STANDALONE, tuple(addresses), True)
    for text in ("local", "local[1]", "local[*]", "local[4,2]", "local[*, 3]"):
        master = parse_spark_master(text)
        assert (master.kind, master.addresses, master.is_cluster) == (MasterKind.LOCAL, (), False)
    cluster = parse_spark_master("local-cluster[2,1,1024]")
    assert (cluster.kind, cluster.is_cluster, cluster.is_shared) == (MasterKind.LOCAL_CLUSTER, True, False)


@pytest.mark.parametrize(
    ("text", "kind", "address", "shown"),
    [
        ("k8s://https://api:6443", MasterKind.KUBERNETES, ("api", 6443), "k8s://https://api:6443"),
        ("k8s://https://api", MasterKind.KUBERNETES, ("api", 443), "k8s://https://api"),
        ("k8s://https://user:secret@h:6443", MasterKind.KUBERNETES, ("h", 6443), "k8s://https://***@h:6443"),
        ("sc://spark", MasterKind.CONNECT, ("spark", 15002), "sc://spark"),
        ("sc://spark:443/;token=secret;use_ssl=true", MasterKind.CONNECT, ("spark", 443), "sc://spark:443"),
        ("spark://[::1]:7077", MasterKind.STANDALONE, ("[::1]", 7077), "spark://[::1]:7077"),
    ],
)
def test_master_is_shown_without_secrets(text, kind, address, shown):
    master = parse_spark_master(text)
    assert (master.kind, master.addresses) == (kind, (address,))
    assert shown_master(text) == shown


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        *((text, "`local`") for text in ("", "locale", "local[0]", "local[-1]", "local-cluster[2,1]", "yarn-client")),
        ("mesos://user:secret@host:5050", "`local`"),
        ("connect://host/;token=secret", "`local`"),
        ("spark://host", "spark://host:port"),
        ("spark://host:70770", "'host:70770'"),
        ("spark://a:7077,", "''"),
        ("spark://user:secret@host", "spark://host:port"),
        ("k8s://ftp://user:secret@host", "k8s://"),
        ("sc://:x/;token=secret", "sc://"),
        ("sc://host;token=secret", "sc://"),
    ],
)
def test_invalid_master_is_refused_with_the_remedy_and_without_secrets(text, marker):
    with pytest.raises(ValueError, match=r"\w") as caught:
        parse_spark_master(text)
    assert marker in str(caught.value)
    assert "secret" not in str(caught.value)
