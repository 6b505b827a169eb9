"""Commands that need no daemon, and how every failure becomes one sentence and an exit code."""

from __future__ import annotations

import errno
import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from osrdyne import __version__
from osrdyne.cli import entry
from osrdyne.cli.main import execute, full_command_line
from osrdyne.cli.manifests.commands import own_name
from osrdyne.errors import BrokerUnavailableError, OsrdyneError, PortTakenError
from osrdyne.protocol.environment import WorkerEnvironment

app = full_command_line()


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Commands set up logging for a whole process."""
    yield
    structlog.reset_defaults()
    logging.basicConfig(level=logging.WARNING, force=True)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OSRDYNE__DRIVER", "noop")


def failing_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("osrdyne.cli.daemon.status.remote", fail)


@pytest.mark.parametrize("arguments", ["version", "--version", "--debug --version"])
def test_version_is_printed(arguments: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


def test_check_config_shows_values_with_origin_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "osrdyne.yaml").write_text("broker:\n  uri: amqp://u:hidden@h\n")
    result = CliRunner().invoke(app, ["check-config", "--pool", "mine"])
    assert '  uri: "amqp://u:***@h"  # file osrdyne.yaml:2\n' in result.stdout
    assert '  id: "mine"  # flag --pool\n' in result.stdout
    assert '  name: "noop"  # environment OSRDYNE__DRIVER\n' in result.stdout
    assert "hidden" not in result.output


def test_check_config_prints_a_file_that_loads_again(tmp_path: Path) -> None:
    written = CliRunner().invoke(app, ["check-config", "--set", 'worker.config.odd name={"é: #": [true, null]}']).stdout
    (tmp_path / "again.yaml").write_text(written)
    again = CliRunner().invoke(app, ["check-config", "-c", "again.yaml", "--json"])
    values = {tuple(one["path"]): one["value"] for one in json.loads(again.stdout)}
    assert values["worker", "config", "odd name", "é: #"] == [True, None]


def test_check_config_asks_the_driver_about_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["check-config", "--set", "driver.options.nope=1"], debug=False) == 2
    assert "driver.options.nope: there is no such option" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["infra=42,timetable=24", "it's $(x) `y`", "a\nb", "é 漢 🚄", "", "-x", "\0"])
def test_environment_of_a_worker_survives_the_shell(key: str) -> None:
    result = CliRunner().invoke(app, ["groups", "env", "--pool", "mine", "--", key])
    words = shlex.split(result.stdout)
    variables = dict(word.split("=", 1) for word in words if word != "export")
    environment = WorkerEnvironment.from_variables(variables)
    assert (environment.key, environment.pool) == (key, "mine")
    assert environment.amqp_uri == "amqp://guest:guest@localhost:5672/"


def test_environment_of_a_worker_as_json() -> None:
    result = CliRunner().invoke(app, ["groups", "env", "a/b", "--json"])
    assert json.loads(result.stdout)["WORKER_REQUESTS_QUEUE"] == "osrdyne-req-a+2Fb"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'. Try `osrdyne --help`.\n"),
        (["route", "show"], "No such command 'route'. Did you mean 'routes'? Try `osrdyne --help`.\n"),
        (["groups", "show"], "Missing argument 'KEY'. Try `osrdyne groups show --help`.\n"),
        (["call", "k", "/p", "-o", "xml"], "Invalid value for '--output' / '-o': 'xml' is not one of 'table', 'json'"),
        (["run", "--set", "x"], "Wrong configuration: flag --set: 'x' is not path=value, such as pool.id=example"),
        *(
            (
                ["status", "--api", address],
                "--api must be an address such as http://127.0.0.1:4242, or unix:/path/of/socket.\n",
            )
            for address in ("nope", "http://[::1", "https://[::1")
        ),
        (
            ["token", "create", "a", "--role", "admin", "--file", "."],
            ".: this is a directory; name the file of API tokens.\n",
        ),
        (["queues", "create", "k", "--for", "99999999999d"], "--for: too long; "),
        (["last", "\udcff"], "The routing key is not valid UTF-8; use a UTF-8 key of at most 255 bytes.\n"),
        (["audit", "--who", "\udcff"], "The argument '\\udcff' is not valid UTF-8.\n"),
        (["groups", "env", "x" * 256], "The key has 256 bytes; at most 255 are allowed.\n"),
        (["groups", "env", "\udcff"], "The routing key is not valid UTF-8; use a UTF-8 key of at most 255 bytes.\n"),
        (["check-config", "-c", "x.yaml"], "Cannot read the configuration file x.yaml: No such file or directory.\n"),
        (["run", "--pool", "NO"], "Wrong configuration: pool.id (flag --pool): a pool id has 1 to 32 characters"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert execute(arguments, debug=False) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OsrdyneError("It failed at amqp://u:hidden@h."), 1, "It failed at amqp://u:***@h.\n"),
        (BrokerUnavailableError("Connection refused."), 1, "Connection refused.\n"),
        (PortTakenError("Port 1 is taken."), 2, "Port 1 is taken.\n"),
        (ExceptionGroup("", [ExceptionGroup("", [PortTakenError("Port 1 is taken.")])]), 2, "Port 1 is taken.\n"),
        (ZeroDivisionError("hidden"), 1, "Unexpected ZeroDivisionError; run `osrdyne --debug …` for the traceback.\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failure_is_one_sentence_and_an_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    failing_with(monkeypatch, error)
    assert execute(["status"], debug=False) == code
    assert capsys.readouterr().err == message


def test_debug_shows_what_was_unexpected(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        execute(["--debug", "status"], debug=True)


def test_command_group_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["groups"], debug=False) == 2
    captured = capsys.readouterr()
    assert "Usage: osrdyne groups" in captured.out + captured.err


def test_completion_is_offered_for_every_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_OSRDYNE_COMPLETE", "source_bash")
    result = CliRunner().invoke(app, [], prog_name="osrdyne")
    assert "complete -o default -F" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (["level = '3'", "-H", "level=3"], "true\n"),
        (["$body.a < 1", "-d", '{"a": 1}'], "false\n"),
        (["{$key} = 'a'", "-S", "key=b=c"], "false\n"),
        (["level"], "undefined\n"),
    ],
)
def test_routes_eval_prints_the_result(arguments: list[str], result: str) -> None:
    assert CliRunner().invoke(app, ["routes", "eval", *arguments]).stdout == result


def test_routes_eval_of_a_batch_answers_each_line(tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text('{"condition": "true"}\n\n{"condition": "1 @"}\nnonsense\n')
    result = CliRunner().invoke(app, ["routes", "eval", "--batch", str(tmp_path / "cases.jsonl")])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[:2] == [{"result": True}, {"error": "invalid symbol '@'", "column": 3}]
    assert len(lines) == 3


def test_routes_eval_of_a_batch_reads_standard_input() -> None:
    assert (
        CliRunner().invoke(app, ["routes", "eval", "--batch"], input='{"condition": ""}').stdout
        == '{"result": "undefined"}\n'
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1 ="], "column 4: unexpected end\n"),
        ([], "Invalid value for CONDITION: name a condition"),
        (["--batch", "nowhere"], "Cannot read nowhere: No such file or directory.\n"),
        (["--batch", "-H", "a=b"], "Invalid value for --batch: in a batch, each line has its own headers"),
        (["true", "-S", "a"], "Invalid value for --system: 'a' is not in the form name=value"),
    ],
)
def test_routes_eval_shows_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert execute(["routes", "eval", *arguments], debug=False) == 2
    assert capsys.readouterr().err.startswith(message)


MANIFEST = '{"routes": {"low": "FROM /* INTO $upstream", "high": {"route": "FROM /* INTO $upstream", "priority": 2}}}'


def test_routes_check_shows_the_most_urgent_first() -> None:
    shown = CliRunner().invoke(app, ["routes", "check", "-"], input=MANIFEST).stdout
    assert shown.index("high") < shown.index("low")


def test_routes_check_tells_every_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("m.json").write_text('{"routes": {"a": "FROM x INTO $up"}}')
    assert execute(["routes", "check", "m.json"], debug=False) == 2
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "m.json, routes.a.route, column 6",
        "m.json, routes.a.route, column 13",
    ]


def test_explain_shows_which_route_decides() -> None:
    Path("m.json").write_text(MANIFEST)
    arguments = [
        "explain",
        "k",
        "/p",
        "--routes",
        "m.json",
        "-H",
        "a=b",
        "-d",
        "{}",
        "--app-id",
        "x",
        "--timeout",
        "5s",
    ]
    result = CliRunner().invoke(app, arguments)
    assert "high: it matches and decides." in result.stdout
    explanation = json.loads(CliRunner().invoke(app, [*arguments, "-o", "json"]).stdout)
    assert explanation["deliveries"][0]["limited_by"] == "caller"
    assert explanation["passages"] == explanation["deliveries"], "the former name, for one release"


@pytest.mark.parametrize("stored", [False, True])
def test_explain_of_a_routes_file_names_the_profile(monkeypatch: pytest.MonkeyPatch, *, stored: bool) -> None:
    """The stored profiles if the daemon answers, otherwise those of the configuration."""
    Path("m.json").write_text(MANIFEST)
    Path("c.yaml").write_text("pool: {id: p}\nworker: {profiles: [{match: 'k', memory: 2GiB}]}\n")
    if stored:
        current = CURRENT | {"manifest": {"profiles": [{"match": "k", "concurrency": 3}]}}
        daemon = Daemon(current, only="/v1/profiles")
        monkeypatch.setattr("osrdyne.cli.requests.explain.remote", lambda *_: daemon)
    shown = CliRunner().invoke(app, ["explain", "k", "/p", "--routes", "m.json", "--config", "c.yaml"])
    assert f"The profile 'k' sets {'concurrency' if stored else 'memory'}." in shown.stdout, shown.stderr


def test_help_of_profiles_speaks_of_documents() -> None:
    pages = [CliRunner().invoke(app, ["profiles", *command, "--help"]).stdout for command in ([], ["check"], ["apply"])]
    assert ["document" in page and "anifest" not in page for page in pages] == [True] * 3


RULES = (
    '{"k.*": {"description": "all", "postfixFromStatic": ["A", "B"]}, "ka": {"postfixFromRequest": {"header": "h"}}}'
)


def test_splitter_check_shows_rules_and_warns_of_overlaps() -> None:
    result = CliRunner().invoke(app, ["splitter", "check", "-"], input=RULES)
    assert "in turn: A, B" in result.stdout
    assert "warning: ka: it overlaps with 'k.*'" in result.output


def test_splitter_check_tells_every_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.json").write_text('{"a(": {}, "b": {"postfixFromRequest": {"url": "x[y"}}}')
    assert execute(["splitter", "check", "s.json"], debug=False) == 2
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "s.json, a(, column 1",
        "s.json, a(",
        "s.json, b.postfixFromRequest.url, column 2",
    ]


def test_explain_reports_that_a_key_is_empty() -> None:
    result = CliRunner().invoke(app, ["explain", "", "/p", "--routes", "-"], input=MANIFEST)
    assert result.stdout.startswith("key       The key is empty. That is a key like any other")
    assert "continuing without the active splitter, policies, profiles: " in result.stderr


def test_explain_shows_which_rule_splits() -> None:
    Path("s.json").write_text(RULES)
    shown = CliRunner().invoke(app, ["explain", "kx", "/p", "--splitter", "s.json"]).stdout
    assert "By the rule 'k.*' the key 'kx' becomes 'kx-A', this time." in shown
    assert "To the group 'kx-A' with the path '/p'." in shown


def test_splitter_apply_sends_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = routes_of(monkeypatch)
    CliRunner().invoke(app, ["splitter", "apply", "-", "--author", "you"], input=RULES)
    assert daemon.asked == [("/v1/splitter", json.loads(RULES), {"author": "you", "if_match": None})]


PROFILES = """
profiles:
- {match: "tpch/{x}", memory: 2GiB, stop_delay: 20s, spark_conf: {spark.a: 1}}
- {match: b, cores: 2}
"""


def test_profiles_check_shows_settings_and_what_the_configuration_does_not_allow() -> None:
    result = CliRunner().invoke(app, ["profiles", "check", "-"], input=PROFILES)
    assert "memory 2048MiB" in result.stdout
    assert "stop_delay 20s" in result.stdout
    assert "warning: profiles.1.cores: only workers on a cluster have cores" in result.stderr


def test_profiles_apply_sends_the_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = routes_of(monkeypatch)
    CliRunner().invoke(app, ["profiles", "apply", "-", "--author", "you"], input='{"profiles": [{"match": "a"}]}')
    assert daemon.asked == [("/v1/profiles", {"profiles": [{"match": "a"}]}, {"author": "you", "if_match": None})]


def test_profiles_check_tells_every_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.json").write_text('{"profiles": [{"match": "{"}, {"match": "a", "memory": 1}]}')
    assert execute(["profiles", "check", "p.json"], debug=False) == 2
    assert [line.split(": ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "p.json, profiles.0.match",
        "p.json, profiles.1.memory",
    ]


class Daemon:
    """A daemon's answers about routes, and what was asked of it."""

    answered_by = "http://leader"

    def __init__(self, current: object, *, only: str = "") -> None:
        """`only`: the path that has this document; empty: all of them."""
        self.current = current
        self._only = only
        self.asked: list[tuple[str, object, object]] = []

    def get(self, path: str, *, manifests: bool = True) -> object:
        if self._only not in path:
            return {"current": None}
        versions = [] if self.current is None else [self.current]
        return {"versions": versions} if path.endswith("history") else {"current": self.current}

    def send(self, method: str, path: str, document: object, **parameters: object) -> object:
        self.asked.append((path, document, parameters))
        changed = {"added_priorities": [1], "removed_priorities": [3], "pending": {"3": 40}}
        return {"pool": "p", "version": 2, "warnings": ["odd"], **changed}

    def post(self, path: str, **parameters: object) -> object:
        return self.send("POST", path, None, **parameters)


