"""The environment of a worker for tests of what is done with one."""

from dataclasses import replace
from typing import Any

from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import Key, PoolNames, WorkerId

SECRET = "s3cret"


def worker_environment(worker_id: str = "w1", key: str = "k", **changes: Any) -> WorkerEnvironment:
    """That of a worker of the pool `p` with one priority."""
    names = PoolNames("p")
    made = WorkerEnvironment(
        worker_id=WorkerId(worker_id),
        key=Key(key),
        pool="p",
        amqp_uri=f"amqp://user:{SECRET}@host/vhost",
        requests_queues=(names.request_queue(Key(key), 9), names.request_queue(Key(key))),
        activity_exchange=names.activity_exchange,
        control_exchange=names.control_exchange,
        retry_exchange=names.retry_exchange,
        config={"app": {"path": "/data/é", "nul": "\0", "list": [1, None]}},
        poison={"00": 1.5},
    )
    return replace(made, **changes)
