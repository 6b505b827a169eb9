"""What goes wrong at the command line is one clear sentence and an exit code, never a traceback. Real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_rabbitmq

PATIENCE = 150.0
OSRDYNE = Path(sys.executable).with_name("osrdyne")


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Without the settings of the user who runs the tests; RabbitMQ where there is none."""
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith("OSRDYNE")}
    own = {"OSRDYNE__BROKER__URI": "amqp://user:hidden@127.0.0.1:1/", "XDG_STATE_HOME": str(tmp_path / "state")}
    return {**inherited, **own, "COLUMNS": "200", **more}


def osrdyne(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [OSRDYNE, *arguments],
        cwd=tmp_path,
        env=environment(tmp_path, **variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def assert_sentence(done: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "hidden" not in done.stderr + done.stdout


@pytest.mark.parametrize("command", ["run", "status"])
def test_unknown_key_in_the_file_names_the_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "osrdyne.yaml").write_text("pool:\n  idd: x\n")
    sentence = "pool.idd (file osrdyne.yaml:2): unknown setting; did you mean pool.id?"
    assert_sentence(osrdyne(tmp_path, command), 2, sentence)


@pytest.mark.nightly
def test_unknown_variable_is_named(tmp_path: Path) -> None:
    done = osrdyne(tmp_path, "run", OSRDYNE__POOL__IDD="x")
    assert_sentence(done, 2, "pool.idd (environment OSRDYNE__POOL__IDD): unknown setting; did you mean pool.id?")


def test_wrong_uri_is_refused_without_being_shown(tmp_path: Path) -> None:
    done = osrdyne(tmp_path, "run", OSRDYNE__BROKER__URI="amqp://user:hidden/1@host")
    assert_sentence(done, 2, "broker.uri (environment OSRDYNE__BROKER__URI): must look like amqp://")


@pytest.mark.nightly
def test_missing_secret_file_is_named(tmp_path: Path) -> None:
    done = osrdyne(tmp_path, "run", "--set", "broker.management_uri_file=nowhere")
    assert_sentence(done, 2, "broker.management_uri_file (flag --set): cannot read nowhere: No such file or directory")


@pytest.mark.nightly
def test_unknown_driver_lists_those_there_are(tmp_path: Path) -> None:
    assert_sentence(osrdyne(tmp_path, "run", "--driver", "nope"), 2, "unknown driver 'nope'; known drivers: ")


@pytest.mark.nightly
def test_application_that_does_not_exist_is_found_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("application = 1\n")
    places = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = osrdyne(tmp_path, "dev", "--app", "mine:app", **places)
    assert_sentence(done, 2, "worker.app: The module 'mine' has no 'app'.")


@pytest.mark.nightly
def test_wrong_certificate_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "osrdyne.yaml").write_text("broker: {uri_file: uri, tls: {ca_file: /nowhere.pem}}")
    (tmp_path / "uri").write_text("amqps://u:hidden@127.0.0.1:1")
    variables = environment(tmp_path)
    del variables["OSRDYNE__BROKER__URI"]
    done = subprocess.run(
        [OSRDYNE, "run", "--set", "api.port=0"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert_sentence(done, 2, "broker.tls: cannot read /nowhere.pem")


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["run", "check-config"])
def test_wrong_configuration_of_the_application_is_found_before_anything_starts(tmp_path: Path, command: str) -> None:
    table = "{view: lineitem, path: /data/lineitem.parquet, cash: true}"
    (tmp_path / "osrdyne.yaml").write_text(
        f"worker:\n  config:\n    password: hidden\n    datasets:\n      - key: k\n        tables: [{table}]\n"
    )
    done = osrdyne(tmp_path, command)
    assert_sentence(done, 2, "worker.config.datasets.0.tables.0.cash: unknown setting (did you mean cache?)")


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["check-config", "doctor"])
@pytest.mark.proves("spark/dataset-format-delta-installed")
def test_delta_table_without_a_jar_for_the_installed_spark_is_named_with_the_remedy(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "osrdyne.yaml").write_text(
        "worker:\n  config:\n    datasets:\n      - {key: k, tables: [{view: t, format: delta, path: /data/t}]}\n"
    )
    done = osrdyne(tmp_path, command)
    assert done.returncode != 0
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    assert "install osrdyne[delta]" in said, said


@pytest.mark.nightly
def test_application_validates_its_configuration_with_its_own_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pydantic import BaseModel\nfrom osrdyne_worker import App\n"
        "class Config(BaseModel):\n    threshold: int\n"
        "app = App(check_config=Config.model_validate)\n"
    )
    given = ["--set", "worker.app=mine:app", "--set", "worker.config.threshold=hidden"]
    done = osrdyne(tmp_path, "check-config", *given)
    assert_sentence(done, 2, "worker.config is invalid: worker.config.threshold: Input should be a valid integer")
    right = osrdyne(tmp_path, "check-config", *given[:3], "worker.config.threshold=3")
    assert (right.returncode, right.stderr) == (0, "")


