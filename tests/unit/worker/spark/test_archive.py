"""Which class data sharing archive a JVM is given, and how one gets to its place."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from osrdyne_worker.spark.java import archive
from osrdyne_worker.spark.java.archive import DRIVER_OPTIONS, archive_stem, find_archive, with_archive, written_aside


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


def test_name_depends_on_java_and_on_the_class_path(java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [archive_stem({}), archive_stem({"spark.driver.extraClassPath": "/opt/jars/*"})]
    (java / "release").write_text('JAVA_VERSION="17.0.16"')
    names.append(archive_stem({}))
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    names.append(archive_stem({}))
    assert len({*names, None}) == 5
    assert archive_stem({"spark.driver.memory": "8g"}) == names[-1]


def test_archive_comes_before_the_options_of_the_user_which_win(made: Path) -> None:
    options = with_archive({DRIVER_OPTIONS: "-Dmine=1"})[DRIVER_OPTIONS]
    assert options.startswith(f"-Xshare:auto -XX:SharedArchiveFile={made} ")
    assert options.endswith(" -Dmine=1")


@pytest.mark.parametrize(
    "own", ["-Xshare:off", "-XX:SharedArchiveFile=/mine.jsa", "-XX:ArchiveClassesAtExit=/mine.jsa"]
)
def test_choice_of_the_user_is_left_alone(made: Path, own: str) -> None:
    assert with_archive({DRIVER_OPTIONS: own}) == {DRIVER_OPTIONS: own}


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


def test_run_that_fails_leaves_the_former_archive_and_nothing_beside_it(made: Path) -> None:
    stem = archive_stem({}) or ""
    with pytest.raises(RuntimeError), written_aside(made.parent, stem) as unfinished:
        unfinished.write_bytes(b"half")
        raise RuntimeError("killed")
    assert made.read_bytes() == b"classes"
    assert list(made.parent.iterdir()) == [made]


def test_what_a_killed_run_has_left_is_removed_by_a_later_one(made: Path) -> None:
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
