"""A real pooled process with the workers of many keys, on a real RabbitMQ."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from osrdyne.protocol.activity import Event
from osrdyne.protocol.messages import Response
from osrdyne.protocol.pooled import AssignmentState, ReportState
from osrdyne.protocol.statuses import Status
from osrdyne_worker.runtime.exit import ExitCode

pytestmark = [pytest.mark.one_rabbitmq, pytest.mark.usefixtures("processes")]

KEYS = 50
REQUESTS = 1000
SEED = 20261122


def document(response: Response) -> dict[str, Any]:
    assert response.status == Status.OK, response
    read: dict[str, Any] = json.loads(response.body)
    return read


@pytest.mark.proves("pooled/worker-one-key-start")
async def test_fifty_keys_in_one_process_never_answer_for_each_other(pooled):
    process = await pooled.start()
    keys = [f"key {number}/é" for number in range(KEYS)]
    await asyncio.gather(
        *(
            pooled.assign(process, key, config={"greeting": f"hello {key}"}, runtime={"stuck_grace": 1.0})
            for key in keys
        )
    )
    failed = await pooled.assign(process, "failing", config={"load_error": "no data here"}, running=False)
    blocked = await pooled.assign(process, "blocking", runtime={"stuck_grace": 0.5, "max_abandoned": 0})
    stuck = await pooled.send("blocking", "/block", expiration="10000", headers={"x-test": "blocked"})

    rng = random.Random(SEED)
    expected: dict[str, dict[str, int]] = {key: {} for key in keys}
    sent: list[tuple[str, str, int, dict[str, int], str]] = []
    answers = Counter[str]()
    for number in range(REQUESTS):
        key, path = rng.choice(keys), rng.choice(("/put", "/put", "/get", "/get_on_loop", "/fail", "/exit"))
        body = {f"name{rng.randrange(5)}": number} if path == "/put" else {}
        expected[key].update(body)  # one request of a key runs at a time, in the order of its queue
        correlation_id = await pooled.send(key, path, body, headers={"x-test": f"request {number}"})
        sent.append((key, path, number, dict(expected[key]), correlation_id))
    for key, path, number, values, correlation_id in sent:
        response = await pooled.stage.caller.answer(correlation_id)
        answers[path] += 1
        if path in {"/fail", "/exit"}:
            assert response.status == Status.ERROR
            assert path != "/fail" or f"of {key}" in json.loads(response.body)["error"]["message"]
            continue
        answer = document(response)
        assert answer["key"] == [key] * 3
        assert answer["values"] == answer["session"] == values
        assert (answer["greeting"], answer["header"]) == (f"hello {key}", f"request {number}")
    assert sum(answers.values()) == REQUESTS

    assert (await pooled.stage.caller.answer(stuck)).status == Status.EXPIRED
    exits = {one: (await pooled.until_exited(process, one)).exit for one in (failed, blocked)}
    assert [one.code for one in exits.values()] == [ExitCode.START_FAILED, ExitCode.UNRECOVERABLE]
    assert "no data here" in str(exits[failed])
    assert "did not end when it was cancelled" in str(exits[blocked])
    state = await pooled.ask(process, ReportState("last"))
    assert sum(one.state is AssignmentState.RUNNING for one in state.assignments) == KEYS
    assert state.requests >= REQUESTS
    assert state.memory.pss is not None and 0 < state.memory.limit.share <= 1
    assert not any(pooled.stage.uri in line for line in process.lines)


async def test_released_worker_finishes_and_its_successor_elsewhere_takes_the_rest(pooled, tmp_path):
    first, second = await pooled.start(), await pooled.start()
    stopped = tmp_path / "stopped"
    worker = await pooled.assign(first, "k", config={"stopped_file": str(stopped)})
    requests = [await pooled.send("k", "/put", {"number": number}) for number in range(300)]
    assert (await pooled.release(first, worker)).exit.code == ExitCode.STOPPED
    assert stopped.exists()
    await pooled.assign(second, "k")
    for number, correlation_id in enumerate(requests):
        assert document(await pooled.stage.caller.answer(correlation_id))["values"] == {"number": number}
    assert Event.STOPPING in [one.event for one in pooled.stage.reports if one.worker_id == worker]
