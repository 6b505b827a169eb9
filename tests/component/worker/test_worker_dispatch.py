"""Calling handlers: threads, sessions, failures, cancellation. No broker."""

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, PlainSerializer
from worker_bench import Bench

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import App, Call, Context, SessionFactory
from osrdyne_worker.requests.dispatch import Dispatcher, SessionLostError


class FakeSessions(SessionFactory):
    """Sessions whose groups end when they are cancelled."""

    def __init__(self) -> None:
        self.alive: bool | Exception = True
        self.groups: list[str] = []
        self.cancelled = threading.Event()
        self.deaf = 0
        """How many cancels change nothing."""

    def build(self, context: Context) -> str:
        return "session"

    def run_in_group(self, session: str, group_id: str, function: Callable[[], Any]) -> Any:
        self.groups.append(group_id)
        return function()

    def cancel(self, session: str, group_id: str) -> None:
        self.deaf -= 1
        if self.deaf < 0:
            self.cancelled.set()

    def progress(self, session: str, group_id: str) -> Mapping[str, int]:
        return {"jobs": 1, "tasks_done": 2, "tasks_total": 4}

    def request_session(self, session: str) -> str:
        return session

    def is_alive(self, session: str) -> bool:
        if isinstance(self.alive, Exception):
            raise self.alive
        return self.alive


class LostSession(Bench):
    """Its session is gone when its handler fails."""

    def make_app(self) -> App:
        sessions = FakeSessions()
        sessions.alive = False
        app = App(sessions=sessions)

        @app.handler("/lose")
        @app.handler("/lose_together", coalesce=True)
        async def lose(call: Call) -> None:
            raise ValueError

        return app


@pytest.fixture
def threads():
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def dispatcher(threads):
    def make(*handlers, sessions=None, debug=False):
        app = App(sessions=sessions)
        for handler in handlers:
            app.handler(f"/{handler.__name__}")(handler)
        return Dispatcher(app, threads=threads, side_threads=threads, debug=debug)

    return make


def call_of(path: str, body: bytes = b"") -> Call:
    return Call(Context(Key("k"), session="session"), Request("k", body, path=path))


async def test_plain_function_runs_in_a_thread_and_its_job_group_and_a_coroutine_does_not(dispatcher):
    def plain(call: Call) -> str:
        return threading.current_thread().name

    async def coroutine(call: Call) -> str:
        return threading.current_thread().name

    sessions = FakeSessions()
    both = dispatcher(plain, coroutine, sessions=sessions)
    here = threading.current_thread().name.encode()
    assert (await both.run(call_of("/plain"), group_id="g7")).body != here
    assert (await both.run(call_of("/coroutine"), group_id="g8")).body == here
    assert sessions.groups == ["g7"]


THREADS: list[str] = []
"""The threads in which `Noted` was decoded or encoded."""


def note_thread(text: str) -> str:
    THREADS.append(threading.current_thread().name)
    return text


class Noted(BaseModel):
    text: Annotated[str, AfterValidator(note_thread), PlainSerializer(note_thread)]


@pytest.fixture
def noted():
    THREADS.clear()
    return THREADS


@pytest.mark.parametrize(("size", "on_the_loop"), [(1000, True), (100_000, False)], ids=["small", "large"])
async def test_only_large_texts_of_a_coroutine_are_coded_in_a_thread(dispatcher, noted, size, on_the_loop):
    here, ran_in = threading.current_thread().name, list[str]()

    async def coroutine(call: Call, request: Noted) -> Noted:
        ran_in.append(threading.current_thread().name)
        return Noted.model_construct(text="x" * size)

    running = dispatcher(coroutine)
    response = await running.run(call_of("/coroutine", text_of(size)), group_id="g")
    assert len(response.body) > size
    assert ([thread == here for thread in noted], ran_in) == ([on_the_loop, on_the_loop], [here])
    refusal = await running.run(call_of("/coroutine", text_of(size).replace(b"text", b"other")), group_id="g")
    assert (refusal.code, json.loads(refusal.body)["error"]["code"]) == (400, "invalid_request")


def text_of(size: int) -> bytes:
    return json.dumps({"text": "x" * size}).encode()


