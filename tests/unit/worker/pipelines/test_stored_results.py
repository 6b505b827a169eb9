"""Results in files, without Spark: which expire, which requests name the same export, and what a failed one leaves."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context, RequestError
from osrdyne_worker.pipelines.queries import export, paging
from osrdyne_worker.pipelines.queries.export import MANIFEST, ExportRequest, Exports, _export_name
from osrdyne_worker.pipelines.queries.paging import StoredResults
from osrdyne_worker.pipelines.views.datasets import ExportConfig, PagingConfig

SCHEMA = pa.schema({"n": pa.int64()})
LATER = 10_000.0
LIMITS: Any = {"limit": None, "max_bytes": 2**20, "too_large": AssertionError, "check": lambda: None}


def results(directory: Path, *, at: float = 0.0) -> StoredResults:
    """The results of a worker whose clock is `at` seconds ahead of the times of the files."""
    now = directory.stat().st_mtime + at
    return StoredResults(PagingConfig(directory=str(directory), expiry=600.0), pool="p", key="k", now=lambda: now)


def query(*numbers: int, before_last: Callable[[], object] = lambda: None) -> Any:
    def batches() -> Iterator[pa.RecordBatch]:
        for number in numbers:
            if number == numbers[-1]:
                before_last()
            yield pa.record_batch({"n": [number]}, schema=SCHEMA)

    return SimpleNamespace(frame=batches(), types=(("n", "bigint"),))


def store(directory: Path, *, at: float = 0.0) -> None:
    """A worker that stores a result makes room."""
    results(directory, at=at).first_page(query(1), size=1, limit=None)


@pytest.fixture(autouse=True)
def without_spark(monkeypatch):
    monkeypatch.setattr(paging, "arrow_batches", lambda frame: (SCHEMA, frame))
    monkeypatch.setattr(paging, "estimated_bytes", lambda frame: None)


@pytest.mark.proves("spark/query-writes-row-longer")
def test_result_whose_query_is_slow_does_not_expire_while_it_is_written(tmp_path):
    """Another worker of the same directory makes room meanwhile, long after the last row was written."""
    slow = query(1, 2, before_last=lambda: store(tmp_path, at=LATER))
    page = results(tmp_path).first_page(slow, size=1, limit=None)
    assert page.total_rows == 2
    assert json.loads(page.answer(accept=None).body)["rows"] == [[1]]
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]
    left = tmp_path / "0-0.unfinished"
    left.write_bytes(b"ARROW1")
    store(tmp_path)
    assert left.exists(), "another worker may be writing it"
    store(tmp_path, at=LATER)
    assert not left.exists(), "its worker has died"


def test_file_that_is_uploaded_does_not_expire_and_is_removed_afterwards(tmp_path):
    stored = results(tmp_path)
    with stored.spilled(query(1), **LIMITS) as (path, rows):
        store(tmp_path, at=LATER)
        assert (path.exists(), rows) == (True, 1)
    assert list(tmp_path.iterdir()) == []
    # An error of the upload is not one of the directory.
    with pytest.raises(OSError, match="refused by the store"), stored.spilled(query(1), **LIMITS):
        raise OSError("refused by the store")
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    stored = StoredResults(PagingConfig(directory=f"{tmp_path}/file"), pool="p", key="k")
    with pytest.raises(RequestError, match="/file") as caught:
        stored.first_page(query(1), size=1, limit=None)
    assert caught.value.error_code == "paging_unavailable"


LOST = OSError("the answer of the file system was lost")


class Files:
    """A directory. `creates`: whether `create` creates the manifest; `fails`: whether it then raises an error."""

    def __init__(self, *, creates: bool, fails: bool = True) -> None:
        self.texts: dict[str, str] = {}
        self._creates, self._fails = creates, fails

    def read(self, name: str) -> str | None:
        return self.texts.get(name)

    def create(self, name: str, content: bytes, *, aside: str) -> bool:
        if self._creates:
            self.texts[name] = content.decode()
        if self._fails:
            raise LOST
        return False

    def directories(self, name: str) -> list[str]:
        return sorted({path.removeprefix(f"{name}/").partition("/")[0] for path in self.texts})

    def listed(self, name: str) -> list[tuple[str, int]]:
        return [(f"file:/exports/{path}", len(text)) for path, text in self.texts.items() if path.startswith(name)]

    def names(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.texts)

    def delete(self, name: str) -> None:
        self.texts = {path: text for path, text in self.texts.items() if not path.startswith(f"{name}/")}


def run(monkeypatch: pytest.MonkeyPatch, files: Files) -> dict[str, Any]:
    """Export to `files`."""

    def write(self: Exports, session: Any, files: Files, directory: str, *_: Any, **__: Any) -> int:
        files.texts[f"{directory}/part-0"] = "rows"
        return 1

    monkeypatch.setattr(export, "HadoopFiles", lambda session, root: files)
    monkeypatch.setattr(export, "estimated_bytes", lambda frame: None)
    monkeypatch.setattr(Exports, "_write", write)
    results: Any = None
    exports = Exports(ExportConfig(directory="/exports"), results, pool="p", key="k")
    query: Any = SimpleNamespace(frame=None, types=(("n", "bigint"),))
    call = Call(Context(Key("k")), Request("k", b"", correlation_id="c", reply_to="r"))
    return exports.run(SimpleNamespace(_jsparkSession=None), query, call, ExportRequest(query="select 1"))


@pytest.mark.parametrize(("creates", "left"), [(True, [MANIFEST, "part-0"]), (False, [])])
@pytest.mark.proves("spark/file-system-creates-manifest")
def test_failed_export_removes_files_that_no_manifest_lists(monkeypatch, creates, left):
    files = Files(creates=creates)
    with pytest.raises(OSError, match="was lost"):
        run(monkeypatch, files)
    assert files.names() == left
    repeated = Files(creates=True, fails=False)
    assert run(monkeypatch, repeated)["repeated"] is False
    assert repeated.names() == [MANIFEST, "part-0"]


def name(export_id: str | None = "monthly", query: str = "select 1", **request: Any) -> str:
    fields = {"correlation_id": "c", "reply_to": "r", **request}
    call = Call(Context(Key("k")), Request("k", b"", **fields))
    return _export_name(call, ExportRequest(query=query, id=export_id))


@pytest.mark.parametrize("export_id", ["monthly", None])
def test_request_that_needs_later_data_is_another_export(export_id):
    """Otherwise it would be answered from the earlier data."""
    versions: list[dict[str, object]] = [{}, {"x-data-version": 7}, {"x-data-version": 8}]
    assert len({name(export_id, headers=headers) for headers in versions}) == 3
    assert name(export_id, headers={"x-data-version": 8}) == name(export_id, headers={"x-data-version": b"8"})
    anonymous = {name(export_id, correlation_id=None, reply_to=None) for _ in range(3)}
    assert len(anonymous) == (3 if export_id is None else 1)
