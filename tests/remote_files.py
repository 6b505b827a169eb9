"""What the SQL pipeline promises of every remote file system: the suite that the tests of HDFS and of S3 run."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyspark
import pytest

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.queries.export import MANIFEST, ExportRequest
from osrdyne_worker.pipelines.sql import SqlRequest
from osrdyne_worker.spark.files.hadoop_files import HadoopFiles

JARS = Path(pyspark.__file__).parent / "jars"
MakeCall = Callable[..., Call]


def hadoop_version() -> str:
    """The version of Hadoop that PySpark contains."""
    [jar] = JARS.glob("hadoop-client-api-*.jar")
    return jar.stem.removeprefix("hadoop-client-api-")


def maven(goal: str, *arguments: str) -> None:
    """Run a goal of the plugin that copies artifacts."""
    plugin = f"org.apache.maven.plugins:maven-dependency-plugin:3.6.1:{goal}"
    subprocess.run(["mvn", "-q", "-B", plugin, *arguments], check=True, timeout=1200)


@contextmanager
def spark_session(conf: dict[str, Any]) -> Iterator[Any]:
    small = {"spark.driver.memory": "768m", "spark.sql.shuffle.partitions": 2}
    context = Context(key=Key("tests"), worker_config={"spark": {"master": "local[2]", "conf": small | conf}})
    session = pipeline.sessions.build(context)
    yield session
    pipeline.sessions.close(session)


def written(session: Any, path: str, count: int) -> str:
    session.range(count, numPartitions=2).write.mode("overwrite").parquet(path)
    return path


def ask(call: Call) -> list[list[Any]]:
    request = SqlRequest(query="select count(*), sum(id) from t")
    rows: list[list[Any]] = json.loads(pipeline.sql(call, request).body)["rows"]
    return rows


def export(call: Call, query: str = "select id from t order by id", **body: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = pipeline.export(call, ExportRequest(query=query, **body)).body
    return manifest


def call_in(context: Context) -> Call:
    return Call(context, Request(key=context.key, body=b""))


def reloaded(session: Any, call: Call, version: int | None = None) -> Call:
    """The call with the data as it is now."""
    context = replace(call.context, session=session.newSession(), data_version=version)
    return call_in(replace(context, state=pipeline.reload_data(context)))


def changed_version(call: Call) -> int:
    """The version of the data, which is newer than that of the call."""
    before, version = call.context.data_version, pipeline.newest_version(call.context)
    assert version is not None
    assert before is None or version > before
    return version


def watched(make_call: MakeCall, path: str) -> Call:
    """A call with the version of its dataset."""
    call = make_call(path, watch=True)
    call = call_in(replace(call.context, data_version=changed_version(call)))
    assert pipeline.newest_version(call.context) == call.context.data_version, "nothing has changed"
    return call


class RemoteFilesSuite:
    """A subclass has the fixtures `session` and `base`, the start of all paths."""

    partition = "day"

    @pytest.fixture
    def exports(self, base):
        """Where the directory of exports is: it needs a URL."""
        return base

    @pytest.fixture
    def make_call(self, session, exports, tmp_path):
        def make(path, *, watch=False, exports=exports, **table):
            config = {
                "datasets": [{"key": "{name}", "watch": watch, "tables": [{"view": "t", "path": path, **table}]}],
                "export": {"directory": f"{exports}/exports/{tmp_path.name}", "max_bytes": 1_000_000},
                "paging": {"directory": str(tmp_path / "pages")},
            }
            context = Context(key=Key("k"), pool="p", config=config, session=session.newSession())
            return call_in(replace(context, state=pipeline.open_data(context)))

        return make

    @pytest.mark.parametrize("path", ["data/k/numbers", "data/{name}/numbers"], ids=["fixed", "of key"])
    def test_dataset_is_read_and_cached(self, session, base, make_call, path):
        written(session, f"{base}/data/k/numbers", 10)
        call = make_call(f"{base}/{path}", cache=True)
        assert ask(call) == [[10, 45]]
        assert call.context.state.caching.wait(300)
        assert pipeline.cache_status(call)["views"][0]["cached"]
        assert ask(call) == [[10, 45]]

    def test_missing_data_is_reported_and_found_once_it_is_there(self, session, base, make_call, tmp_path, monkeypatch):
        path = f"{base}/late/{tmp_path.name}"
        call = make_call(path)
        with pytest.raises(RequestError) as caught:
            ask(call)
        assert caught.value.error_code == "dataset_not_found"
        written(session, path, 3)
        monkeypatch.setattr(call.context.state, "_tried_at", float("-inf"))
        assert ask(call) == [[3, 3]]

    def test_changes_of_a_watched_dataset_are_found(self, session, base, make_call, tmp_path):
        path = f"{base}/watched/{tmp_path.name}"

        def write(count):
            frame = session.range(count).selectExpr("id", f"id % 3 as `{self.partition}`")
            frame.write.partitionBy(self.partition).mode("overwrite").parquet(path)

        write(10)
        call = watched(make_call, path)
        assert ask(call) == [[10, 45]]
        write(5)
        call = reloaded(session, call, changed_version(call))
        assert ask(call) == [[5, 10]]
        files = HadoopFiles(session, path)
        files.delete(files.directories("")[0])
        call = reloaded(session, call, changed_version(call))
        assert ask(call)[0][0] < 5
        assert pipeline.newest_version(call.context) == call.context.data_version

    @pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
    def test_export_is_written_once_with_its_manifest(self, session, base, exports, make_call, kind):
        call = make_call(written(session, f"{base}/source", 100))
        first = export(call, format=kind, id="one")
        assert (first["rows"], first["repeated"]) == (100, False)
        assert all(path.startswith(f"{exports}/exports/") for path in first["paths"])
        files = HadoopFiles(session, first["paths"][0].rpartition("/data-")[0])
        assert json.loads(files.read(MANIFEST) or "")["paths"] == first["paths"]
        listed = [one for name in files.directories("") for one in files.listed(name)]
        assert (sorted(path for path, _ in listed), sum(size for _, size in listed)) == (first["paths"], first["bytes"])
        if kind != "arrow":
            frame = session.read.options(header=True).format(kind).load(first["paths"])
            assert frame.selectExpr("sum(cast(id as bigint))").collect()[0][0] == 4950
        assert export(call, format=kind, id="one") == {**first, "repeated": True}
