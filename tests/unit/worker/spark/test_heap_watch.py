"""The watches over the JVM: when one cancels a request, and which; when a worker gives up on its gateway."""

from unittest.mock import MagicMock

import pytest

from osrdyne_worker.spark.failures.exhaustion import exhaustion
from osrdyne_worker.spark.java.gateway import MAX_UNANSWERED, PROBE_INTERVAL, GatewayWatch
from osrdyne_worker.spark.java.heap import HeapUse, HeapWatch
from osrdyne_worker.spark.session import MAX_REASONS, SparkSessions

FULL, HALF = HeapUse(90, 100), HeapUse(50, 100)


class Watched:
    """A watch over a heap whose use the test sets; a collection leaves `live` and the `broadcasts`: bytes of broadcast
    variables without a reference, of which Spark's context cleaner removes one at each pause."""

    def __init__(self) -> None:
        self.now = self.live = HALF
        self.broadcasts: list[int] = []
        self.collections = 0
        self.time = 100.0
        self.cancelled: list[str] = []
        self.reasons: list[str] = []
        self.held: dict[str, int] = {}
        self.watch = HeapWatch(
            self,
            limit=0.85,
            cancel=self.cancel,
            held_by=lambda groups: {group: self.held[group] for group in groups},  # KeyError: Spark does not say
            monotonic=lambda: self.time,
            sleep=self.clean,
        )

    def use(self) -> HeapUse:
        return self.now

    def collect(self) -> None:
        self.collections += 1
        self.now = HeapUse(self.live.used + sum(self.broadcasts), self.live.maximum)

    def clean(self, seconds: float) -> None:
        del self.broadcasts[:1]

    def cancel(self, group: str, reason: str) -> None:
        self.cancelled.append(group)
        self.reasons.append(reason)

    def begin(self, *groups: str, loads: bool = False) -> None:
        """Groups that begin 5 seconds one after the other."""
        for group in groups:
            self.time += 5
            self.watch.began(group, loads=loads)

    def fill(self) -> None:
        """The heap is full, and no collection helps."""
        self.now = self.live = FULL

    def check(self, *, after: float = 10.0) -> None:
        self.time += after
        self.watch.check()


@pytest.fixture
def watched():
    return Watched()


def test_heap_with_room_costs_no_collection_and_one_full_of_garbage_no_request(watched):
    watched.begin("a")
    watched.check()
    assert (watched.cancelled, watched.collections) == ([], 0)
    watched.now = FULL
    watched.check()
    assert (watched.cancelled, watched.collections) == ([], 1)
    watched.fill()
    watched.watch.ended("a")
    watched.check()
    assert watched.cancelled == []


@pytest.mark.parametrize(
    ("live", "broadcasts", "cancelled"),
    [(HALF, [5, 20, 20], []), (FULL, [5, 0, 0, 0], ["a"])],
    ids=["the cleaner makes room", "it frees too little"],
)
def test_broadcasts_that_spark_has_yet_to_remove_are_garbage(watched, live, broadcasts, cancelled):
    watched.watch.began("a")
    watched.now, watched.live, watched.broadcasts = FULL, live, broadcasts
    watched.check()
    assert (watched.cancelled, watched.collections) == (cancelled, 3)


@pytest.mark.parametrize(
    ("first", "held", "cancelled"),
    [
        ("old", {"old": 30, "young": 0, "just now": 20}, "old"),
        ("old", {"old": 11, "young": 0, "just now": 20}, "just now"),
        ("old", {"old": 9, "young": 0, "just now": 0}, "young"),
        ("old", {}, "young"),
        ("load", {}, "load"),
        ("load", {"load": 5, "young": 9, "just now": 0}, "load"),
        ("load", {"load": 5, "young": 11, "just now": 0}, "young"),
    ],
)
@pytest.mark.proves("spark/request-fills-spark-s", "spark/start-key-pooled-process")
def test_full_heap_cancels_what_holds_most_as_spark_says_and_a_load_first(watched, first, held, cancelled):
    """A request counts from 10 % of the heap; without one, the load of another key is cancelled, then the youngest."""
    watched.fill()
    watched.held = held
    watched.begin("ended")
    watched.begin(first, loads=first == "load")
    watched.begin("young", "just now")
    watched.watch.ended("ended")
    watched.check(after=0.1)
    assert watched.cancelled == [cancelled]
    assert ("load" in watched.reasons[0]) == (cancelled == "load")
    assert cancelled == "load" or "spark.driver.memory" in watched.reasons[0]


