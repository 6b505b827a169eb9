"""What the watchdog says about code that blocks the event loop: which handler it is, of which key, and where."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from structlog.testing import capture_logs

from osrdyne.protocol.activity import text_fingerprint
from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key, WorkerId
from osrdyne_worker import App, Call, Context
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.runtime.loading import Loader
from osrdyne_worker.runtime.loop_watchdog import Blocked, LoopWatchdog

PATIENCE = 30.0
LIMIT = 0.1
CONTEXT = Context(Key("k"), worker_id=WorkerId("w"))


class Bench:
    """An application that blocks the loop until the watchdog has noticed."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.noticed = threading.Event()
        self.found: list[Blocked] = []
        self.app, self.threads = App(), threads

    def block(self, depth: int = 10) -> None:
        if depth:
            self.block(depth - 1)
        else:
            self.noticed.wait(PATIENCE)

    def note(self, blocked: Blocked) -> None:
        self.found.append(blocked)
        self.noticed.set()

    async def watch(self) -> None:
        LoopWatchdog(limit=LIMIT, on_blocked=self.note).start()
        await asyncio.sleep(0)

    async def run(self, path: str, *bodies: bytes) -> Blocked:
        """What the watchdog finds during a request, or a batch of several."""
        await self.watch()
        calls = [Call(CONTEXT, Request("k", body, path=path)) for body in bodies]
        dispatcher = Dispatcher(self.app, threads=self.threads, side_threads=self.threads)
        await (dispatcher.run_batch(calls, group_id="g") if calls[1:] else dispatcher.run(calls[0], group_id="g"))
        [blocked] = self.found
        return blocked


@pytest.fixture
def bench():
    with ThreadPoolExecutor(2) as threads:
        yield Bench(threads)


async def test_handler_is_named_with_its_request_and_its_stack(bench):
    @bench.app.handler("/slow")
    async def slow(call: Call) -> None:
        await asyncio.sleep(0)
        bench.block()

    with capture_logs() as logs:
        blocked = await bench.run("/slow", b"1")
    assert (blocked.key, blocked.worker_id, blocked.path) == ("k", "w", "/slow")
    assert blocked.text == text_fingerprint("/slow", b"1")
    assert "slow of '/slow'" in blocked.reason
    assert blocked.stack[0].startswith("slow (")
    assert sum(line.startswith("block (") for line in blocked.stack) == 11
    [line] = [line for line in logs if line["event"] == "event loop blocked"]
    assert (line["key"], line["worker_id"], line["frames"]) == ("k", "w", list(blocked.stack))


async def test_no_single_request_of_a_batch_is_blamed(bench):
    @bench.app.batch_handler("/many")
    async def many(calls: list[Call]) -> list[None]:
        bench.block()
        return [None for _ in calls]

    blocked = await bench.run("/many", b"1", b"2")
    assert ("many of '/many'" in blocked.reason, blocked.worker_id, blocked.text) == (True, "w", None)


@pytest.mark.parametrize("hook", ["on_start", "newest_version", "on_stop"])
async def test_hook_is_named(bench, hook):
    """In a pooled process the hooks of a key run beside the handlers of others."""

    async def blocking(context: Context) -> Any:
        bench.block()

    getattr(bench.app, hook)(blocking)
    await bench.watch()
    loader = Loader(bench.app, CONTEXT, bench.threads)
    await loader.start()
    await loader.stop(started=True)
    [blocked] = bench.found
    assert ("blocking" in str(blocked.name), blocked.worker_id, blocked.path) == (True, "w", None)


async def test_other_code_is_shown_by_its_place(bench):
    await bench.watch()
    bench.block()
    await asyncio.sleep(0)
    [blocked] = bench.found
    assert (blocked.worker_id, "block (" in blocked.reason) == (None, True)
