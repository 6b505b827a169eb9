"""A real worker in a process of its own, and the broker around it as the controller would have made it."""

import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osrdyne import amqp
from osrdyne.errors import PublishRefusedError
from osrdyne.protocol.activity import ActivityReport, Event, report_from_wire
from osrdyne.protocol.control import Command, ControlMessage, Generation
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.messages import Response
from osrdyne.protocol.names import Key, PoolNames, QueueName, WorkerId
from tests.fork_server import ForkedWorker
from tests.integration.broker_api import until

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
"""Seconds for anything that must happen; a test that needs them has failed. While it hangs, the loop of a module rests,
and RabbitMQ closes its connections after a few minutes."""


@dataclass(eq=False)
class WorkerProcess:
    """One running worker. `lines` is what it has written so far."""

    process: asyncio.subprocess.Process | ForkedWorker
    environment: WorkerEnvironment
    lines: list[str] = field(default_factory=list)
    reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def wait(self) -> int:
        """The exit code, once it has ended and everything it wrote is in `lines`."""
        async with asyncio.timeout(PATIENCE):
            code = await self.process.wait()
            if self.reading is not None:
                await self.reading
        return code

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip())
            print(self.lines[-1], file=sys.stderr)  # for the report of a failed test

    async def until_line(self, text: str) -> None:
        """Wait until it has written a line that holds `text`."""
        await until(lambda: any(text in line for line in self.lines))

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.wait()


class Stage:
    """One pool with one group: its exchanges and its queue, what workers report, and the workers."""

    def __init__(
        self, uri: str, connection: amqp.Connection, channel: amqp.Channel, names: PoolNames, key: Key, *, forked: bool
    ) -> None:
        """`forked`: its workers come from the fork server, instead of a start of Python."""
        self._forked = forked
        self.uri, self.connection, self.channel = uri, connection, channel
        self.names, self.key = names, key
        self.reports: list[ActivityReport] = []
        self.workers: list[WorkerProcess] = []
        self.generation = 0
        self.caller = Caller(self, channel)

    async def declare(self) -> None:
        names = self.names
        await self.channel.declare_exchange(names.requests_exchange, "direct")
        await self.channel.declare_exchange(names.activity_exchange, "fanout")
        await self.channel.declare_exchange(names.control_exchange, "topic")
        await self.channel.declare_queue(names.activity_queue)
        await self.channel.bind_queue(names.activity_queue, names.activity_exchange)
        await self.declare_request_queue(names.request_queue(self.key))
        await self.channel.bind_queue(names.request_queue(self.key), names.requests_exchange, self.key)

    async def declare_request_queue(self, queue: QueueName) -> None:
        await self.channel.declare_queue(queue, arguments={"x-queue-type": "quorum", "x-delivery-limit": 20})

    async def watch_activity(self) -> None:
        channel = await self.connection.channel()
        async for delivery in await channel.consume(self.names.activity_queue, no_ack=True):
            report = report_from_wire(routing_key=delivery.routing_key, headers=delivery.headers, body=delivery.body)
            assert report is not None
            self.reports.append(report)

    def events(self, worker: WorkerProcess) -> list[Event]:
        return [report.event for report in self.reports if report.worker_id == worker.environment.worker_id]

    async def until_reported(self, worker: WorkerProcess, event: Event, *, times: int = 1) -> ActivityReport:
        """Wait for the worker's report number `times` of this event."""
        return await self.until(worker, lambda report: report.event is event, times=times)

    async def until_control_answered(self, worker: WorkerProcess, *, paused: bool) -> ActivityReport:
        """Wait until the worker answers a control message with this state; it may be busy or ready."""
        return await self.until(worker, lambda report: report.details.get("paused") is paused)

    async def resume(self, worker: WorkerProcess) -> None:
        """Pause and resume the worker: then it has read all earlier control messages.

        A pause first, because a report of a worker that is not paused may have another cause than this command."""
        for command, paused in ((Command.PAUSE, True), (Command.RESUME, False)):
            mine = [report for report in self.reports if report.worker_id == worker.environment.worker_id]
            before = sum(report.details.get("paused") is paused for report in mine)
            await self.send_control(command)
            await self.until(
                worker, lambda report, paused=paused: report.details.get("paused") is paused, times=before + 1
            )

    async def until(
        self, worker: WorkerProcess, wanted: Callable[[ActivityReport], bool], *, times: int = 1
    ) -> ActivityReport:
        async with asyncio.timeout(PATIENCE):
            while True:
                mine = [report for report in self.reports if report.worker_id == worker.environment.worker_id]
                matching = [report for report in mine if wanted(report)]
                if len(matching) >= times:
                    return matching[times - 1]
                assert worker.process.returncode is None, worker.lines
                await asyncio.sleep(0.02)

    async def start(
        self,
        *,
        app: str = "workers.examples.echo:app",
        runtime: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        spark: Mapping[str, Any] | None = None,
        queues: tuple[QueueName, ...] = (),
        max_message_bytes: int = 2**24,
        variables: Mapping[str, str] | None = None,
        ready: bool = True,
    ) -> WorkerProcess:
        """Start a worker; with `ready`, wait until it takes requests."""
        environment = WorkerEnvironment(
            worker_id=WorkerId(f"{self.names.pool}-w{len(self.workers)}"),
            key=self.key,
            pool=self.names.pool,
            amqp_uri=self.uri,
            requests_queues=queues or (self.names.request_queue(self.key),),
            activity_exchange=self.names.activity_exchange,
            control_exchange=self.names.control_exchange,
            max_message_bytes=max_message_bytes,
            config={"runtime": dict(runtime or {}), "spark": dict(spark or {}), "app": dict(config or {})},
        )
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WORKER_")}
        given = {**inherited, **environment.to_variables(), "WORKER_AMQP_URI_FILE": "-", **(variables or {})}
        process = await (self._fork if self._forked else self._execute)(app, given)
        worker = WorkerProcess(process, environment)
        worker.reading = asyncio.create_task(worker.read())
        self.workers.append(worker)
        if ready:
            await self.until_reported(worker, Event.READY)
        return worker

    async def _fork(self, app: str, variables: Mapping[str, str]) -> ForkedWorker:
        return await ForkedWorker.start(app, cwd=ROOT, env=variables, standard_input=self.uri.encode())

    async def _execute(self, app: str, variables: Mapping[str, str]) -> asyncio.subprocess.Process:
        program = (sys.executable, "-m", "osrdyne_worker.main", app)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*program, env=variables, cwd=ROOT, stdin=pipe, stderr=pipe)
        assert process.stdin is not None
        process.stdin.write(self.uri.encode())
        process.stdin.close()
        return process

    async def send_control(self, command: Command, *, generation: int | None = None, **details: object) -> None:
        """As the controller does: to the whole group, again until a worker hears it; a newer generation by default."""
        self.generation += 1
        message = ControlMessage(command, Generation(1, generation or self.generation), details)
        routing_key = self.names.control_group_routing_key(self.key)
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    place = {"exchange": self.names.control_exchange, "routing_key": routing_key}
                    return await self.channel.publish(amqp.Message(message.wire_body()), **place, mandatory=True)
                except PublishRefusedError:  # the worker has not bound its control queue yet
                    await asyncio.sleep(0.05)

    async def ready_requests(self, queue: QueueName | None = None) -> int:
        return (await self._request_queue(queue)).ready

    async def consumers(self, queue: QueueName | None = None) -> int:
        return (await self._request_queue(queue)).consumers

    async def _request_queue(self, queue: QueueName | None = None) -> amqp.QueueInfo:
        channel = await self.connection.channel()
        info = await channel.declare_queue(queue or self.names.request_queue(self.key), passive=True)
        await channel.close()
        return info


