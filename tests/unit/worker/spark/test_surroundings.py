"""What a JVM gets where the user has no name, the locale no UTF-8, or `SPARK_HOME` another Spark."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne import user_directories
from osrdyne.errors import ConfigurationError
from osrdyne_worker.pipelines.sql import app
from osrdyne_worker.spark.java import archive
from osrdyne_worker.spark.java.archive import require_spark_home, spark_home
from osrdyne_worker.spark.java.surroundings import locale_variables, nameless_user, quoted, user_options


@given(st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), min_size=1))
def test_quoted_option_is_one_part_of_the_options(option: str) -> None:
    parts = shlex.split(f"-Da=1 {quoted('-D' + option)} -Db=2", comments=False)
    assert parts == ["-Da=1", f"-D{option}", "-Db=2"]


@pytest.mark.parametrize(
    ("environment", "is_changed"),
    [
        ({"LC_ALL": "C"}, True),
        ({}, True),
        ({"LC_ALL": "POSIX", "LANG": "C.UTF-8"}, True),
        ({"LANG": "C.UTF-8"}, False),
        ({"LC_CTYPE": "en_US.utf8", "LANG": "C"}, False),
    ],
)
def test_locale_without_utf8_is_replaced(environment: dict[str, str], *, is_changed: bool) -> None:
    assert (locale_variables(environment) == {"LC_ALL": "C.UTF-8"}) is is_changed


@pytest.fixture
def nameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory for temporary files of a user without a name; it belongs to the real user."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for name in ("HOME", "HADOOP_USER_NAME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / f"osrdyne-home-{os.geteuid()}"


@pytest.mark.proves("spark/user-id-without-name")
def test_user_without_a_name_gets_a_home_and_a_name(nameless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_spark_home_must_fit_pyspark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, *, fits: bool
) -> None:
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


def test_version_of_pyspark_is_known_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import __version__

    monkeypatch.delenv("SPARK_HOME", raising=False)
    assert archive._pyspark_version() == __version__
    assert require_spark_home() == spark_home()
