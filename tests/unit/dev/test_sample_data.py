"""The generator of sample data fails: the user gets one sentence, and no unfinished tables are left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from osrdyne.dev import sample_data
from osrdyne.dev.sample_data import generate_tpch
from osrdyne.errors import ConfigurationError


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, "tpchgen-cli", stderr="no space left"),
        subprocess.TimeoutExpired("tpchgen-cli", 600.0),
    ],
    ids=["error", "time-out"],
)
def test_generator_that_fails_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(command: list[str], **_: object) -> None:
        Path(command[-1]).mkdir()
        raise error

    monkeypatch.setattr(sample_data, "_generator", lambda: "tpchgen-cli")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigurationError):
        generate_tpch(tmp_path, "100")
    assert list((tmp_path / "tpch").iterdir()) == []


def test_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "tpch").touch()
    with pytest.raises(ConfigurationError, match=r"/tpch.*XDG_CACHE_HOME"):
        generate_tpch(tmp_path, "0.001")