CURRENT = {"version": 1, "author": "me", "at": 0.0, "size": 1, "manifest": {"routes": {"r": "FROM /* INTO $upstream"}}}


def routes_of(monkeypatch: pytest.MonkeyPatch, current: object = CURRENT) -> Daemon:
    daemon = Daemon(current)
    monkeypatch.setattr("osrdyne.cli.manifests.commands.remote", lambda *_: daemon)
    return daemon


@pytest.mark.parametrize("command", [["routes", "apply"], ["splitter", "apply"], ["profiles", "apply"]])
def test_empty_text_is_not_a_manifest(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("\n")
    assert execute([*command, str(tmp_path / "empty")], debug=False) == 2
    noun = "document" if command[0] == "profiles" else "manifest"
    assert f"is empty: write an empty {noun} as {{}}." in capsys.readouterr().err


def test_routes_apply_sends_the_manifest_with_its_author(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = routes_of(monkeypatch)
    result = CliRunner().invoke(app, ["routes", "apply", "-", "--author", "you"], input=MANIFEST)
    assert daemon.asked == [("/v1/routes", json.loads(MANIFEST), {"author": "you", "if_match": None})]
    assert "Version 2 is active in the pool p, daemon at http://leader.\n" in result.output
    assert "New priorities, each group has a queue for each: 1.\n" in result.output
    assert "Priorities that no route has any more: 3.\n" in result.output
    assert "Requests that still wait with priority 3, and are served: 40." in result.output


def test_change_names_the_version_that_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = routes_of(monkeypatch)
    for arguments in (["apply", "-"], ["rollback", "1"], ["clear"]):
        CliRunner().invoke(app, ["routes", *arguments, "--expect-version", "4"], input=MANIFEST)
    assert [given["if_match"] for _, _, given in daemon.asked] == [4, 4, 4]  # type: ignore[index]


def test_author_of_a_user_without_a_name_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", fail)
    monkeypatch.setattr("os.getuid", lambda: 4242)
    assert own_name().startswith("uid-4242@")


def test_explain_uses_the_active_manifest_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("m.json").write_text(MANIFEST)
    monkeypatch.setattr(
        "osrdyne.cli.requests.explain.remote", lambda *_: Daemon(CURRENT | {"manifest": json.loads(RULES)})
    )
    shown = CliRunner().invoke(app, ["explain", "kx", "/p", "--routes", "m.json"]).stdout
    assert "By the rule 'k.*' the key 'kx' becomes 'kx-A', this time." in shown
    assert "high: it matches and decides." in shown


def test_error_in_a_file_names_the_file_then_line_then_column(capsys: pytest.CaptureFixture[str]) -> None:
    Path("m.json").write_text('{"routes": {\n  "a": ]\n}}')
    assert execute(["routes", "check", "m.json"], debug=False) == 2
    assert capsys.readouterr().err.startswith("m.json, line 2, column 8: this is not JSON")


def test_routes_apply_sends_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = routes_of(monkeypatch)
    assert CliRunner().invoke(app, ["routes", "apply", "-"], input='{"routes": 3}').exit_code != 0
    assert daemon.asked == []


def test_routes_show_prints_an_unchanged_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    routes_of(monkeypatch)
    assert "version 1, by me" in CliRunner().invoke(app, ["routes", "show"]).stdout
    shown = CliRunner().invoke(app, ["routes", "show", "-o", "json"]).stdout
    assert CliRunner().invoke(app, ["routes", "diff", "-"], input=shown).stdout == "No difference.\n"


def test_routes_diff_shows_lines_and_reports_it_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    routes_of(monkeypatch)
    result = CliRunner().invoke(app, ["routes", "diff", "-"], input=MANIFEST)
    assert (result.exit_code, '-    "r": "FROM /* INTO $upstream"' in result.stdout) == (1, True)


@pytest.mark.parametrize("arguments", [["show"], ["history"]])
def test_routes_of_a_pool_without_a_manifest(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    routes_of(monkeypatch, None)
    assert CliRunner().invoke(app, ["routes", *arguments]).stdout.startswith("There ")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("x", "a whole number"), ("1.5", "a whole number"), ("", "a whole number"), ("0", "greater than or equal to 1")],
    ids=repr,
)
def test_invalid_version_is_wrong_usage(version: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["routes", "rollback", version], debug=False) == 2
    assert capsys.readouterr().err == (
        f"Invalid value for 'VERSION': it should be {expected}. Try `osrdyne routes rollback --help`.\n"
    )


def test_routes_history_and_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = routes_of(monkeypatch)
    assert "me" in CliRunner().invoke(app, ["routes", "history"]).stdout
    CliRunner().invoke(app, ["routes", "rollback", "1", "--author", "you"])
    assert daemon.asked == [("/v1/routes/rollback", None, {"version": 1, "author": "you", "if_match": None})]


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (["version"], {"structlog", "httpx", "aio_pika", "aiormq", "osrdyne.config.models"}),
        (["--version"], {"structlog", "httpx", "aio_pika", "aiormq", "osrdyne.config.models"}),
        (
            ["--debug", "routes", "eval", "--help"],
            {"osrdyne.daemon.daemon", "fastapi", "osrdyne.cli.daemon.dev", "aiormq"},
        ),
        (["token", "list", "--help"], {"aiormq", "httpx", "fastapi"}),
    ],
)
def test_command_imports_only_what_it_needs(arguments: list[str], unused: set[str]) -> None:
    """What a command does not use costs no time: `osrdyne version` answers at once."""
    code = (
        "import sys; from osrdyne.cli.main import execute; "
        f"assert execute({arguments}, debug=False) == 0; print(sorted({unused} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("shell", "code", "error"),
    [
        (
            "version >/dev/full",
            1,
            "The output, or a file of the command, cannot be written: No space left on device.\n",
        ),
        (
            "check-config >/dev/full",
            1,
            "The output, or a file of the command, cannot be written: No space left on device.\n",
        ),
        ("version >&-", 0, ""),
        ("nothing 2>&-", 2, ""),
    ],
)
def test_output_that_cannot_be_written_is_no_traceback(shell: str, code: int, error: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m osrdyne.cli.main {shell}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, error)


