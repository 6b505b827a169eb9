"""The options of a JVM: its archive of classes, its heap, and the priority of its second compiler."""

from __future__ import annotations

import os
import shlex
import threading
import time
from pathlib import Path

import pytest

from osrdyne.protocol.spark_master import parse_spark_master
from osrdyne_worker.spark.java import archive, compiler
from osrdyne_worker.spark.java.archive import DRIVER_OPTIONS, archive_stem, find_archive, with_archive, written_aside
from osrdyne_worker.spark.session import session_conf


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a Java of release 17; archives are below the test's directory."""
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    (home / "release").write_text('JAVA_VERSION="17.0.15"')
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(archive, "system_directory", lambda: tmp_path / "system")
    return home


@pytest.fixture
def made(java: Path) -> Path:
    stem = archive_stem({})
    assert stem is not None
    with written_aside(archive.user_directory(), stem) as unfinished:
        unfinished.write_bytes(b"classes")
    (path,) = archive.user_directory().iterdir()
    return path


def test_archive_comes_before_the_options_of_the_user_which_win(made: Path) -> None:
    options = with_archive({DRIVER_OPTIONS: "-Dmine=1"})[DRIVER_OPTIONS]
    assert options.startswith(f"-Xshare:auto -XX:SharedArchiveFile={made} ")
    assert options.endswith(" -Dmine=1")
    for own in ("-Xshare:off", "-XX:SharedArchiveFile=/mine.jsa", "-XX:ArchiveClassesAtExit=/mine.jsa"):
        assert with_archive({DRIVER_OPTIONS: own}) == {DRIVER_OPTIONS: own}


def test_archive_in_a_directory_with_a_blank_is_used(
    java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a home"))
    write(archive.user_directory(), b"classes")
    conf = with_archive({})[DRIVER_OPTIONS]
    assert f"-XX:SharedArchiveFile={find_archive({})}" in shlex.split(conf)
    written = archive.recording({}, tmp_path / "a home" / "new.jsa")[DRIVER_OPTIONS]
    assert f"-XX:ArchiveClassesAtExit={tmp_path}/a home/new.jsa" in shlex.split(written)


def test_archive_that_others_may_write_or_that_was_cut_off_is_not_used(made: Path) -> None:
    assert find_archive({}) == made
    made.chmod(0o666)
    assert find_archive({}) is None
    assert with_archive({"a": "b"}) == {"a": "b"}
    made.chmod(0o600)
    made.write_bytes(b"class")
    assert find_archive({}) is None


def write(directory: Path, content: bytes) -> None:
    with written_aside(directory, archive_stem({}) or "") as unfinished:
        unfinished.write_bytes(content)


def test_new_archive_takes_the_place_of_the_former_one_and_that_of_the_installation_comes_first(made: Path) -> None:
    write(made.parent, b"more classes")
    assert list(made.parent.iterdir()) == [find_archive({})]
    write(archive.system_directory(), b"classes")
    assert find_archive({}) == archive.system_directory() / made.name


def test_run_that_fails_leaves_the_former_archive_and_what_a_killed_one_left_is_removed(made: Path) -> None:
    with pytest.raises(RuntimeError), written_aside(made.parent, archive_stem({}) or "") as unfinished:
        unfinished.write_bytes(b"half")
        raise RuntimeError("failed")
    assert list(made.parent.iterdir()) == [made]
    left, current = made.with_name(".a.1.unfinished"), made.with_name(".a.2.unfinished")
    left.touch()
    current.touch()
    ended = made.with_name(".a.3.unfinished")
    ended.symlink_to(made.with_name("renamed"))  # of a run that ends now: found in the directory, and missing
    long_ago = time.time() - archive.ABANDONED_AFTER - 1
    os.utime(left, (long_ago, long_ago))
    with written_aside(made.parent, archive_stem({}) or ""):
        pass
    assert sorted(made.parent.iterdir()) == sorted([current, ended, made])
    assert made.read_bytes() == b"classes"


OURS = "-XX:InitialHeapSize=256m -XX:GCTimeRatio=4"


def options(
    configured: str | None = None, *, memory: str | None = None, master: str = "local[2]", of_application: str = ""
) -> str | None:
    given = {DRIVER_OPTIONS: configured, "spark.driver.memory": memory}
    settings = {name: value for name, value in given.items() if value is not None}
    return session_conf(parse_spark_master(master), settings, {}, of_application).get(DRIVER_OPTIONS)


@pytest.mark.parametrize("memory", [None, "512m", "600M", "1024mb", "2g", " 8GB "])
def test_heap_starts_small_and_grows_when_it_must(memory: str | None) -> None:
    assert options(memory=memory) == OURS
    assert options("-Da=b", memory=memory) == f"{OURS} -Da=b"
    assert options("-Da=b", memory=memory, of_application="-Da=") == f"{OURS} -Da=b -Da="


def test_heap_that_is_too_small_driver_of_a_cluster_and_options_of_the_user_are_left_alone() -> None:
    for memory in ("256m", "1000", "500000k", "nonsense"):
        assert options(memory=memory) is options(master="spark://host:7077") is None
        assert options("-Da=b", memory=memory) == "-Da=b"
    for own in ("-XX:+UseZGC", "-Xms1g", "-XX:GCTimeRatio=12", "-XX:InitialHeapSize=1g"):
        assert options(own) == own


def test_priority_of_the_second_compiler_alone_is_lowered(tmp_path: Path) -> None:
    ended, named = threading.Event(), threading.Barrier(3)
    numbers: dict[str, int] = {}

    def run(name: str) -> None:
        numbers[name] = threading.get_native_id()
        Path(f"/proc/self/task/{numbers[name]}/comm").write_text(name, encoding="utf-8")
        named.wait(60)
        ended.wait(60)

    threads = [threading.Thread(target=run, args=(f"{name} CompilerThre",)) for name in ("C1", "C2")]
    for thread in threads:
        thread.start()
    try:
        named.wait(60)
        before = os.getpriority(os.PRIO_PROCESS, numbers["C1 CompilerThre"])
        assert compiler.lower_priority(os.getpid()) == 1
        assert os.getpriority(os.PRIO_PROCESS, numbers["C1 CompilerThre"]) == before
        assert os.getpriority(os.PRIO_PROCESS, numbers["C2 CompilerThre"]) == min(19, before + compiler.NICENESS)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert compiler.lower_priority(1, proc=tmp_path) == 0, "a process that has ended is no error"
