"""Real pooled processes and the leader that assigns workers to them, as far as the processes can tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from osrdyne import amqp
from osrdyne.protocol.activity import Event
from osrdyne.protocol.control import Generation
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.messages import Response
from osrdyne.protocol.names import Key, QueueName, WorkerId
from osrdyne.protocol.pooled import (
    PROCESS_KEY,
    Assign,
    Assignment,
    AssignmentState,
    Forget,
    ProcessState,
    Question,
    Release,
    ReportState,
    process_state_of,
    question_to_control,
)
from tests.integration.broker_api import until
from tests.integration.worker_process import PATIENCE, Stage, WorkerProcess, stage


@dataclass(eq=False)
class PooledStage:
    stage: Stage
    numbers: count[int] = field(default_factory=count)

    async def start(self, app: str = "tests.integration.pooled_app:app", **options: Any) -> WorkerProcess:
        variables = {"WORKER_PLACEMENT": "pooled", "WORKER_REQUESTS_QUEUES": "[]"}
        return await self.stage.start(app=app, variables=variables, **options)

    def queue(self, key: str) -> QueueName:
        return self.stage.names.request_queue(Key(key))

    def states(self, process: WorkerProcess, since: int = 0) -> list[ProcessState]:
        """Of this process, without the first `since` reports of the stage."""
        return [
            process_state_of(report)
            for report in self.stage.reports[since:]
            if report.event is Event.PROCESS_STATE and report.worker_id == process.environment.worker_id
        ]

    async def ask(self, process: WorkerProcess, question: Question, *, term: int = 1) -> ProcessState:
        """Repeat the question until a state answers it."""
        message = question_to_control(question, Generation(term, 1))
        routing_key = self.stage.names.control_worker_routing_key(process.environment.worker_id)
        since = len(self.stage.reports)
        async with asyncio.timeout(PATIENCE):
            while True:
                place = {"exchange": self.stage.names.control_exchange, "routing_key": routing_key}
                await self.stage.channel.publish(amqp.Message(message.wire_body()), **place)
                for _ in range(50):
                    for state in self.states(process, since):
                        if question.question in state.answers:
                            return state
                    assert process.process.returncode is None, process.lines
                    await asyncio.sleep(0.02)

    async def assign(
        self,
        process: WorkerProcess,
        key: str,
        *,
        config: Mapping[str, Any] | None = None,
        runtime: Mapping[str, Any] | None = None,
        spark: Mapping[str, Any] | None = None,
        running: bool = True,
    ) -> WorkerId:
        """Assign a worker; with `running`, wait until it takes requests. Its queue is declared if need be."""
        number = next(self.numbers)
        names = self.stage.names
        await self.stage.declare_request_queue(self.queue(key))
        environment = WorkerEnvironment(
            worker_id=WorkerId(f"{names.pool}-a{number}"),
            key=Key(key),
            pool=names.pool,
            amqp_uri=self.stage.uri,
            requests_queues=(self.queue(key),),
            activity_exchange=names.activity_exchange,
            control_exchange=names.control_exchange,
            config={"runtime": dict(runtime or {}), "spark": dict(spark or {}), "app": dict(config or {})},
        )
        await self.ask(process, Assign(f"assign {number}", environment, 0, "hash", time.time()))
        if running:
            ready = (environment.worker_id, Event.READY)
            await until(lambda: any((one.worker_id, one.event) == ready for one in self.stage.reports))
        return environment.worker_id

    async def release(self, process: WorkerProcess, worker_id: WorkerId, *, grace: float = 30.0) -> Assignment:
        await self.ask(process, Release(f"release {next(self.numbers)}", worker_id, grace))
        return await self.until_exited(process, worker_id)

    async def until_exited(self, process: WorkerProcess, worker_id: WorkerId) -> Assignment:
        """The end of the worker, which the process reports by itself; then the process forgets it, as the leader
        demands."""
        state = await self.ask(process, ReportState(f"state {next(self.numbers)}"))
        async with asyncio.timeout(PATIENCE):
            while True:
                found = next(one for one in state.assignments if one.worker_id == worker_id)
                if found.state is AssignmentState.EXITED:
                    break
                state = await self.next_state(process)
        await self.ask(process, Forget(f"forget {next(self.numbers)}", worker_id))
        return found

    async def next_state(self, process: WorkerProcess) -> ProcessState:
        since = len(self.stage.reports)
        while not (states := self.states(process, since)):
            assert process.process.returncode is None, process.lines
            await asyncio.sleep(0.02)
        return states[-1]

    async def call(self, key: str, path: str, body: object = b"", **fields: Any) -> Response:
        return await self.stage.caller.call(path, body, queue=self.queue(key), **fields)

    async def send(self, key: str, path: str, body: object = b"", **fields: Any) -> str:
        return await self.stage.caller.send(path, body, queue=self.queue(key), **fields)

    async def waiting(self, key: str) -> int:
        """The requests that RabbitMQ could give to a worker now."""
        return await self.stage.ready_requests(self.queue(key))

    async def until_waiting(self, number: int, *keys: str) -> None:
        """Wait until so many requests of each key wait: RabbitMQ has back what a worker gave back."""
        for key in keys:
            await until(lambda: self.waiting(key), equals=number)  # noqa: B023


@asynccontextmanager
async def pooled_stage(uri: str, pool: str, *, forked: bool = False) -> AsyncIterator[PooledStage]:
    async with stage(uri, pool, PROCESS_KEY, forked=forked) as made:
        yield PooledStage(made)
