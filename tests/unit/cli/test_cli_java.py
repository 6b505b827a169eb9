"""What `doctor` reports about Java."""

from __future__ import annotations

from pathlib import Path

import pytest

from osrdyne.cli.doctor import check_java
from osrdyne.config.models import Settings
from osrdyne.findings import Finding


def java_home(folder: Path, script: str) -> dict[str, str]:
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"JAVA_HOME": str(folder), "PATH": "/usr/bin:/bin"}


def check(environment: dict[str, str], **settings: object) -> Finding:
    return check_java(Settings.model_validate(settings), environment=environment)


@pytest.mark.parametrize(
    ("version", "ok"), [("17.0.9", True), ("21", True), ("22-ea", True), ("11.0.1", False), ("1.8.0_392", False)]
)
def test_java_must_be_17_or_later(tmp_path: Path, version: str, ok: bool) -> None:
    finding = check(java_home(tmp_path, f"echo 'openjdk version \"{version}\" 2023-10-17' >&2"))
    assert finding.ok is ok


def test_missing_java_is_fatal_with_a_remedy(tmp_path: Path) -> None:
    finding = check({"PATH": str(tmp_path)})
    assert (finding.ok, finding.fatal, finding.message) == (False, True, "No Java was found.")
    assert finding.remedy is not None


@pytest.mark.parametrize("settings", [{"driver": "noop"}, {"worker": {"spark_master": "sc://spark"}}])
def test_missing_java_is_not_a_failure_where_spark_runs_elsewhere(tmp_path: Path, settings: dict[str, object]) -> None:
    assert not check({"PATH": str(tmp_path)}, **settings).fatal


def test_java_home_without_java_is_named(tmp_path: Path) -> None:
    finding = check({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert finding.message == f"{tmp_path}/bin/java does not run."


def test_java_that_says_nonsense_is_refused(tmp_path: Path) -> None:
    assert not check(java_home(tmp_path, "echo hello")).ok
