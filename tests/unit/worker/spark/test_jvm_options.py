"""The options of a JVM: its archive of classes, its heap, the priority of its second compiler, and what it gets where
the user has no name, the locale no UTF-8, or `SPARK_HOME` another Spark."""

import os
import shlex
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne import user_directories
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.spark_master import parse_spark_master
from osrdyne_worker.pipelines.sql import app
from osrdyne_worker.spark.java import archive, compiler
from osrdyne_worker.spark.java.archive import (
    DRIVER_OPTIONS,
    archive_stem,
    find_archive,
    require_spark_home,
    spark_home,
    with_archive,
    written_aside,
)
from osrdyne_worker.spark.java.surroundings import locale_variables, nameless_user, quoted, user_options
from osrdyne_worker.spark.session import session_conf


@pytest.fixture
def java(tmp_path, monkeypatch):
    """The home of a Java of release 17; archives are below the test's directory."""
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    (home / "release").write_text('JAVA_VERSION="17.0.15"')
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(archive, "system_directory", lambda: tmp_path / "system")
    return home


def write(directory: Path, content: bytes) -> None:
    with written_aside(directory, archive_stem({}) or "") as unfinished:
        unfinished.write_bytes(content)


@pytest.fixture
def made(java):
    write(archive.user_directory(), b"classes")
    (path,) = archive.user_directory().iterdir()
    return path


def test_archive_comes_before_the_options_of_the_user_which_win(made, tmp_path, monkeypatch):
    options = with_archive({DRIVER_OPTIONS: "-Dmine=1"})[DRIVER_OPTIONS]
    assert options.startswith(f"-Xshare:auto -XX:SharedArchiveFile={made} ")
    assert options.endswith(" -Dmine=1")
    for own in ("-Xshare:off", "-XX:SharedArchiveFile=/mine.jsa", "-XX:ArchiveClassesAtExit=/mine.jsa"):
        assert with_archive({DRIVER_OPTIONS: own}) == {DRIVER_OPTIONS: own}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a home"))
    write(archive.user_directory(), b"classes")
    assert f"-XX:SharedArchiveFile={find_archive({})}" in shlex.split(with_archive({})[DRIVER_OPTIONS])
    written = archive.recording({}, tmp_path / "a home" / "new.jsa")[DRIVER_OPTIONS]
    assert f"-XX:ArchiveClassesAtExit={tmp_path}/a home/new.jsa" in shlex.split(written)


def test_archive_that_others_may_write_or_that_was_cut_off_is_not_used(made):
    assert find_archive({}) == made
    made.chmod(0o666)
    assert find_archive({}) is None
    assert with_archive({"a": "b"}) == {"a": "b"}
    made.chmod(0o600)
    made.write_bytes(b"class")
    assert find_archive({}) is None


def test_new_archive_takes_the_place_of_the_former_one_and_that_of_the_installation_comes_first(made):
    write(made.parent, b"more classes")
    assert list(made.parent.iterdir()) == [find_archive({})]
    write(archive.system_directory(), b"classes")
    assert find_archive({}) == archive.system_directory() / made.name


def test_run_that_fails_leaves_the_former_archive_and_what_a_killed_one_left_is_removed(made):
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
def test_heap_starts_small_and_grows_when_it_must(memory):
    assert options(memory=memory) == OURS
    assert options("-Da=b", memory=memory) == f"{OURS} -Da=b"
    assert options("-Da=b", memory=memory, of_application="-Da=") == f"{OURS} -Da=b -Da="


def test_heap_that_is_too_small_driver_of_a_cluster_and_options_of_the_user_are_left_alone():
    for memory in ("256m", "1000", "500000k", "nonsense"):
        assert options(memory=memory) is options(master="spark://host:7077") is None
        assert options("-Da=b", memory=memory) == "-Da=b"
    for own in ("-XX:+UseZGC", "-Xms1g", "-XX:GCTimeRatio=12", "-XX:InitialHeapSize=1g"):
        assert options(own) == own


