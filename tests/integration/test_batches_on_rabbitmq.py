"""Batches through real worker processes and a real RabbitMQ."""

from __future__ import annotations

import asyncio
import json

import pytest
from worker_process import Stage

from osrdyne.protocol.statuses import Status

pytestmark = pytest.mark.usefixtures("processes")


@pytest.mark.proves("spark/one-request-batch-makes")
async def test_requests_are_collected_and_a_poison_call_fails_alone(pool: Stage) -> None:
    bodies = [b"poison" if number == 17 else f"request {number}".encode() for number in range(200)]
    asking = [asyncio.create_task(pool.caller.call("/echo_batch", body)) for body in bodies]
    await pool.start()  # all of them wait in their queue by now, or soon
    responses = await asyncio.gather(*asking)
    assert [number for number, response in enumerate(responses) if response.status != Status.OK] == [17]
    answers = [json.loads(response.body) for response in responses if response.status == Status.OK]
    assert [answer["body"].encode() for answer in answers] == [body for body in bodies if body != b"poison"]
    assert max(answer["batch"] for answer in answers) > 1
    assert await pool.ready_requests() == 0