@pytest.mark.parametrize(("size", "pauses"), [(1000, False), (100_000, True)], ids=["small", "large"])
async def test_collector_pauses_while_a_large_body_is_decoded(dispatcher, size, pauses):
    enabled = []

    def note_collector(text):
        enabled.append(gc.isenabled())
        return text

    def plain(call: Call, request: Any) -> bool:
        return gc.isenabled()

    plain.__annotations__["request"] = dict[str, Annotated[str, AfterValidator(note_collector)]]
    response = await dispatcher(plain).run(call_of("/plain", text_of(size)), group_id="g")
    assert (enabled, response.body) == ([not pauses], b"true")


@pytest.mark.parametrize("deaf", [0, 2], ids=["at once", "the third time"])
async def test_cancelled_thread_is_waited_for_until_its_jobs_are_gone(dispatcher, monkeypatch, deaf):
    """Spark runs a stage that it had not submitted yet when its group was cancelled."""
    monkeypatch.setattr("osrdyne_worker.requests.dispatch.CANCEL_INTERVAL", 0.01)
    started = threading.Event()
    sessions = FakeSessions()
    sessions.deaf = deaf
    ended = []

    def plain(call: Call) -> None:
        started.set()
        sessions.cancelled.wait(120)
        ended.append(True)

    running = asyncio.ensure_future(dispatcher(plain, sessions=sessions).run(call_of("/plain"), group_id="g"))
    await asyncio.to_thread(started.wait, 10)
    running.cancel()
    await asyncio.wait({running})
    assert (running.cancelled(), ended) == (True, [True])


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3), KeyboardInterrupt(), KeyError("x")], ids=repr)
async def test_whatever_a_thread_raises_is_an_error_reply(dispatcher, error):
    def plain(call: Call) -> None:
        raise error

    for debug in (False, True):
        response = await dispatcher(plain, debug=debug).run(call_of("/plain"), group_id="g")
        assert (response.status, response.code) == ("error", 500)
        assert (b"Traceback" in response.body) == debug


@pytest.mark.parametrize("alive", [False, ConnectionError("py4j")], ids=["dead", "does not answer"])
async def test_failure_without_a_session_is_not_an_answer(dispatcher, alive):
    def fail(call: Call) -> None:
        raise ValueError("x")

    class Explained(FakeSessions):
        def loss_reason(self, session: str) -> str | None:
            return "It ran out of memory."

    for sessions in (FakeSessions(), Explained()):
        sessions.alive = alive
        failing = dispatcher(fail, sessions=sessions)
        with pytest.raises(SessionLostError):
            await failing.run(call_of("/fail"), group_id="g")
        reason = await failing.loss_reason("session")
        assert ("It ran out of memory." in reason) == isinstance(sessions, Explained)


async def test_progress_adds_up_over_the_groups(dispatcher):
    progress = await dispatcher(sessions=FakeSessions()).progress("session", ["a", "b"])
    assert progress == {"jobs": 2, "tasks_done": 4, "tasks_total": 8}


@pytest.mark.parametrize("name", ["authorization", "Authorization"])
def test_handler_does_not_see_the_credentials_of_the_caller(name):
    request = Request("k", b"", headers={name: "Bearer hidden", "traceparent": "00-1"})
    assert Call(Context(Key("k")), request).headers == {"traceparent": "00-1"}


async def test_request_without_a_path_is_answered_with_that_reason(dispatcher):
    response = await dispatcher().run(call_of(""), group_id="g")
    assert (response.status, b"x-rpc-path" in response.body) == ("error", True)


async def test_handler_that_runs_again_gets_a_copy_of_the_new_session(dispatcher, monkeypatch):
    """Otherwise it would read the former data, and its answer would name the version of the new data."""
    seen = []

    def reader(call: Call) -> None:
        seen.append(call.session)

    monkeypatch.setattr(FakeSessions, "request_session", lambda self, session: f"copy of {session}")
    reading, call = dispatcher(reader, sessions=FakeSessions()), call_of("/reader")
    await reading.run(call, group_id="g")
    call.context = Context(Key("k"), session="reloaded session")
    await reading.run(call, group_id="g-again")
    assert seen == ["copy of session", "copy of reloaded session"]
