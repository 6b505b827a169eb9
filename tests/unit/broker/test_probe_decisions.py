"""What the answers around a probe prove (lifecycle: ready-brings-back, probe), and how it gives requests back."""

import asyncio

import pytest
import structlog

from osrdyne.amqp import QueueInfo
from osrdyne.broker.publishing.publisher import publish_until_taken
from osrdyne.broker.queues.safe_delete import DeleteOutcome, judge_look_up, judge_probe
from osrdyne.errors import BrokerError, BrokerSilentError, BrokerUnavailableError, PublishRefusedError
from osrdyne.testing.clock import VirtualClock


def test_judgement_of_a_passive_declare():
    found = [judge_look_up(QueueInfo(*info)) for info in ((0, 0), (1, 0), (1, 1), (0, 1))]
    # Where there is nothing, the probe must decide.
    assert found == [None, DeleteOutcome.NOT_EMPTY, DeleteOutcome.NOT_EMPTY, DeleteOutcome.IN_USE]


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
def test_probe(first, second, deliveries, outcome):
    assert judge_probe(first, second, deliveries) is outcome


async def test_request_that_is_refused_or_not_confirmed_is_published_until_it_is_taken_or_the_connection_lost():
    for end in (None, BrokerUnavailableError("gone")):
        clock = VirtualClock()
        outcomes: list[BrokerError | None] = [BrokerSilentError("no confirm"), PublishRefusedError("no queue"), end]

        async def publish(outcomes: list[BrokerError | None] = outcomes) -> None:
            outcome = outcomes.pop(0)
            if outcome is not None:
                raise outcome

        giving_back = asyncio.create_task(publish_until_taken(publish, clock=clock, log=structlog.get_logger()))
        await clock.advance(60.0)
        assert (giving_back.done(), outcomes, giving_back.exception()) == (True, [], end)