class Caller:
    """Asks by direct reply-to, with every field under the test's control."""

    def __init__(self, stage: Stage, channel: amqp.Channel) -> None:
        self._stage = stage
        self._channel = channel
        self._answers: dict[str, asyncio.Queue[Response]] = {}
        self.order: list[str] = []
        """The correlation ids of the replies, as they arrived."""

    async def listen(self) -> None:
        async for delivery in await self._channel.consume("amq.rabbitmq.reply-to", no_ack=True):
            response = Response.from_wire(
                headers=delivery.headers, body=delivery.body, content_type=delivery.properties.content_type
            )
            correlation_id = delivery.properties.correlation_id or ""
            self.order.append(correlation_id)
            self._answers[correlation_id].put_nowait(response)

    async def send(
        self,
        path: str | bytes | None = "/echo",
        body: object = b"",
        *,
        headers: Mapping[str, object] | None = None,
        queue: QueueName | None = None,
        expiration: str | None = None,
        content_encoding: str | None = None,
    ) -> str:
        """Publish a request; its correlation id."""
        correlation_id = secrets.token_hex(8)
        self._answers[correlation_id] = asyncio.Queue()
        message = amqp.Message(
            body=body if isinstance(body, bytes) else json.dumps(body).encode(),
            headers={**({} if path is None else {"x-rpc-path": path}), **(headers or {})},
            correlation_id=correlation_id,
            reply_to="amq.rabbitmq.reply-to",
            content_encoding=content_encoding,
            expiration=expiration,
        )
        exchange, routing_key = ("", queue) if queue else (self._stage.names.requests_exchange, self._stage.key)
        await self._channel.publish(message, exchange=exchange, routing_key=routing_key)
        return correlation_id

    async def answer(self, correlation_id: str) -> Response:
        """The next reply to that request, progress or not."""
        async with asyncio.timeout(PATIENCE):
            return await self._answers[correlation_id].get()

    async def call(self, path: str | bytes | None = "/echo", body: object = b"", **fields: Any) -> Response:
        return await self.answer(await self.send(path, body, **fields))


@asynccontextmanager
async def stage(
    uri: str, pool: str, key: str = "k", *, declare: bool = True, forked: bool = False
) -> AsyncIterator[Stage]:
    """Set the broker up, and end every worker at the end."""
    connection = await amqp.connect(amqp.ConnectionOptions(uri=uri, name="osrdyne test"))
    channel = await connection.channel(confirms=True)
    result = Stage(uri, connection, channel, PoolNames(pool), Key(key), forked=forked)
    await result.declare()
    if not declare:
        await channel.delete_queue(result.names.request_queue(result.key))
    watching = asyncio.create_task(result.watch_activity())
    listening = asyncio.create_task(result.caller.listen())
    try:
        yield result
    finally:
        for task in (watching, listening):
            task.cancel()
        for worker in result.workers:
            await worker.kill()
        await connection.close()