def test_priority_of_the_second_compiler_alone_is_lowered(tmp_path):
    named, ended = threading.Barrier(2), threading.Event()

    def run():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("C2 CompilerThre", encoding="utf-8")
        named.wait(60)
        ended.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        named.wait(60)
        before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert compiler.lower_priority(os.getpid()) == 1
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == min(19, before + compiler.NICENESS)
    finally:
        ended.set()
        thread.join()
    assert compiler.lower_priority(1, proc=tmp_path) == 0, "a process that has ended is no error"


@given(st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), min_size=1))
def test_quoted_option_is_one_part_of_the_options(option):
    parts = shlex.split(f"-Da=1 {quoted('-D' + option)} -Db=2", comments=False)
    assert parts == ["-Da=1", f"-D{option}", "-Db=2"]


def test_locale_without_utf8_is_replaced():
    for environment in ({"LC_ALL": "C"}, {}, {"LC_ALL": "POSIX", "LANG": "C.UTF-8"}):
        assert locale_variables(environment) == {"LC_ALL": "C.UTF-8"}
    for environment in ({"LANG": "C.UTF-8"}, {"LC_CTYPE": "en_US.utf8", "LANG": "C"}):
        assert locale_variables(environment) == {}


@pytest.fixture
def nameless(tmp_path, monkeypatch):
    """Returns the directory for temporary files of a user without a name; it belongs to the real user."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for name in ("HOME", "HADOOP_USER_NAME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / f"osrdyne-home-{os.geteuid()}"


@pytest.mark.proves("spark/user-id-without-name")
def test_user_without_a_name_gets_a_home_and_a_name(nameless, monkeypatch):
    for _ in range(2):
        assert user_options() == [f"-Duser.home={nameless}", f"-Duser.name={os.geteuid()}"]
        assert stat.S_IMODE(nameless.stat().st_mode) == 0o700
    assert user_directories.cache_directory() == nameless / ".cache" / "osrdyne"
    assert user_directories.state_directory() == nameless / ".local" / "state" / "osrdyne"
    nameless.chmod(0o777)  # others could have made it
    with pytest.raises(ConfigurationError, match="HOME"):
        user_options()
    nameless.rmdir()
    nameless.touch()
    with pytest.raises(ConfigurationError, match="HOME"):
        user_options()
    home = nameless.with_name("my home")
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    assert user_options() == [f'"-Duser.home={home}"', "-Duser.name=me"]
    monkeypatch.undo()
    assert (nameless_user(), user_options()) == (None, []), "a user with a name is left alone"


@pytest.mark.parametrize(
    ("version", "fits"), [("3.5.7", False), (None, False), ("4.9.1", True), ("4.9.0-SNAPSHOT", True), ("4.8.0", False)]
)
@pytest.mark.proves("spark/spark-home-other-version")
def test_spark_home_must_fit_pyspark(tmp_path, monkeypatch, version, *, fits):
    if version is not None:
        for file in (tmp_path / "bin" / "spark-submit", tmp_path / "jars" / f"spark-core_2.13-{version}.jar"):
            file.parent.mkdir()
            file.touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setattr(archive, "_pyspark_version", lambda: "4.9.0")
    app.sessions.check_settings({"spark": {"master": "sc://far"}})  # type: ignore[attr-defined]
    if fits:
        assert require_spark_home() == tmp_path
        return
    with pytest.raises(ConfigurationError, match=f"SPARK_HOME is {tmp_path}.*unset SPARK_HOME") as raised:
        app.sessions.check_settings({})  # type: ignore[attr-defined]
    assert (version or "spark-submit") in raised.value.message
    assert "4.9.0" in raised.value.message


def test_version_of_pyspark_is_known_without_importing_it(monkeypatch):
    from pyspark import __version__

    monkeypatch.delenv("SPARK_HOME", raising=False)
    assert archive._pyspark_version() == __version__
    assert require_spark_home() == spark_home()
