"""Files of `osrdyne dev`: the announcement of a running stack, and sample data."""

import stat
import subprocess
from pathlib import Path

import pytest
from pydantic import SecretStr

from osrdyne.cli.main import execute
from osrdyne.config.loading import load_settings
from osrdyne.config.models import BrokerSettings, Settings
from osrdyne.dev import sample_data
from osrdyne.dev.announcement import announced, announcement_file, find_announcement
from osrdyne.dev.sample_data import generate_tpch
from osrdyne.errors import ConfigurationError

SETTINGS = Settings(broker=BrokerSettings(uri=SecretStr("amqp://me:secret@127.0.0.1:5999/")))
NO_PROCESS = 2**22 + 1
"""Above the largest process id of Linux."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_announcement_is_a_private_configuration_file_while_the_stack_runs():
    with announced(SETTINGS, api_port=4567) as file:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        loaded = load_settings(file=find_announcement(), environment={}).settings
        assert (loaded.broker.uri, loaded.api.port) == (SETTINGS.broker.uri, 4567)
        before = file.read_text()
        assert execute(["dev", "--set", "api.port=0"], debug=False) == 2  # a second stack
        assert file.read_text() == before
    assert not file.exists()


def test_doctor_beside_a_stack_checks_its_broker(monkeypatch):
    examined = list[Settings]()

    async def examine(settings):
        examined.append(settings)
        return []

    monkeypatch.setattr("osrdyne.cli.daemon.doctor._examine", examine)
    broker = SETTINGS.broker.model_copy(update={"scoped_credentials": True})
    with announced(SETTINGS.model_copy(update={"broker": broker}), api_port=4567):
        assert execute(["doctor"], debug=False) == 0
    assert [(one.broker.uri, one.broker.scoped_credentials) for one in examined] == [(SETTINGS.broker.uri, True)]


def test_announcement_of_an_ended_process_is_ignored():
    file = announcement_file()
    file.parent.mkdir(parents=True)
    file.write_text(f"# process {NO_PROCESS}\npool: {{id: x}}\n")
    assert find_announcement() is None


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "XDG_STATE_HOME"])
def test_unwritable_directory_is_named_with_its_variable(tmp_path, monkeypatch, variable):
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    with (
        pytest.raises(ConfigurationError, match=f"{tmp_path}/file/osrdyne/dev.yaml.*{variable}"),
        announced(SETTINGS, api_port=4567),
    ):
        pass


def test_generator_that_fails_is_an_error_and_a_directory_that_cannot_be_written_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_data, "_generator", lambda: "tpchgen-cli")
    failed = subprocess.CalledProcessError(1, "tpchgen-cli", stderr="no space left")
    for error in (failed, subprocess.TimeoutExpired("tpchgen-cli", 600.0)):

        def run(command: list[str], error: Exception = error, **_: object) -> None:
            Path(command[-1]).mkdir()
            raise error

        monkeypatch.setattr(subprocess, "run", run)
        with pytest.raises(ConfigurationError):
            generate_tpch(tmp_path, "100")
        assert list((tmp_path / "tpch").iterdir()) == []
    (tmp_path / "file" / "tpch").parent.mkdir()
    (tmp_path / "file" / "tpch").touch()
    with pytest.raises(ConfigurationError, match=r"/tpch.*XDG_CACHE_HOME"):
        generate_tpch(tmp_path / "file", "0.001")
