"""A namespace on a real API server for the whole run, and a stand-in for its nodes.

`KUBECONFIG` names the cluster. It may have nodes: the pods of these tests ask for a scheduler that does not exist, so
that only the played kubelet takes them. The API server must reach this machine's loopback for the logs of pods, as one
on the same machine does.
"""

import os

import pytest
from harness import harness_for, own_namespace
from lightkube import Client, KubeConfig
from played_kubelet import PlayedKubelet


@pytest.fixture(scope="session", autouse=True)
def all_need_kubernetes(kubernetes_api):
    """The templates of the chart are checked here too, because the other tests install them."""


@pytest.fixture(scope="session")
def cluster():
    path = os.environ.get("KUBECONFIG")
    if not path:
        pytest.fail("These tests need a Kubernetes API server: set KUBECONFIG to the path of its kubeconfig.", False)
    config = KubeConfig.from_file(path).get()
    assert config is not None
    return config


@pytest.fixture(scope="session")
def admin(cluster):
    with Client(config=cluster) as client:
        yield client


@pytest.fixture(scope="session")
def namespace(admin):
    with own_namespace(admin) as name:
        yield name


@pytest.fixture(scope="session")
def kubelet(cluster, namespace, tmp_path_factory):
    kubelet = PlayedKubelet(cluster, namespace, tmp_path_factory.mktemp("kubelet"))
    kubelet.start()
    yield kubelet
    kubelet.stop()


@pytest.fixture
async def harness(cluster, kubelet, namespace, tmp_path):
    async with harness_for(cluster, kubelet, namespace, tmp_path) as harness:
        yield harness
