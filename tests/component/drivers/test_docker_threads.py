"""The threads of the Docker driver with an engine that the test controls: shared pulls, events that break."""

import asyncio
import threading
from queue import SimpleQueue

import pytest
from docker.errors import APIError

from osrdyne.aio.clock import SystemClock
from osrdyne.aio.tasks import Threads
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.docker import DockerDriver
from osrdyne.drivers.docker.events import EventReader
from osrdyne.drivers.docker.images import Images
from osrdyne.drivers.docker.options import DockerOptions
from osrdyne.errors import DriverUnavailableError, StartFailedError

PATIENCE = 10.0


class FakeEngine:
    """Gives itself as the SDK's client."""

    def call(self, function):
        return function(self)

    def close(self):
        pass


class Registry(FakeEngine):
    def __init__(self, *steps, refusal=None):
        self.steps, self.refusal = steps, refusal
        self.pulls = 0
        self.go_on = threading.Event()

    def pull(self, image, *, stream, decode):
        self.pulls += 1
        self.go_on.wait(PATIENCE)
        if self.refusal is not None:
            raise self.refusal
        yield from self.steps


@pytest.fixture
def images():
    made = []

    def make(registry):
        made.append(Images(registry, "worker:1"))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_starts_that_wait_for_one_image_share_its_pull(images):
    registry = Registry({"status": "Download complete"})
    pulling = images(registry)
    waiting = [asyncio.ensure_future(pulling.pull()) for _ in range(20)]
    await asyncio.sleep(0)
    registry.go_on.set()
    await asyncio.gather(*waiting)
    assert registry.pulls in {1, 2}  # one that had begun before some of them asked does not count for those


async def test_next_start_has_the_image_pulled_again(images):
    registry = Registry()
    registry.go_on.set()
    pulling = images(registry)
    await pulling.pull()
    await pulling.pull()
    assert registry.pulls == 2


@pytest.mark.parametrize(
    ("registry", "error"),
    [
        pytest.param(Registry({"error": "no access."}), StartFailedError, id="refused while pulling"),
        pytest.param(Registry(refusal=APIError("x", explanation="no access.")), StartFailedError, id="refused at once"),
        pytest.param(
            Registry(refusal=DriverUnavailableError("no access.")), DriverUnavailableError, id="silent engine"
        ),
    ],
)
async def test_pull_that_fails_fails_every_start_that_waits(images, registry, error):
    registry.go_on.set()
    pulling = images(registry)
    results = await asyncio.gather(*(pulling.pull() for _ in range(3)), return_exceptions=True)
    assert {(type(result), "no access." in str(result)) for result in results} == {(error, True)}


async def test_pull_that_its_start_no_longer_waits_for_has_no_outcome(images):
    registry = Registry()
    pulling = images(registry)
    given_up = asyncio.ensure_future(pulling.pull())
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(pulling.pull())
    await asyncio.sleep(0)
    given_up.cancel()
    registry.go_on.set()
    await waiting
    assert registry.pulls == 2


async def test_no_more_calls_than_the_limit_run_at_once_also_without_a_waiter():
    threads, go_on, begun = Threads("calls", limit=2), threading.Event(), []

    def call():
        begun.append(None)
        go_on.wait(PATIENCE)

    calls = [asyncio.ensure_future(threads.run(call)) for _ in range(4)]
    while len(begun) < 2:
        await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.sleep(0)
    assert len(begun) == 2
    go_on.set()
    await asyncio.gather(*calls[1:])
    assert len(begun) == 4


async def test_driver_is_closed_although_its_engine_hangs(monkeypatch):
    monkeypatch.setattr("osrdyne.drivers.docker.driver._CLOSE_PATIENCE", 0.01)
    context = DriverContext(pool="p", stack="s", clock=SystemClock(), worker_command=("here",), worker_app="my:app")
    driver, begun, go_on = DockerDriver(DockerOptions(image="worker:1"), context), threading.Event(), threading.Event()

    def hang(_stopping):
        begun.set()
        go_on.wait()

    monkeypatch.setattr(driver._containers, "instances", hang)
    listing = asyncio.ensure_future(driver.list_instances())
    await asyncio.to_thread(begun.wait, PATIENCE)
    await driver.close()
    assert not listing.done()
    listing.cancel()
    go_on.set()


class Streams(FakeEngine):
    """Each opening of the stream takes the next script: an error, or what is in the stream before it ends."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.opened = 0

    def events(self, **_filters):
        self.opened += 1
        script = self.scripts.pop(0) if self.scripts else ()
        if isinstance(script, Exception):
            raise script
        return (event for event in script)


def notices_of(streams, count):
    """Read until there were `count` notices."""
    notices = SimpleQueue()
    reader = EventReader(streams, [], lambda: notices.put(None), clock=SystemClock())
    reader.start()
    for _ in range(count):
        notices.get(timeout=PATIENCE)
    reader.close()


@pytest.mark.parametrize(
    ("scripts", "notices", "opened"),
    [
        ([[{}, {}]], 3, 1),
        ([DriverUnavailableError("away"), [{}]], 2, 2),
        ([APIError("x"), [{}]], 2, 2),
        ([RuntimeError("half a document"), [{}]], 2, 2),
    ],
    ids=str,
)
def test_stream_that_breaks_is_opened_again_and_each_event_is_noticed(scripts, notices, opened):
    """An opened stream counts as a change, too."""
    streams = Streams(*scripts)
    notices_of(streams, notices)
    assert streams.opened >= opened