def test_load_that_has_just_begun_does_not_protect_requests(watched):
    watched.fill()
    watched.begin("request")
    watched.begin("load", loads=True)
    watched.check(after=0.1)
    assert watched.cancelled == ["request"]
    watched.watch.ended("load")
    watched.watch.began("load")
    watched.check(after=20)
    assert "request" in watched.reasons[-1], "its name is not remembered as that of a load"


@pytest.mark.proves("spark/request-fills-spark-s")
def test_nothing_is_cancelled_until_the_cancelled_request_has_released_its_memory(watched):
    watched.fill()
    watched.begin("innocent", "bomb")
    watched.check(after=5)
    for _ in range(8):
        watched.check(after=1)
    assert watched.cancelled == ["bomb"], "it has not ended yet"
    watched.watch.ended("bomb")
    watched.check(after=1)
    assert watched.cancelled == ["bomb"], "its tasks have not yet"
    watched.live = HALF
    watched.check(after=1)
    assert (watched.cancelled, watched.now) == (["bomb"], HALF)
    watched.fill()
    watched.begin("young")
    watched.check(after=5)
    watched.check(after=9)
    assert watched.cancelled == ["bomb", "young"]
    for seconds in (2, 20):
        watched.check(after=seconds)
        assert watched.cancelled == ["bomb", "young", "innocent"], "the first does not end in time; each only once"


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("Job aborted: Lost task 0.0: java.lang.OutOfMemoryError: Java heap space", "out_of_memory"),
        ("Traceback\n  File x\nMemoryError", "out_of_memory"),
        ("org.apache.arrow.memory.OutOfMemoryException: Failure allocating buffer.", "out_of_memory"),
        ("org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)", "python_worker_crashed"),
        ("Total size of results (1 GiB) is bigger than spark.driver.maxResultSize (128 MiB)", "answer_too_large"),
        ("[DIVIDE_BY_ZERO] Division by zero.", None),
    ],
)
def test_cause_of_exhaustion_is_read_from_the_exception(text, condition):
    found = exhaustion(RuntimeError(text))
    assert (found and found.condition) == condition


def test_reasons_for_groups_that_end_at_their_cancel_fill_no_memory():
    """The watch has chosen such a group before its end, which has removed no reason."""
    sessions, session = SparkSessions(), MagicMock()  # one: it takes long to make
    for number in range(3 * MAX_REASONS):
        sessions._cancel_for_memory(session, f"g{number}", "the heap is full")
    assert len(sessions._out_of_memory) == MAX_REASONS
    assert f"g{3 * MAX_REASONS - 1}" in sessions._out_of_memory


class Gateway:
    """`outcomes` of the next probes; None: it answers."""

    def __init__(self, *outcomes: OSError | None) -> None:
        self.outcomes = list(outcomes)
        self.now = 100.0
        self.watch = GatewayWatch(self.connect, monotonic=lambda: self.now)

    def connect(self) -> None:
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome

    def checks(self) -> list[bool]:
        results = []
        while self.outcomes:
            results.append(self.watch.check())
            self.now += PROBE_INTERVAL
        return results


SILENT = TimeoutError("timed out")
ROW = [SILENT] * (MAX_UNANSWERED - 1)


@pytest.mark.parametrize(
    ("outcomes", "is_open"),
    [
        ([*ROW, None, *ROW, None], True),
        ([ConnectionRefusedError("refused")], False),
        ([OSError(24, "Too many open files")] * 10, True),
    ],
    ids=["answer ends a row", "refused", "error of this process"],
)
def test_what_a_probe_says_about_the_gateway(outcomes, is_open):
    assert set(Gateway(*outcomes).checks()) == {is_open}


@pytest.mark.proves("spark/jvm-accepts-new-connections")
def test_gateway_is_closed_after_several_probes_without_an_answer_which_many_keys_share():
    gateway = Gateway(None, *ROW, SILENT)
    assert all(gateway.watch.check() for _ in range(200))
    assert len(gateway.outcomes) == MAX_UNANSWERED, "one probe"
    gateway.now += PROBE_INTERVAL
    assert gateway.checks() == [True] * (MAX_UNANSWERED - 1) + [False]
    assert not gateway.watch.check(), "a closed gateway is not probed again"