def test_unexpected_error_of_a_file_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(monkeypatch, PermissionError(errno.EACCES, "Permission denied", "/there"))
    assert execute(["status"], debug=False) == 1
    error = "Unexpected PermissionError (/there: Permission denied); run `osrdyne --debug …` for the traceback.\n"
    assert capsys.readouterr().err == error


def test_interrupt_while_the_command_line_is_imported_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "osrdyne.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "osrdyne.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130


POLICIES = """
policies: [{match: "tpch/{x}", MaxMessageSize: 1KiB, MaxMessageAge: 0, ExpirationInstant: "2100-01-01T00:00:00Z"}]
"""


def test_policies_check_shows_policies_and_what_is_moved_to_the_bounds() -> None:
    result = CliRunner().invoke(app, ["policies", "check", "-"], input=POLICIES)
    assert "MaxMessageSize 1024" in result.stdout
    assert "warning: policies.0.MaxMessageSize: 8192 is used instead" in result.stderr
    assert "warning: policies.0.ExpirationInstant: it acts only on created queues" in result.stderr


def test_circuits_config_check_shows_the_settings_and_warnings() -> None:
    document = '{"circuitCheckEnabled": true, "circuitScope": "group"}'
    result = CliRunner().invoke(app, ["circuits", "config", "check", "-"], input=document)
    assert "statisticsUpdateEnabled: no outcome is counted while this is off" in result.stderr
    assert [word for word in ("errorThresholdPercentage", "90", "group") if word not in result.stdout] == []


