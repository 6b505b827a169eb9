"""Commands that talk to a daemon, against the real API server over a fake pool."""

import asyncio
import io
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import structlog

from osrdyne.api.access.guard import hosts_of
from osrdyne.api.app import create_app
from osrdyne.api.server import ApiServer
from osrdyne.cli.main import execute
from osrdyne.config.models import ApiSettings
from osrdyne.errors import LeadershipLostError
from osrdyne.logs import configure_logging
from osrdyne.metrics import Metrics
from osrdyne.pool.views import ComponentView, PoisonPage, ReloadView, WaitingView
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.protocol.poison import WorkerDeath
from osrdyne.testing.fakes.inspector import FakeInspector, group_view, poison_view, worker_view

pytestmark = pytest.mark.one_rabbitmq

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _logs_as_before():
    """Commands set up logging for a whole process."""
    yield
    structlog.reset_defaults()
    logging.basicConfig(level=logging.WARNING, force=True)


@pytest.fixture
def pool():
    return FakeInspector()


@pytest.fixture
def url(pool):
    """A server in a thread of its own, because commands block."""
    settings = ApiSettings(port=0)
    app = create_app(pool, Metrics(), version="1", allowed_hosts=hosts_of(settings.host, ()))
    configure_logging(level="warning")
    server, ready, end = ApiServer(lambda: app, settings), threading.Event(), threading.Event()

    async def serve():
        server.bind()
        ready.set()
        serving = asyncio.create_task(server.run())
        await asyncio.to_thread(end.wait)
        serving.cancel()
        await asyncio.wait({serving})
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield server.url
    end.set()
    thread.join()


@pytest.fixture
def run(url, capsys):
    def run(*arguments):
        words = list(arguments)
        split = words.index("--") if "--" in words else len(words)
        code = execute([*words[:split], "--api", url, *words[split:]], debug=False)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


KEYS = ("infra=42,timetable=24", "a/b", "%41", "A", ".", "..", "", "-x", "--help", "\n", "é漢🚄", "x" * 255)


def test_every_key_reaches_its_group(run, pool):
    for number, key in enumerate(KEYS, 1):
        assert run("groups", "start", "--", key)[0] == 0
        assert (len(pool.group_views), key in pool.group_views) == (number, True)
        code, out, _ = run("groups", "show", "-o", "json", "--", key)
        assert (code, json.loads(out)["key"]) == (0, key)


def test_groups_are_shown_with_safe_keys_their_queue_and_their_workers(run, pool):
    key = Key("a\x1b[31m")
    shown = group_view(key, worker_view(key, "worker-one"))
    pool.group_views[key] = replace(shown, waiting=(WaitingView(0, 3, 12.0), WaitingView(None, 0, None)))
    code, out, _ = run("groups", "list")
    assert (code, "a\\x1b[31m" in out) == (0, True)
    _, out, _ = run("groups", "show", key)
    assert all(part in out for part in ("worker-one", "fake-req-", "3 with priority 0"))


def test_list_of_a_standby_is_empty_and_says_so(run, pool):
    for listed in ("groups", "workers"):
        pool.leading, pool.leader_address = True, None
        assert run(listed, "list", "-o", "json") == (0, "[]\n", "")
        pool.leading = False
        code, out, err = run(listed, "list", "-o", "json")
        assert (code, out, "osrdyne status" in err) == (0, "[]\n", True)
        code, out, err = run(listed, "show", "k")
        assert (code, out, "osrdyne status" in err) == (1, "", True)


def test_standby_sends_questions_and_commands_on_to_the_leader(run, url, pool, monkeypatch):
    pool.group_views[Key("k")] = group_view(Key("k"))
    pool.leading, pool.leader_address = False, url
    found, asked = pool.group, []

    def group(key):
        asked.append(key)
        pool.leading = len(asked) > 1
        return found(key)

    async def poison(query):
        asked.append(query)
        if len(asked) == 3:
            raise LeadershipLostError("This daemon is on standby.", leader=url)
        return PoisonPage((), 0, None)

    monkeypatch.setattr(pool, "group", group)
    code, out, _ = run("groups", "show", "k")
    assert (code, len(asked), out.split()[:2]) == (0, 2, ["key", "k"])
    monkeypatch.setattr(pool, "poison", poison)
    assert (run("poison", "list")[0], len(asked)) == (0, 4)


def test_what_does_not_exist_is_one_sentence_and_a_key_that_is_too_long_is_refused(run):
    code, out, err = run("explain", "x" * 256, "/sql")
    assert (code, out, "255" in err) == (2, "", True)
    for arguments, code in ((("groups", "stop", "k"), 0), (("groups", "show", "k"), 1), (("workers", "show", "k"), 1)):
        found, out, err = run(*arguments)
        assert (found, len((out + err).splitlines()), f"osrdyne {arguments[0]} list" in out + err) == (code, 1, True)


