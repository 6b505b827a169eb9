"""A worker process whose queues change while requests wait in it, as after a change of the routes: real RabbitMQ."""

from __future__ import annotations

import asyncio

import pytest
from worker_process import PATIENCE, Stage, stage

from osrdyne.amqp import Message
from osrdyne.protocol.control import Command
from osrdyne.protocol.names import QueueName
from osrdyne.protocol.statuses import Status

pytestmark = [pytest.mark.rabbitmq4, pytest.mark.usefixtures("processes")]


@pytest.fixture
async def scene(broker, pool_id):
    async with stage(broker.amqp_uri, pool_id) as result:
        yield result


async def until_consumed(scene: Stage, queue: QueueName, *, consumed: bool) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await scene._request_queue(queue)).consumers == (0 if consumed else 1):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.proves("managed/priorities-change-requests-wait")
async def test_waiting_requests_keep_their_place_through_changes_of_the_levels(scene, concurrency):
    """Each return to the queue would put a request behind later ones, and count as a failed delivery before 4.3: here
    RabbitMQ drops a request at its second one."""
    base, urgent, *others = (scene.names.request_queue(scene.key, level) for level in (None, 4, 2, 9))
    await scene.channel.delete_queue(base)
    for queue in (base, urgent, *others):
        await scene.channel.declare_queue(queue, arguments={"x-queue-type": "quorum", "x-delivery-limit": 1})
    await scene.start(runtime={"concurrency": concurrency}, queues=(base,))
    replies = QueueName(f"{scene.names.pool}-callers")
    await scene.channel.declare_queue(replies, exclusive=True)
    for number in range(concurrency):
        request = Message(
            b'{"seconds": 600}', headers={"x-rpc-path": "/sleep"}, correlation_id=f"c{number}", reply_to=replies
        )
        await scene.channel.publish(request, exchange="", routing_key=base)
    waiting = [await scene.caller.send(queue=base) for _ in range(4)]
    for number in range(20):
        added = others[number % 2]
        await scene.send_control(Command.QUEUES, queues=[*sorted([added, urgent]), base])
        await until_consumed(scene, added, consumed=True)
        if number == 5:
            waiting = [await scene.caller.send(queue=urgent) for _ in range(4)] + waiting
        await scene.send_control(Command.QUEUES, queues=[urgent, base] if number >= 5 else [base])
        await until_consumed(scene, added, consumed=False)
    for number in range(concurrency):
        await scene.send_control(Command.CANCEL, correlation_id=f"c{number}", reply_to=replies)
    answers = [await scene.caller.answer(one) for one in waiting]
    assert {answer.status for answer in answers} == {Status.OK}
    if concurrency == 1:
        assert [one for one in scene.caller.order if one in waiting] == waiting
