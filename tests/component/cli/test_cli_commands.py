"""Commands without a daemon, or with one whose answers are made up; and failures: one line and an exit code."""

import errno
import io
import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog

from osrdyne import __version__
from osrdyne.cli.main import execute
from osrdyne.errors import BrokerUnavailableError, OsrdyneError, PortTakenError
from osrdyne.protocol.environment import WorkerEnvironment


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = execute([*arguments], debug=False)
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OSRDYNE__DRIVER", "noop")
    yield
    structlog.reset_defaults()  # commands set up logging for a whole process
    logging.basicConfig(level=logging.WARNING, force=True)


class Daemon:
    """A daemon: its answers by path, and what was sent to it."""

    answered_by = "http://leader"

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.sent: list[tuple[str, object, dict[str, object]]] = []

    def get(self, path: str, **parameters: object) -> Any:
        return self.answers.get(path, {"current": None})

    def send(self, method: str, path: str, document: object, **parameters: object) -> object:
        self.sent.append((path, document, parameters))
        changed = {"added_priorities": [1], "removed_priorities": [3], "pending": {"3": 40}, "closed": ["0"]}
        return {"pool": "p", "version": 2, "warnings": ["odd"], **changed}

    def post(self, path: str, **parameters: object) -> object:
        return self.send("POST", path, None, **parameters)

    def activate(self, path: str, manifest: object) -> None:
        current = {"version": 1, "author": "me", "at": 0.0, "size": 1, "manifest": manifest}
        self.answers |= {path: {"current": current}, f"{path}/history": {"versions": [current]}}


@pytest.fixture
def daemon(monkeypatch):
    daemon = Daemon()
    daemon.activate("/v1/routes", {"routes": {"r": "FROM /* INTO $upstream"}})
    for command in ("manifests.commands", "manifests.policies", "pool.circuits", "requests.explain"):
        monkeypatch.setattr(f"osrdyne.cli.{command}.remote", lambda *_: daemon)
    return daemon


def test_check_config_shows_values_with_origin_and_no_secret_and_warns_of_misspelt_settings_of_spark(run):
    Path("osrdyne.yaml").write_text("broker:\n  uri: amqp://u:hidden@h\n")
    shown = run("check-config", "--pool", "mine", "--set", "worker.spark_conf.spark.sql.shufle.partitions=3")
    assert '  uri: "amqp://u:***@h"  # file osrdyne.yaml:2\n' in shown.out
    assert '  id: "mine"  # flag --pool\n' in shown.out
    assert '  name: "noop"  # environment OSRDYNE__DRIVER\n' in shown.out
    assert "hidden" not in shown.out + shown.err
    assert (shown.code, "spark.sql.shuffle.partitions" in shown.err) == (0, True)
    for arguments in (["version"], ["--debug", "--version"]):
        assert run(*arguments) == (0, f"{__version__}\n", "")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("app", ["osrdyne_worker.pipelines.sql:app", "elsewhere:app"])
def test_check_config_warns_of_the_configuration_of_an_own_application_elsewhere(run, app):
    assignments = ("--set", f"worker.app={app}", "--set", 'worker.config={"dataset": []}')
    shown = run("check-config", *assignments)
    assert (shown.code, "worker.config.dataset" in shown.err) == (0, app.startswith("osrdyne"))


@pytest.mark.parametrize("key", ["infra=42,timetable=24", "it's $(x) `y`", "a\nb", "é 漢 🚄", "", "-x", "\0"])
def test_environment_of_a_worker_survives_the_shell(run, key):
    words = shlex.split(run("groups", "env", "--pool", "mine", "--", key).out)
    variables = dict(word.split("=", 1) for word in words if word != "export")
    environment = WorkerEnvironment.from_variables(variables)
    assert (environment.key, environment.pool) == (key, "mine")
    assert environment.amqp_uri == "amqp://guest:guest@localhost:5672/"
    as_json = json.loads(run("groups", "env", "--json", "--pool", "mine", "--", key).out)
    assert as_json.keys() == variables.keys()
    assert as_json["WORKER_REQUESTS_QUEUE"] == variables["WORKER_REQUESTS_QUEUE"]