def test_path_in_the_address_and_another_server_are_one_sentence(url, capsys):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"error": "Object Not Found", "reason": "Not Found"}')

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request).start()
        for address, marker in ((f"{url}/v1", "/openapi.json"), (f"http://127.0.0.1:{server.server_port}", "--api")):
            assert execute(["groups", "list", "--api", address], debug=False) == 1
            assert marker in capsys.readouterr().err


def test_group_is_pinned_reloaded_and_its_logs_are_printed(run, pool):
    assert run("groups", "pin", "k")[0] == 0
    code, _, err = run("groups", "stop", "k")
    assert (code, "pinned" in err) == (1, True)
    assert [run("groups", command, "k")[0] for command in ("unpin", "stop")] == [0, 0]
    pool.group_views[Key("k")] = group_view(Key("k"))
    pool.reloads = [ReloadView(WorkerId("w1"), "reloaded", None)]
    assert run("groups", "reload", "k")[1].splitlines()[-2].split() == ["w1", "reloaded", "-"]
    pool.log_lines[Key("k")] = {"w1": ("one", "two\tthree")}
    assert run("groups", "logs", "k", "-n", "1")[1] == "== w1\ntwo\tthree\n"
    pool.ended_workers[Key("k")] = [WorkerDeath("w0", "exit code 4", "blocked by f", 7.0, ("one", "two"))]
    first, *lines = run("groups", "logs", "k", "--previous")[1].splitlines()
    assert first.startswith("== w0, ended ") and first.endswith("with exit code 4: blocked by f")
    assert lines == ["one", "two"]


def test_poison_is_listed_over_all_pages_and_shown_with_its_evidence(run, pool):
    pool.poison_views = [poison_view(f"e{number:03}", last_at=1000.0 + number) for number in range(250)]
    listed = json.loads(run("poison", "list", "--limit", "1000", "-o", "json")[1])
    assert [entry["id"] for entry in listed] == [f"e{number:03}" for number in range(250)]
    assert len(json.loads(run("poison", "list", "-o", "json")[1])) == 100
    _, out, _ = run("poison", "show", "e001")
    assert all(part in out for part in ('{"a": 1}', "worker w2", "SIGKILL", "out of memory"))
    code, _, err = run("poison", "show", "nothing")
    assert (code, "nothing" in err) == (1, True)


def test_poison_is_chosen_by_key_path_and_age(run, pool):
    changes: list[dict[str, object]] = [{"key": "a b/%"}, {"path": "/x"}, {"last_at": 1.0}, {"last_at": 1999.0}]
    pool.poison_views = [poison_view(f"e{number}", **change) for number, change in enumerate(changes)]
    options = {"--key": "a b/%", "--path": "/x", "--older-than": "1500s", "--newer-than": "10s"}
    found = [json.loads(run("poison", "list", "-o", "json", *option)[1]) for option in options.items()]
    assert [[entry["id"] for entry in one] for one in found] == [["e0"], ["e1"], ["e2"], ["e3"]]


def test_poison_is_replayed_and_dropped_if_it_is_named_in_one_way(run, pool, monkeypatch):
    pool.poison_views = [poison_view("e1"), poison_view("e2"), poison_view("e3", key="other")]
    for command in ("replay", "drop"):
        for arguments in ([], ["e1", "--all"], ["e1", "--key", "k"], ["--key", "k", "--all"]):
            assert run("poison", command, *arguments)[0] == 2
    assert len(pool.poison_views) == 3
    assert run("poison", "replay", "e1")[0] == run("poison", "replay", "--key", "other")[0] == 0
    assert [view.id for view in pool.replayed] == ["e1", "e3"]
    code, _, err = run("poison", "replay", "e9")
    assert (code, err.partition(":")[0]) == (1, "e9")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert run("poison", "drop", "--all")[0] == 1
    assert [view.id for view in pool.poison_views] == ["e2"]
    assert run("poison", "drop", "--all", "--yes")[0] == 0
    assert pool.poison_views == []


def test_poison_is_exported_as_json_lines(run, pool, tmp_path):
    pool.poison_views = [poison_view("e1", body=b"\xff"), poison_view("e2", key="\n")]
    lines = [json.loads(line) for line in run("poison", "export")[1].splitlines()]
    assert [(line["id"], line["body"]) for line in lines] == [("e1", "/w=="), ("e2", '{"a": 1}')]
    assert run("poison", "export", "--key", "\n", "--to", str(tmp_path / "x.jsonl"))[:2] == (0, "")
    assert json.loads((tmp_path / "x.jsonl").read_text())["id"] == "e2"
    assert run("poison", "export", "--to", str(tmp_path))[0] == 2


def test_status_names_the_leader_and_fails_with_a_component(run, pool):
    code, out, _ = run("status")
    assert (code, "pool fake: leader" in out, "term 7" in out) == (0, True, True)
    for leader, shown in (("http://leader:4242", "http://leader:4242"), (None, "none")):
        pool.leading, pool.leader_address = False, leader
        code, out, _ = run("status")
        assert (code, f"leader: {shown}" in out) == (0, True)
    pool.component_views.append(ComponentView("driver", False, "no answer"))
    code, out, _ = run("status")
    assert (code, "no answer" in out) == (1, True)
