"""`make test` starts no Spark: the Makefile lists the files that do (decision 0129)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTS_SPARK = re.compile(r"^from (tests\.)?spark_fixtures import", re.MULTILINE)


def files_of(variable: str) -> set[Path]:
    """The test files that a variable of the Makefile names, those in its folders included."""
    command = ["make", "--no-print-directory", "--eval", f"show: ; @echo $({variable})", "show"]
    named = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    paths = [ROOT / name for name in named]
    assert [path for path in paths if not path.exists()] == []
    return {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}


def test_each_file_that_starts_spark_runs_with_the_tests_on_spark() -> None:
    starting = {file for file in (ROOT / "tests").rglob("test_*.py") if STARTS_SPARK.search(file.read_text("utf-8"))}
    assert starting
    # The acceptance tests are excluded file by file: only the other folders have a target of their own.
    elsewhere = {file for file in files_of("OTHER_TESTS") if file.parent.name != "acceptance"}
    assert starting - elsewhere - files_of("SPARK_TESTS") == set()
