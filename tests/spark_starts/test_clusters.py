"""Workers whose Spark runs on a cluster: a real standalone cluster, and `local-cluster`."""

import asyncio
from pathlib import Path

import pyspark
import pytest

from osrdyne.client import StartFailedError
from tests.acceptance.daemon_process import until
from tests.spark_starts.standalone_cluster import PATIENCE, pid_of_task, use_master

pytestmark = pytest.mark.nightly


def holding(directory: Path, *, seconds: float) -> dict[str, object]:
    directory.mkdir()
    return {"tasks": 2, "seconds": seconds, "directory": str(directory)}


@pytest.mark.timeout(1500)
@pytest.mark.proves("spark/cluster-free-cores-memory", "spark/executor-lost-during-job")
async def test_keys_on_a_standalone_cluster(cluster, daemon, tmp_path):
    async with await use_master(daemon, cluster.url) as client:
        assert (await client.call("a", "/sum")).json() == 499500
        assert (await client.call("a", "/udf")).json() == ["aa", "bb"]

        # A cancel frees the executors of the cancelled job: they go when they are idle.
        cancelled = tmp_path / "cancelled"
        request = asyncio.create_task(client.call("a", "/hold", holding(cancelled, seconds=3600)))
        await pid_of_task(cancelled, 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(lambda: not cluster.executors(), "an idle worker holds no executor", timeout=PATIENCE)

        # A killed executor costs its tasks a second attempt, and the caller nothing.
        killed = tmp_path / "killed"
        request = asyncio.create_task(client.call("a", "/hold", holding(killed, seconds=8)))
        await pid_of_task(killed, 0)
        cluster.executors()[0].kill()
        assert (await request).json() == 1

        # While the jobs of one key hold all cores, another key's worker cannot start; its caller gets the reason.
        full, waited_for = tmp_path / "full", set()
        request = asyncio.create_task(client.call("a", "/hold", holding(full, seconds=3600)))
        await pid_of_task(full, 1)
        with pytest.raises(StartFailedError, match=r"has started no executor within .* it has no free cores or memory"):
            await client.call("b", "/sum", on_starting=lambda progress: waited_for.add(progress.waiting_for))
        assert "executors" in waited_for
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


@pytest.mark.timeout(1500)
async def test_key_on_a_local_cluster(daemon):
    installed = sorted(Path(pyspark.__file__).parent.iterdir())
    async with await use_master(daemon, "local-cluster[2,1,1024]") as client:
        assert (await client.call("a", "/sum")).json() == 499500
        assert (await client.call("a", "/udf")).json() == ["aa", "bb"]
    # Spark's own place for the files of executors is `work` in its installation.
    assert sorted(Path(pyspark.__file__).parent.iterdir()) == installed
