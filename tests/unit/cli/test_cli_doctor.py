"""What `doctor` reports about Java and the cluster of Spark, and what `osrdyne spark` gives the worker's program."""

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from osrdyne.cli.daemon import spark
from osrdyne.cli.daemon.doctor import check_answers, check_java, check_spark_master
from osrdyne.config.models import Settings
from osrdyne.findings import Finding
from osrdyne.protocol.environment import read_key
from osrdyne.testing.keys import ODD_KEYS


def java_home(folder: Path, script: str) -> dict[str, str]:
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"JAVA_HOME": str(folder), "PATH": "/usr/bin:/bin"}


def check(environment: dict[str, str], **settings: object) -> Finding:
    return check_java(Settings.model_validate(settings), environment=environment)


@pytest.mark.parametrize(("pool", "name", "found"), [("p", "answers", 1), ("other", "answers", 0), ("p", "broker", 0)])
def test_answers_that_wait_are_reported(monkeypatch, pool, name, found):
    ready = {"pool": pool, "components": [{"name": name, "detail": "3 wait"}]}
    monkeypatch.setattr("osrdyne.client.daemon_api.DaemonApi.get", lambda *_: ready)
    findings = check_answers(Settings.model_validate({"pool": {"id": "p"}}))
    assert [(one.ok, one.fatal, "3 wait" in one.message) for one in findings] == [(False, False, True)] * found


def test_no_daemon_reports_no_answers():
    assert check_answers(Settings.model_validate({"api": {"port": 1}})) == []


def test_java_must_be_17_or_later(tmp_path):
    versions = [f'openjdk version "{version}" 2023-10-17' for version in ("17.0.9", "22-ea", "11.0.1")]
    found = []
    for number, answer in enumerate([*versions, "hello"]):
        (tmp_path / str(number)).mkdir()
        found.append(check(java_home(tmp_path / str(number), f"echo '{answer}' >&2")).ok)
    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    ("settings", "fatal"),
    [({}, True), ({"driver": "noop"}, False), ({"worker": {"spark_master": "sc://spark"}}, False)],
    ids=["spark here", "no workers", "spark elsewhere"],
)
def test_no_java_is_fatal_unless_spark_is_elsewhere(tmp_path, settings, fatal):
    finding = check({"PATH": str(tmp_path)}, **settings)
    assert (finding.ok, finding.fatal, finding.remedy is None) == (False, fatal, False)
    wrong_home = check({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, **settings)
    assert f"{tmp_path}/bin/java" in wrong_home.message


def test_masters_are_named_without_their_tokens_and_one_reachable_address_is_enough():
    def check_master(master, *profiles):
        return check_spark_master(Settings.model_validate({"worker": {"spark_master": master, "profiles": profiles}}))

    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as master:
        closed.bind(("127.0.0.1", 0))  # no other socket can listen there
        away = f"127.0.0.1:{closed.getsockname()[1]}"
        profiles = (
            {"match": "a", "spark_master": f"sc://{away}/;token=secret"},
            {"match": "b", "spark_master": "local[2]"},
        )
        several = check_master(f"spark://{away}", *profiles)
        [found] = check_master(f"spark://{away},127.0.0.1:{master.getsockname()[1]}")
    assert [one.subject for one in several] == [f"spark master spark://{away}", f"spark master sc://{away}"]
    assert (several[0].ok, several[0].fatal, away in several[0].message, found.ok) == (False, False, True, True)
    assert check_master("local[2]") == check_master("local-cluster[2,1,1024]") == []


@pytest.mark.parametrize("key", ODD_KEYS.values(), ids=ODD_KEYS.keys())
def test_any_key_reaches_the_program_that_infers_columns(monkeypatch, key):
    started: list[tuple[Any, dict[str, str]]] = []

    def start(command, *, env, **_):
        started.append((command, env))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        spark.infer_columns(key, None, None)
    [(command, variables)] = started
    assert read_key(variables) == key
    # No variable and no argument of a process can hold NUL.
    assert not any("\0" in text for text in (*command, *variables.values()))
