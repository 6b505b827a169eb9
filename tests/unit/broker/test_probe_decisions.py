"""What the answers around a probe prove (lifecycle: ready-brings-back, probe)."""

from __future__ import annotations

import pytest

from osrdyne.amqp import QueueInfo
from osrdyne.broker.queues.safe_delete import DeleteOutcome, judge_look_up, judge_probe


@pytest.mark.parametrize(
    ("info", "outcome"),
    [
        (QueueInfo(0, 0), None),
        (QueueInfo(1, 0), DeleteOutcome.NOT_EMPTY),
        (QueueInfo(1, 1), DeleteOutcome.NOT_EMPTY),
        (QueueInfo(0, 1), DeleteOutcome.IN_USE),
    ],
    ids=["nothing: the probe must decide", "ready", "ready and consumed", "consumed"],
)
def test_judgement_of_a_passive_declare(info: QueueInfo, outcome: DeleteOutcome | None) -> None:
    assert judge_look_up(info) is outcome


OURS = QueueInfo(0, 1)
ROWS = {
    "twice ours alone: proven": (OURS, OURS, 0, None),
    "a delivery, although the first answer overtook it": (OURS, OURS, 1, DeleteOutcome.NOT_EMPTY),
    "ready at first": (QueueInfo(1, 1), OURS, 0, DeleteOutcome.NOT_EMPTY),
    "ready later": (OURS, QueueInfo(1, 1), 0, DeleteOutcome.NOT_EMPTY),
    "another consumer at first": (QueueInfo(0, 2), OURS, 0, DeleteOutcome.IN_USE),
    "another consumer later": (OURS, QueueInfo(0, 2), 0, DeleteOutcome.IN_USE),
    "not even ours: no answer [ev2_passive]": (QueueInfo(0, 0), QueueInfo(0, 0), 0, DeleteOutcome.NO_EVIDENCE),
    "ours only once": (QueueInfo(0, 0), OURS, 0, DeleteOutcome.NO_EVIDENCE),
}


@pytest.mark.parametrize(("first", "second", "deliveries", "outcome"), ROWS.values(), ids=ROWS.keys())
def test_probe(first: QueueInfo, second: QueueInfo, deliveries: int, outcome: DeleteOutcome | None) -> None:
    assert judge_probe(first, second, deliveries) is outcome
