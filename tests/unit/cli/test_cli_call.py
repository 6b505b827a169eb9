"""`osrdyne call` without a broker: arguments, printing, exit codes."""

import json

import pytest
import typer

from osrdyne.cli.requests import call as module
from osrdyne.cli.requests.call_output import CallOutput, error_lines, print_answer
from osrdyne.cli.telemetry.replay import range_end
from osrdyne.client import (
    ClientClosedError,
    ConnectionLostError,
    PoolNotFoundError,
    Reply,
    RequestExpiredError,
    RequestFailedError,
    RequestQueueFullError,
    RequestTimeoutError,
)
from osrdyne.client.errors import error_from_reply
from osrdyne.config.models import Settings
from osrdyne.errors import BrokerUnavailableError, ConfigurationError

ROWS = {
    "columns": [{"name": "name", "type": "string"}, {"name": "n", "type": "bigint"}],
    "rows": [["a[red]", 1], ["\x1b[2J", None]],
    "truncated": True,
}


def reply(value: object) -> Reply:
    return Reply(body=json.dumps(value).encode(), content_type="application/json")


def test_each_end_has_its_exit_code():
    ends = {
        1: (RequestFailedError("m"), RequestQueueFullError("m"), ClientClosedError("m")),
        2: (PoolNotFoundError("m"),),
        3: (RequestTimeoutError("m", sent=True), RequestExpiredError("m")),
        4: (ConnectionLostError("m"), BrokerUnavailableError("m")),
        130: (KeyboardInterrupt(),),
    }
    for code, errors in ends.items():
        assert [module.exit_code(error) for error in errors] == [code] * len(errors)


def test_rows_become_a_table_that_cannot_control_the_terminal(capsys):
    print_answer(reply(ROWS), CallOutput.TABLE)
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines() if line.strip() and "─" not in line]
    assert lines == [["name", "n"], ["a[red]", "1"], ["\\x1b[2J", "NULL"]]
    assert "limit of rows" in printed.err
    print_answer(reply({"columns": [{"name": "plan"}], "rows": [["== Plan ==\n\n+- \x1bScan\n"]]}), CallOutput.TABLE)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[lines.index("== Plan ==") :][:3] == ["== Plan ==", "", "+- \\x1bScan"]
    answer = Reply("start-failed", detail="It died.\nTraceback\nValueError: \x1b[1mno", retry_after=30.0)
    error = error_from_reply(answer, key="k", path="/p")
    assert error is not None
    assert "  ValueError: \\x1b[1mno" in error_lines(error)


@pytest.mark.parametrize(
    "value", [{"a": "é"}, [1], {"columns": [{"name": "a"}], "rows": [[1, 2]]}, {"columns": [1], "rows": []}], ids=str
)
def test_other_answers_become_indented_json(value, capsys):
    print_answer(reply(value), CallOutput.TABLE)
    assert capsys.readouterr().out == json.dumps(value, indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("output", [CallOutput.TABLE, CallOutput.JSON])
@pytest.mark.parametrize(("body", "printed"), [(b"", b""), (b"plain", b"plain\n"), (b"\xff\n", b"\xff\n")], ids=str)
def test_body_that_is_not_json_is_printed_as_it_is(output, body, printed, capfdbinary):
    print_answer(Reply(body=body), output)
    assert capfdbinary.readouterr().out == printed


def test_answer_that_is_not_arrow_and_a_password_in_a_flag_are_refused(capsys):
    with pytest.raises(typer.Exit) as ended:
        print_answer(reply({}), CallOutput.ARROW)
    assert (ended.value.exit_code, "Arrow" in capsys.readouterr().err) == (1, True)
    with pytest.raises(ConfigurationError, match="OSRDYNE__BROKER__URI") as raised:
        module.broker_uri("amqp://me:s3cret@host/", Settings())
    assert "s3cret" not in str(raised.value)
    assert module.broker_uri("amqp://host/", Settings()) == "amqp://host/"


def test_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    for name in (module.TOKEN_VARIABLE, f"{module.TOKEN_VARIABLE}_FILE", "OSRDYNE_API_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OSRDYNE_API_TOKEN", "of-the-api")
    assert module.token_for(None) is None
    file = tmp_path / "token"
    file.write_text("of-a-file\n")
    assert module.token_for(str(file)) == "of-a-file"
    monkeypatch.setenv(f"{module.TOKEN_VARIABLE}_FILE", str(file))
    assert module.token_for(None) == "of-a-file"
    monkeypatch.setenv(module.TOKEN_VARIABLE, "of-the-environment")
    with pytest.raises(ConfigurationError, match=module.TOKEN_VARIABLE):
        module.token_for(None)
    monkeypatch.delenv(f"{module.TOKEN_VARIABLE}_FILE")
    assert module.token_for(None) == "of-the-environment"
    with pytest.raises(ConfigurationError, match="--token-file"):
        module.token_for(str(tmp_path / "nothing"))


@pytest.mark.parametrize(("text", "expected"), [(None, None), ("10", 10), ("2026-11-22T10:00:00Z",) * 2])
def test_range_of_the_log_takes_offsets_and_times(text, expected):
    assert range_end(text, "--from") == expected
    with pytest.raises(typer.BadParameter, match="'soon'") as raised:
        range_end("soon", "--to")
    assert raised.value.param_hint == "--to"