NOT_UTF8 = "\udcff"
HASHES = ["0" * 16, "1" * 16, "2" * 16]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("nonsense", "'nonsense' osrdyne --help"),
        ("groups show", "KEY osrdyne groups show --help"),
        ("call k /p -o xml", "--output xml json"),
        ("run --set x", "--set path=value"),
        ("status --api http://[::1", "--api unix:/path"),
        ("token create a --role admin --file .", ".: directory"),
        ("queues create k --for 99999999999d", "--for"),
        (f"last {NOT_UTF8}", "UTF-8"),
        (f"audit --who {NOT_UTF8}", r"UTF-8 \udcff"),
        (f"groups env {'x' * 256}", "256 255"),
        ("check-config --set driver.options.nope=1", "driver.options.nope"),
        ("run --pool NO", "pool.id --pool 32"),
        ("routes rollback x", "VERSION whole number"),
        ("routes rollback 0", "VERSION 1"),
        ("routes eval '1 ='", "column 4"),
        ("routes eval --batch nowhere", "nowhere No such file"),
        ("routes eval --batch -H a=b", "--batch"),
        ("routes eval true -S a", "--system name=value"),
        ("routes apply /dev/null", "/dev/null {}"),
        ("explain k /p --system contentType=x", "messageId"),
        ("circuits close", "--all"),
        (f"circuits close {HASHES[0]} --all", "--all"),
        ("circuits close WORD", f"'WORD' {' '.join(HASHES)}"),
        ("circuits show ../groups", f"'../groups' {' '.join(HASHES)}"),
        ("circuits show slow", f"{HASHES[1]} (slow, a) {HASHES[2]} (slow, b)"),
        ("capacity", "--rate --profile --from-history"),
        ("capacity --rate 7/week", "--rate: '7/week'"),
        ("capacity --rate 7/min --units 0", "--units:"),
        ("capacity --profile unit.yaml", "unit.yaml: load.0.rate: '7/week'"),
        ("capacity --rate 7/min --hub s9", "--hub:"),
        ("capacity --profile none.yaml", "none.yaml"),
        ("capacity --profile bad.json", "bad.json:"),
        ("capacity --profile list.yaml", "list.yaml:"),
    ],
    ids=lambda value: value.encode("ascii", "backslashreplace").decode()[:40],
)
def test_wrong_use_is_one_line_and_exit_code_2(run, circuits, command, named):
    for name, text in (("bad.json", "{"), ("list.yaml", "[1]"), ("unit.yaml", "load: [{rate: 7/week}]")):
        Path(name).write_text(text, encoding="utf-8")
    code, out, err = run(*shlex.split(command))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert [word for word in named.split() if word not in err] == []
    assert circuits.sent == []


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OsrdyneError("It failed at amqp://u:hidden@h."), 1, "It failed at amqp://u:***@h.\n"),
        (BrokerUnavailableError("Connection refused."), 1, "Connection refused.\n"),
        (PortTakenError("Port 1 is taken."), 2, "Port 1 is taken.\n"),
        (ExceptionGroup("", [ExceptionGroup("", [PortTakenError("Port 1 is taken.")])]), 2, "Port 1 is taken.\n"),
        (ZeroDivisionError("hidden"), 1, "ZeroDivisionError"),
        (PermissionError(errno.EACCES, "Permission denied", "/there"), 1, "/there: Permission denied"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failure_is_one_line_and_an_exit_code(run, monkeypatch, error, code, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("osrdyne.cli.daemon.status.remote", fail)
    failed = run("status")
    assert (failed.code, message in failed.err, "hidden" in failed.err) == (code, True, False)
    assert failed.err.count("\n") == (1 if message else 0)
    if isinstance(error, ZeroDivisionError):
        assert "--debug" in failed.err
        with pytest.raises(ZeroDivisionError):
            execute(["--debug", "status"], debug=True)


def test_routes_eval_prints_the_result(run):
    conditions = {
        "level = '3'": (["-H", "level=3"], "true\n"),
        "$body.a < 1": (["-d", '{"a": 1}'], "false\n"),
        "{$key} = 'a'": (["-S", "key=b=c"], "false\n"),
        "level": ([], "undefined\n"),
    }
    for condition, (arguments, result) in conditions.items():
        assert run("routes", "eval", condition, *arguments).out == result
    cases = '{"condition": "true"}\n\n{"condition": "1 @"}\nnonsense\n{"condition": ""}\n'
    Path("cases.jsonl").write_text(cases)
    for file in (["cases.jsonl"], []):
        printed = run("routes", "eval", "--batch", *file, stdin=cases).out
        first, second, third, fourth = [json.loads(line) for line in printed.splitlines()]
        assert (first, second["column"], fourth) == ({"result": True}, 3, {"result": "undefined"})
        assert "error" in third


MANIFEST = '{"routes": {"low": "FROM /* INTO $upstream", "high": {"route": "FROM /* INTO $upstream", "priority": 2}}}'
RULES = (
    '{"k.*": {"description": "all", "postfixFromStatic": ["A", "B"]}, "ka": {"postfixFromRequest": {"header": "h"}}}'
)
PROFILES = """
profiles:
- {match: "tpch/{x}", memory: 2GiB, stop_delay: 20s, spark_conf: {spark.a: 1}}
- {match: b, cores: 2}
"""
POLICIES = """
policies: [{match: "tpch/{x}", MaxMessageSize: 1KiB, MaxMessageAge: 0, ExpirationInstant: "2100-01-01T00:00:00Z"}]
"""
CIRCUITS = '{"circuitCheckEnabled": true, "circuitScope": "group"}'


@pytest.mark.parametrize(
    ("command", "document", "shown", "warnings"),
    [
        ("routes", MANIFEST, ["high", "low"], []),  # the most urgent first
        ("splitter", RULES, ["in turn: A, B"], ["ka: it overlaps with 'k.*'"]),
        ("profiles", PROFILES, ["memory 2048MiB", "stop_delay 20s"], ["profiles.1.cores:"]),
        ("policies", POLICIES, ["MaxMessageSize 1024"], ["policies.0.MaxMessageSize: 8192", "policies.0.Exp"]),
        ("circuits config", CIRCUITS, ["errorThresholdPercentage", "90", "group"], ["statisticsUpdateEnabled:"]),
    ],
    ids=["routes", "splitter", "profiles", "policies", "circuits"],
)
def test_check_shows_what_a_document_means_and_its_warnings(run, command, document, shown, warnings):
    code, out, err = run(*command.split(), "check", "-", stdin=document)
    places = [out.find(word) for word in shown]
    assert (code, -1 in places, places) == (0, False, sorted(places))
    assert [word for word in warnings if f"warning: {word}" not in err] == []


@pytest.mark.parametrize(
    ("command", "document", "places"),
    [
        ("routes", '{"routes": {"a": "FROM x INTO $up"}}', ["routes.a.route, column 6", "routes.a.route, column 13"]),
        ("splitter", '{"a(": {}, "b": {"postfixFromRequest": {}}}', ["a(, column 1", "a(", "b.postfixFromRequest"]),
        (
            "profiles",
            '{"profiles": [{"match": "{"}, {"match": "a", "memory": 1}]}',
            ["profiles.0.match", "profiles.1.memory"],
        ),
        ("routes", '{"routes": {\n  "a": ]\n}}', ["line 2, column 8"]),
    ],
    ids=["routes", "splitter", "profiles", "no JSON"],
)
def test_check_tells_every_error_with_its_place(run, command, document, places):
    Path("file.json").write_text(document)
    code, _, err = run(command, "check", "file.json")
    assert (code, [line.split(": ")[0] for line in err.splitlines()]) == (2, [f"file.json, {one}" for one in places])


@pytest.mark.parametrize(
    ("command", "document"), [("routes", MANIFEST), ("splitter", RULES), ("profiles", '{"profiles": [{"match": "a"}]}')]
)
def test_apply_sends_the_document_with_its_author(run, daemon, command, document):
    _, out, err = run(command, "apply", "-", "--author", "you", stdin=document)
    assert daemon.sent == [(f"/v1/{command}", json.loads(document), {"author": "you", "if_match": None})]
    said = out + err
    assert [word for word in ("http://leader", "ersion 2", " 1.", " 3.", " 40.", "odd") if word not in said] == []


def test_active_manifest_is_shown_compared_and_changed_if_it_has_the_expected_version(run, daemon, monkeypatch):
    assert "version 1, by me" in run("routes", "show").out
    assert "me" in run("routes", "history").out
    shown = run("routes", "show", "-o", "json").out
    assert run("routes", "diff", "-", stdin=shown).code == 0
    different = run("routes", "diff", "-", stdin=MANIFEST)
    assert (different.code, '-    "r": "FROM /* INTO $upstream"' in different.out) == (1, True)
    run("routes", "rollback", "1", "--author", "you")
    assert daemon.sent == [("/v1/routes/rollback", None, {"version": 1, "author": "you", "if_match": None})]
    run("routes", "clear")
    assert "@" in daemon.sent.pop()[2]["author"]

    def fail():
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", fail)
    monkeypatch.setattr("os.getuid", lambda: 4242)
    for arguments in (["apply", "-"], ["rollback", "1"], ["clear"]):
        run("routes", *arguments, "--expect-version", "4", stdin=MANIFEST)
    changes = [(sent["if_match"], sent["author"].partition("@")[0]) for _, _, sent in daemon.sent[1:]]
    assert changes == [(4, "uid-4242")] * 3


def test_explain_shows_which_route_decides_and_what_a_document_of_policies_does(run, daemon):
    Path("m.json").write_text(MANIFEST)
    Path("p.yaml").write_text(POLICIES)
    assert "expired" in run("explain", "tpch/1", "/p", "--policies", "p.yaml", "--routes", "m.json").out
    arguments = ["explain", "k", "/p", "--routes", "m.json", "-H", "a=b", "-d", "{}", "--app-id", "x"]
    assert "high: it matches and decides." in run(*arguments).out
    explanation = json.loads(run(*arguments, "--timeout", "5s", "-o", "json").out)
    assert explanation["deliveries"][0]["limited_by"] == "caller"
    assert explanation["passages"] == explanation["deliveries"], "the former name, for one release"


def test_explain_without_a_daemon_says_what_is_not_known(run):
    result = run("explain", "", "/p", "--routes", "-", stdin=MANIFEST)
    assert result.out.startswith("key       The key is empty.")
    assert "splitter, policies, profiles: " in result.err


HOT = '{"routes": {"hot": "FROM /* WHERE $body.t > 30 AND ($messageId ?? \'7\') = \'7\' INTO $upstream"}}'


@pytest.mark.parametrize(
    ("declared", "matches"),
    [
        ("", True),
        ("--content-type application/json", False),
        ("--content-type application/json --content-encoding utf-16", False),
        ("--content-type application/json --content-encoding utf-8", True),
        ("--content-type ''", False),
        ("--system messageid=8", False),
        ("--system messageId=7", True),
    ],
)
def test_explain_uses_the_properties_that_the_message_has(run, declared, matches):
    arguments = ["explain", "k", "/p", "--routes", "-", "-d", '{"t": 35}', "-o", "json", *shlex.split(declared)]
    explanation = json.loads(run(*arguments, stdin=HOT).out)
    assert (explanation["refused"] is None) is matches
    unread = [step for step in explanation["steps"] if step["name"] == "body"]
    assert bool(unread) is (not matches and "--system" not in declared)


@pytest.mark.parametrize(
    ("source", "route"),
    [("--splitter s.json", "default class"), ("--routes m.json", "high: it matches and decides")],
    ids=["rules of a file, no routes", "active rules, routes of a file"],
)
def test_explain_shows_which_rule_splits(run, daemon, source, route):
    Path("s.json").write_text(RULES)
    Path("m.json").write_text(MANIFEST)
    daemon.answers.clear()
    if "s.json" not in source:
        daemon.activate("/v1/splitter", json.loads(RULES))
    shown = run("explain", "kx", "/p", *source.split()).out
    assert [word for word in ("'k.*'", "'kx'", "'kx-A'", route) if word not in shown] == []


@pytest.mark.parametrize("stored", [False, True])
def test_explain_of_a_routes_file_names_the_profile(run, daemon, stored):
    """The stored profiles if the daemon has some, otherwise those of the configuration."""
    Path("m.json").write_text(MANIFEST)
    Path("c.yaml").write_text("pool: {id: p}\nworker: {profiles: [{match: 'k', memory: 2GiB}]}\n")
    if stored:
        daemon.activate("/v1/profiles", {"profiles": [{"match": "k", "concurrency": 3}]})
    shown = run("explain", "k", "/p", "--routes", "m.json", "--config", "c.yaml").out
    assert f"The profile 'k' sets {'concurrency' if stored else 'memory'}." in shown
    element = {"value": 0, "origin": "clamped", "acts": True}
    daemon.answers["/v1/policies/effective"] = {"match": "tpch/{x}", "elements": {"MaxQueueLength": element}}
    effective = run("policies", "effective", "tpch/1").out
    assert [word for word in ("'tpch/{x}'", "MaxQueueLength", "clamped") if word not in effective] == []


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("shell", "code", "error"),
    [
        *[(f"{command} >/dev/full", 1, "No space left on device") for command in ("version", "check-config")],
        *[("version >&-", 0, ""), ("nothing 2>&-", 2, "")],
    ],
)
def test_output_that_cannot_be_written_is_no_traceback(shell, code, error):
    command = f"{sys.executable} -m osrdyne.cli.main {shell}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, error in done.stderr) == (code, True)
    assert done.stderr.count("\n") == (1 if error else 0)


@pytest.fixture
def circuits(daemon):
    """With the circuits of two routes; `slow` has one for each group."""
    counts = {"status": "closed", "fail_ratio": 66, "since": 5.0, "failures": 2, "successes": 1, "paused": 0}
    named = zip(HASHES, (None, "slow", "slow"), (None, "a", "b"), strict=True)
    listed = [{"hash": one, "route": route, "key": key} | counts for one, route, key in named]
    daemon.answers["/v1/circuits/_all"] = {"circuits": listed}
    return daemon


@pytest.mark.parametrize(("name", "closed"), [(HASHES[1], HASHES[1:2]), ("slow", HASHES[1:]), ("--all", ["_all"])])
def test_circuits_are_shown_with_their_ratios_and_closed_by_hash_or_route_or_all_at_once(run, circuits, name, closed):
    for command in (["list"], ["show", HASHES[0]]):
        shown = run("circuits", *command).out
        assert [word for word in (HASHES[0], "no named route", "66 %", "closed") if word not in shown] == []
    assert run("circuits", "close", name, "--author", "me").code == 0
    wanted = {"status": "closed"}, {"author": "me"}
    assert circuits.sent == [(f"/v1/circuits/{one}/status", *wanted) for one in closed]


def test_exit_code_of_capacity_says_whether_a_load_fits_also_one_of_a_file(run):
    fits = run("capacity", *["--rate", "277/min", "--events", "2.5", "--store", "store-s1"])
    assert (fits.code, "99.7 %" in fits.out) == (0, True)
    full = run("capacity", *["--rate", "720/min", "--store", "store-s1"])
    words = ("utilisation", "9 h 15 min", "3 × iot-hub-s1", "1 × store-s1", "225")
    assert (full.code, [word for word in words if word not in full.out]) == (1, [])
    Path("osrdyne.yaml").write_text("prices: {iot_hub_s1: 1, store_s1: 2}", encoding="utf-8")
    Path("load.yaml").write_text("load: [{duration: 30m, rate: 4320/min}]\nstore: store-s1\n", encoding="utf-8")
    printed = run("capacity", "--profile", "load.yaml", "-o", "json")
    found = json.loads(printed.out)
    assert (printed.code, found["queue"]["drained"], found["cheapest"]["price"]) == (1, 180 * 60, 1 + 6 * 2)
