"""A worker process whose queues change while requests wait in it, as after a change of the routes: real RabbitMQ."""

from __future__ import annotations

import pytest
from broker_api import until

from osrdyne.amqp import Message
from osrdyne.protocol.control import Command
from osrdyne.protocol.names import QueueName
from osrdyne.protocol.statuses import Status

pytestmark = [pytest.mark.rabbitmq4, pytest.mark.usefixtures("processes")]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.proves("managed/priorities-change-requests-wait")
async def test_waiting_requests_keep_their_place_through_changes_of_the_levels(pool, concurrency):
    """Each return to the queue would put a request behind later ones, and count as a failed delivery before 4.3: here
    RabbitMQ drops a request at its second one."""
    base, urgent, *others = (pool.names.request_queue(pool.key, level) for level in (None, 4, 2, 9))
    await pool.channel.delete_queue(base)
    for queue in (base, urgent, *others):
        await pool.channel.declare_queue(queue, arguments={"x-queue-type": "quorum", "x-delivery-limit": 1})
    await pool.start(runtime={"concurrency": concurrency}, queues=(base,))
    replies = QueueName(f"{pool.names.pool}-callers")
    await pool.channel.declare_queue(replies, exclusive=True)
    for number in range(concurrency):
        request = Message(
            b'{"seconds": 600}', headers={"x-rpc-path": "/sleep"}, correlation_id=f"c{number}", reply_to=replies
        )
        await pool.channel.publish(request, exchange="", routing_key=base)
    waiting = [await pool.caller.send(queue=base) for _ in range(4)]
    for number in range(20):
        added = others[number % 2]
        await pool.send_control(Command.QUEUES, queues=[*sorted([added, urgent]), base])
        await until(lambda: pool.consumers(added), equals=1)  # noqa: B023
        if number == 5:
            waiting = [await pool.caller.send(queue=urgent) for _ in range(4)] + waiting
        await pool.send_control(Command.QUEUES, queues=[urgent, base] if number >= 5 else [base])
        await until(lambda: pool.consumers(added), equals=0)  # noqa: B023
    for number in range(concurrency):
        await pool.send_control(Command.CANCEL, correlation_id=f"c{number}", reply_to=replies)
    answers = [await pool.caller.answer(one) for one in waiting]
    assert {answer.status for answer in answers} == {Status.OK}
    if concurrency == 1:
        assert [one for one in pool.caller.order if one in waiting] == waiting
