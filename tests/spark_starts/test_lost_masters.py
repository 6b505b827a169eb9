"""A standalone cluster whose master goes away. In a file of its own: it waits long for a start that must fail."""

import pytest

from osrdyne.client import StartFailedError
from tests.spark_starts.standalone_cluster import use_master

pytestmark = pytest.mark.nightly


@pytest.mark.timeout(1500)
@pytest.mark.proves("spark/cluster-worker-spark-master", "spark/master-restarted-forgotten-application")
async def test_master_that_goes_away_and_comes_back(cluster, daemon):
    async with await use_master(daemon, cluster.url) as client:
        assert (await client.call("a", "/sum")).json() == 499500
        cluster.kill_master()
        with pytest.raises(StartFailedError, match=r"cannot be reached: .* does not accept connections"):
            await client.call("b", "/sum")
        await cluster.start_master()
        assert (await client.call("c", "/sum")).json() == 499500
        # The new master does not know the application of the first key. Its worker notices and is replaced.
        assert (await client.call("a", "/sum")).json() == 499500
