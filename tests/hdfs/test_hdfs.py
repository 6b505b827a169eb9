"""Datasets and exports of the SQL pipeline on HDFS: `make test-hdfs`."""

from pathlib import Path

import pytest
from hdfs_cluster import Hdfs
from remote_files import RemoteFilesSuite, ask, changed_version, export, reloaded, spark_session, watched, written

from osrdyne.dev.rabbitmq.node_files import free_ports
from osrdyne_worker import RequestError
from osrdyne_worker.app.errors import DataChangedError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.spark.files import file_listing
from osrdyne_worker.spark.files.hadoop_files import HadoopFiles

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.timeout(1800)]

CACHE = Path(__file__).parents[2] / "build" / "hdfs"


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory):
    CACHE.mkdir(parents=True, exist_ok=True)
    cluster = Hdfs(tmp_path_factory.mktemp("hdfs"), cache=CACHE)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def session(hdfs):
    conf = {
        "spark.hadoop.fs.defaultFS": hdfs.address,
        "spark.hadoop.dfs.replication": 1,
        "spark.hadoop.ipc.client.connect.max.retries": 1,
    }
    with spark_session(conf) as built:
        yield built


class TestHdfs(RemoteFilesSuite):
    partition = "day é %"

    @pytest.fixture(params=["{address}", ""], ids=["url", "path of the default file system"])
    def base(self, request, hdfs):
        return str(request.param).format(address=hdfs.address)

    @pytest.fixture
    def exports(self, hdfs):
        return hdfs.address

    @pytest.fixture(autouse=True)
    def several_slices(self, monkeypatch):
        monkeypatch.setattr(file_listing, "SLICE", 2)

    def test_files_replaced_below_a_warm_worker_are_opened_again(self, session, base, make_call):
        path = written(session, f"{base}/replaced", 10)
        call = make_call(path)
        assert ask(call) == [[10, 45]]
        written(session, path, 5)
        # The runtime reloads the data then, and runs the query once more.
        with pytest.raises(DataChangedError):
            ask(call)
        assert ask(reloaded(session, call)) == [[5, 10]]

    def test_write_that_has_not_ended_is_no_change_and_a_removal_is_one(self, session, base, make_call):
        path = written(session, f"{base}/unfinished", 10)
        call = watched(make_call, path)
        files = HadoopFiles(session, path)
        files._files.create(files._java_path("_temporary/0/part-1"), False).close()
        assert pipeline.newest_version(call.context) == call.context.data_version
        files.delete("")
        assert changed_version(call)

    @pytest.mark.proves("files/file-system-view-cannot")
    def test_name_node_that_cannot_be_reached_is_named(self, session, hdfs, make_call):
        [port] = free_ports(1)
        with pytest.raises(RequestError) as caught:
            ask(make_call(f"hdfs://127.0.0.1:{port}/data"))
        assert (caught.value.code, caught.value.error_code) == (503, "dataset_unreachable")
        assert f":{port} failed on connection exception" in caught.value.message
        assert "\n" not in caught.value.message
        call = make_call(written(session, f"{hdfs.address}/data/source", 100), exports=f"hdfs://127.0.0.1:{port}")
        with pytest.raises(RequestError, match=f":{port} failed on connection exception"):
            export(call)


@pytest.mark.proves("files/file-system-watched-dataset")
def test_listing_that_fails_or_takes_too_long_is_an_error_of_one_line(session, hdfs):
    [port] = free_ports(1)
    with pytest.raises(file_listing.ListingError, match=f":{port} failed on connection exception") as caught:
        list(file_listing.list_files(session, f"hdfs://127.0.0.1:{port}/data"))
    assert "\n" not in str(caught.value)
    written(session, f"{hdfs.address}/data/listed", 10)
    with pytest.raises(file_listing.ListingError, match="took longer than 1 s"):
        times = iter([0.0, 2.0])
        list(file_listing.list_files(session, f"{hdfs.address}/data/listed", timeout=1.0, monotonic=times.__next__))
    with pytest.raises(FileNotFoundError):
        list(file_listing.list_files(session, f"{hdfs.address}/data/nowhere"))


def test_of_two_attempts_that_end_together_one_creates_the_manifest(session, hdfs):
    files = HadoopFiles(session, f"{hdfs.address}/manifests")
    assert files.create("m", b"first", aside="a/m")
    # As if the second one had looked before the first one created it.
    unfinished = files._java_path("b")
    files._files.create(unfinished, False).close()
    assert not files._files.rename(unfinished, files._java_path("m"))
    assert not files.create("m", b"second", aside="c/m")
    assert files.read("m") == "first"