def test_port_that_is_taken_ends_the_daemon_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = osrdyne(tmp_path, "run", "--driver", "noop", "--log-level", "error", "--set", f"api.port={port}")
    assert_sentence(done, 2, f"Port {port} on 127.0.0.1 is in use by another process")


@pytest.mark.parametrize("command", [["status"], ["groups", "show", "k"]])
def test_no_daemon_is_one_sentence(tmp_path: Path, command: list[str]) -> None:
    done = osrdyne(tmp_path, *command, "--api", "http://127.0.0.1:1")
    assert_sentence(
        done, 1, "No osrdyne daemon answers at http://127.0.0.1:1: start one with `osrdyne run` or `osrdyne dev`"
    )


@pytest.mark.nightly
def test_configuration_file_as_an_argument_is_refused_with_its_option(tmp_path: Path) -> None:
    assert_sentence(
        osrdyne(tmp_path, "check-config", "osrdyne.yaml"), 2, "The configuration file is given with --config"
    )


@pytest.mark.nightly
def test_something_else_on_the_port_is_not_a_daemon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = subprocess.Popen(
            [OSRDYNE, "status", "--api", f"http://127.0.0.1:{port}"],
            cwd=tmp_path,
            env=environment(tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = other.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
            _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr.count("\n")) == (1, 1)
    assert "is not an osrdyne daemon" in stderr


@pytest.mark.nightly
def test_wrong_usage_points_to_the_help(tmp_path: Path) -> None:
    assert_sentence(osrdyne(tmp_path, "run", "--nope"), 2, "No such option: --nope. Try `osrdyne run --help`.")


@pytest.mark.nightly
def test_doctor_without_a_broker_names_the_remedy_and_fails(tmp_path: Path) -> None:
    done = osrdyne(tmp_path, "doctor", "--driver", "noop")
    assert done.returncode == 1
    assert "✘" in done.stdout
    assert "checks failed" in done.stdout
    assert "Traceback" not in done.stderr
    assert "hidden" not in done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_without_a_broker_waits_for_it_and_ends_on_request(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [OSRDYNE, "run", "--driver", "noop", "--set", "api.port=0"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "term ended" in line:
            break
    process.send_signal(number)
    _, rest = process.communicate(timeout=PATIENCE)
    text = "".join([*lines, rest])
    assert process.returncode == 0, text
    assert "Traceback" not in text
    assert "hidden" not in text


def test_interrupted_command_exits_with_130(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        process = subprocess.Popen(
            [OSRDYNE, "status", "--api", f"http://127.0.0.1:{port}"],
            cwd=tmp_path,
            env=environment(tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            connection.recv(1000)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (130, "")


def test_output_into_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [OSRDYNE, "check-config"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=PATIENCE) == 1
