"""`osrdyne spark infer-columns` on real files; its output is what the configuration takes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from osrdyne_worker.pipelines import sql as pipeline

pytestmark = pytest.mark.nightly


def inferred(directory: Path, worker: dict[str, Any], key: str) -> subprocess.CompletedProcess[str]:
    (directory / "osrdyne.yaml").write_text(json.dumps({"worker": worker}), encoding="utf-8")
    program = Path(sys.executable).with_name("osrdyne")
    return subprocess.run(
        [program, "spark", "infer-columns", key],
        cwd=directory,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.timeout(900)
def test_printed_columns_open_the_same_view(tmp_path, tpch, make_call):
    (tmp_path / "odd.json").write_text('{"a b": {"c": [1]}, "größe": 1.5}\n', encoding="utf-8")
    tables = [
        {"view": "nation", "path": f"{tpch}/sf=0.001/nation.parquet", "cache": True},
        {"view": "odd", "path": str(tmp_path / "odd.json"), "format": "json", "columns": "wrong int"},
    ]
    config = {"datasets": [{"key": "k", "tables": tables}]}
    worker = {"config": config, "footprint": "small", "spark_master": "local[1]"}
    done = inferred(tmp_path, worker, "k")
    assert (done.returncode, done.stderr) == (0, "")
    columns = {one["view"]: one["columns"] for one in yaml.safe_load(done.stdout)}
    assert columns["nation"].startswith("n_nationkey bigint, n_name string")
    given = [{**table, "columns": columns[str(table["view"])], "cache": False} for table in tables]
    schemas = [
        pipeline.schema(make_call({"datasets": [{"key": "k", "tables": chosen}]}, "k"))["views"]
        for chosen in (given, [{**table, "columns": None, "cache": False} for table in tables])
    ]
    assert schemas[0] == schemas[1]
    wrong = inferred(tmp_path, worker, "unknown")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("There is no dataset for the key 'unknown'")