def test_circuits_are_listed_with_their_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"hash": "0" * 16, "route": None, "key": "a", "status": "closed", "fail_ratio": 66, "since": 5.0}
    one |= {"failures": 2, "successes": 1, "paused": 0}

    class Remote:
        def get(self, path: str) -> object:
            assert path == "/v1/circuits/_all"
            return {"circuits": [one]}

    monkeypatch.setattr("osrdyne.cli.pool.circuits.remote", lambda *_: Remote())
    for command in (["list"], ["show", "0" * 16]):
        shown = CliRunner().invoke(app, ["circuits", *command]).stdout
        assert [word for word in ("0" * 16, "no named route", "66 %", "closed") if word not in shown] == []
    wrong = CliRunner().invoke(app, ["circuits", "show", "../groups"])
    expected = f"'../groups'. Name one by its hash, or by its route: {'0' * 16} (requests of no named route, a)."
    assert str(wrong.exception) == f"There is no circuit {expected}"


class CircuitsRemote:
    """A daemon with the circuits of two routes; `slow` has one for each group."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        named = [("0", "fast", None), ("1", "slow", "a"), ("2", "slow", "b")]
        self.circuits = [{"hash": digit * 16, "route": route, "key": key} for digit, route, key in named]

    def get(self, path: str) -> object:
        assert path == "/v1/circuits/_all"
        return {"circuits": self.circuits}

    def send(self, method: str, path: str, document: object, *, author: str) -> object:
        assert (method, document, author) == ("PUT", {"status": "closed"}, "me")
        name = path.removeprefix("/v1/circuits/").removesuffix("/status")
        names = ["0" * 16, "1" * 16, "2" * 16] if name == "_all" else [name]
        closed = [one for one in names if one not in self.closed]
        self.closed += closed
        return {"closed": closed}


@pytest.fixture
def circuits(monkeypatch: pytest.MonkeyPatch) -> CircuitsRemote:
    remote = CircuitsRemote()
    monkeypatch.setattr("osrdyne.cli.pool.circuits.remote", lambda *_: remote)
    return remote


def test_circuits_are_closed_by_hash_or_route_or_all_at_once(circuits: CircuitsRemote) -> None:
    def close(name: str) -> str:
        return CliRunner().invoke(app, ["circuits", "close", name, "--author", "me"]).stdout

    hashes = ["0" * 16, "1" * 16, "2" * 16]
    assert (close(hashes[1]), circuits.closed) == (f"Closed: {hashes[1]}.\n", [hashes[1]])
    assert close("slow") == f"Closed: {hashes[2]}.\n"
    assert close("--all") == f"Closed: {hashes[0]}.\n"
    assert close("fast") == "Nothing to do: closed already.\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "or close all of them with --all"),
        (["0" * 16, "--all"], "or close all of them with --all"),
        (["WORD"], "There is no circuit 'WORD'. Name one by its hash, or by its route: 0000000000000000 (fast, all);"),
    ],
    ids=["none", "both", "unknown"],
)
def test_circuit_that_is_not_named_well_is_not_closed(
    circuits: CircuitsRemote, arguments: list[str], error: str
) -> None:
    wrong = CliRunner().invoke(app, ["circuits", "close", *arguments, "--author", "me"])
    assert (error in str(wrong.exception), circuits.closed) == (True, [])


def test_route_of_several_circuits_is_shown_by_their_hashes(circuits: CircuitsRemote) -> None:
    wrong = CliRunner().invoke(app, ["circuits", "show", "slow"])
    assert f"has 2 circuits. Name one by its hash: {'1' * 16} (slow, a); {'2' * 16} (slow, b)." in str(wrong.exception)


def test_circuits_that_do_not_exist_are_not_listed_in_the_error(circuits: CircuitsRemote) -> None:
    circuits.circuits = []
    wrong = CliRunner().invoke(app, ["circuits", "close", "any"])
    assert str(wrong.exception) == "There is no circuit 'any': no outcome has been counted."


def test_policies_effective_shows_each_value_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    element = {"value": 0, "origin": "clamped", "acts": True}
    answer = {"match": "tpch/{x}", "elements": {"MaxQueueLength": element}}

    class Remote:
        def get(self, path: str, **parameters: object) -> object:
            return answer if (path, parameters) == ("/v1/policies/effective", {"key": "tpch/1"}) else None

    monkeypatch.setattr("osrdyne.cli.manifests.policies.remote", lambda *_: Remote())
    shown = CliRunner().invoke(app, ["policies", "effective", "tpch/1"]).stdout
    assert [word for word in ("'tpch/{x}'", "MaxQueueLength", "clamped") if word not in shown] == []


def test_explain_tests_a_document_of_policies() -> None:
    Path("p.yaml").write_text(POLICIES)
    Path("m.json").write_text(MANIFEST)
    command = ["explain", "tpch/1", "/p", "--policies", "p.yaml", "--routes", "m.json"]
    assert "expired" in CliRunner().invoke(app, command).stdout
