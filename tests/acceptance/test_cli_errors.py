"""Commands as processes: a mistake is one line and an exit code, a signal or a closed pipe ends one in order."""

import signal
import subprocess
from collections.abc import Callable

import pytest
from daemon_process import OSRDYNE, PATIENCE, own_environment

pytestmark = pytest.mark.one_rabbitmq

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path):
    """Starts a command where there is no RabbitMQ; `variables` are those of its environment."""

    def run(*arguments, **variables):
        own = {"OSRDYNE__BROKER__URI": "amqp://user:hidden@127.0.0.1:1/", "XDG_STATE_HOME": str(tmp_path / "state")}
        environment, pipe = own_environment(**{**own, **variables}), subprocess.PIPE
        return subprocess.Popen(
            [OSRDYNE, *arguments], cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True
        )

    return run


def assert_one_line(process: subprocess.Popen[str], code: int, *names: str) -> None:
    """It ends with this code; its one line of errors has these names, and no secret."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, errors
    assert all(name in errors for name in names), errors
    assert errors.count("\n") == 1, errors
    assert "hidden" not in errors + output


def test_mistake_in_the_file_names_its_line(start, tmp_path):
    (tmp_path / "osrdyne.yaml").write_text("pool:\n  idd: x\n")
    assert_one_line(start("run"), 2, "pool.idd", "osrdyne.yaml:2", "pool.id?")


def test_wrong_uri_is_refused_without_being_shown(start):
    run = start("run", OSRDYNE__BROKER__URI="amqp://user:hidden/1@host")
    assert_one_line(run, 2, "broker.uri", "OSRDYNE__BROKER__URI")


def worker(**config: object) -> list[str]:
    return ["check-config", *(f"--set=worker.{name}={value}" for name, value in config.items())]


DELTA = '{"datasets": [{"key": "k", "tables": [{"view": "t", "format": "delta", "path": "/data/t"}]}]}'
TYPO = '{"password": "hidden", "datasets": [{"key": "k", "tables": [{"view": "t", "path": "/t", "cash": true}]}]}'
OWN_MODEL = """
from osrdyne_worker import App
from pydantic import create_model
app = App(check_config=create_model("Config", threshold=(int, ...)).model_validate)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param(["run", "--set=broker.management_uri_file=nowhere"], ["management_uri_file"], id="secret"),
        pytest.param(["run", "--set=broker.tls.ca_file=/no.pem"], ["broker.tls", "/no.pem"], id="certificate"),
        pytest.param(["run", "--driver", "nope"], ["'nope'"], id="driver"),
        pytest.param(["dev", "--app", "mine:other"], ["worker.app", "'other'"], id="application"),
        pytest.param(["check-config", "osrdyne.yaml"], ["--config"], id="file as an argument"),
        pytest.param(worker(config=TYPO), ["worker.config.datasets.0.tables.0.cash", "cache?"], id="typo"),
        pytest.param(worker(config=DELTA), ["osrdyne[delta]"], id="missing jar"),
        pytest.param(worker(app="mine:app", config='{"threshold": "hidden"}'), ["worker.config.threshold"], id="model"),
        pytest.param(worker(app="mine:app", placement="pooled"), ["worker.app"], id="not poolable"),
        pytest.param(worker(environment="reference", placement="pooled"), ["worker.placement"], id="reference"),
        pytest.param([*worker(placement="pooled"), "--driver=noop"], ["worker.placement"], id="no processes"),
    ],
)
def test_mistake_is_found_before_anything_starts(start, tmp_path, arguments, names):
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    variables = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"), str(tmp_path))
    if "ca_file" in arguments[-1]:
        variables["OSRDYNE__BROKER__URI"] = "amqps://user:hidden@127.0.0.1:1"
    assert_one_line(start(*arguments, **variables), 2, *names)


def test_missing_daemon_is_one_line(start):
    assert_one_line(start("groups", "show", "k", "--api", "http://127.0.0.1:1"), 1, "http://127.0.0.1:1", "osrdyne run")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_without_a_broker_waits_for_it_and_ends_on_request(start, number):
    process = start("run", "--driver", "noop", "--set", "api.port=0")
    assert process.stderr is not None
    text = ""
    for line in process.stderr:
        text += line
        if "term ended" in line:
            break
    process.send_signal(number)
    text += process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, text
    assert "Traceback" not in text
    assert "hidden" not in text


def test_output_into_a_closed_pipe_is_not_an_error(start):
    process = start("check-config")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=PATIENCE) == 1
