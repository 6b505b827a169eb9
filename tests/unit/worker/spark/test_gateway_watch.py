"""When a worker gives up on a JVM that answers no new connection."""

from __future__ import annotations

import pytest

from osrdyne_worker.spark.java.gateway import MAX_UNANSWERED, PROBE_INTERVAL, GatewayWatch


class Gateway:
    """`outcomes` of the next probes; None: it answers."""

    def __init__(self, *outcomes: OSError | None) -> None:
        self.outcomes = list(outcomes)
        self.probes = 0
        self.now = 100.0
        self.watch = GatewayWatch(self.connect, monotonic=lambda: self.now)

    def connect(self) -> None:
        self.probes += 1
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome

    def checks(self) -> list[bool]:
        results = []
        while self.outcomes:
            results.append(self.watch.check())
            self.now += PROBE_INTERVAL
        return results


ROW = [TimeoutError("timed out")] * (MAX_UNANSWERED - 1)


@pytest.mark.parametrize(
    ("outcomes", "is_open"),
    [
        ([*ROW, None, *ROW, None], True),
        ([ConnectionRefusedError("refused")], False),
        ([OSError(24, "Too many open files")] * 10, True),
    ],
    ids=["answer ends a row", "refused", "error of this process"],
)
def test_what_a_probe_says_about_the_gateway(outcomes: list[OSError | None], is_open: bool) -> None:
    assert set(Gateway(*outcomes).checks()) == {is_open}


def test_checks_of_many_keys_share_one_probe() -> None:
    gateway = Gateway(None)
    assert all(gateway.watch.check() for _ in range(200))
    assert gateway.probes == 1


@pytest.mark.proves("spark/jvm-accepts-new-connections")
def test_gateway_is_closed_after_several_probes_without_an_answer() -> None:
    gateway = Gateway(*[TimeoutError("timed out")] * MAX_UNANSWERED)
    assert gateway.checks() == [True] * (MAX_UNANSWERED - 1) + [False]
    assert not gateway.watch.check()
    assert gateway.probes == MAX_UNANSWERED, "a closed gateway is not probed again"
