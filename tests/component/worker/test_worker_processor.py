"""The way of a request through the worker, on a fake broker: answers, requests given back, and the races between."""

import asyncio

import pytest
from worker_bench import LONG_PATH, QUEUE, REPLIES, Bench, bench_fixture, until

from osrdyne.amqp import Message
from osrdyne.amqp.direct_reply_to import AT_LEAST, UNTIL_NO_DEADLINE
from osrdyne.errors import BrokerAccessError, MessageTooLargeError, QueueFullError
from osrdyne.protocol.activity import COMPLETED_ROUTE_HEADER, FULL_QUEUE, NO_PERMISSION, WAITING_ANSWERS_FIELD, Event
from osrdyne.protocol.messages import ROUTE_HEADER
from osrdyne.protocol.names import PoolNames, QueueName, ReplyAddresses
from osrdyne.protocol.progress import JOB_PROGRESS_INTERVAL, JobProgress
from osrdyne_worker import Answer, App, Call, RequestError
from osrdyne_worker.requests.probe import ProbeIntake

LARGE = {"x-large": "é" * 100_000}
ANSWERS: dict[str, object] = {
    "/large": bytes(2**20 + 1),
    "/large_code": Answer("x", code=2**70),
    "/odd_headers": Answer("x", headers={"x-odd": object()}),
    "/large_headers": Answer("x", headers=LARGE),
    "/refuse_at_length": RequestError("🚄" * 50_000),
    "/half_a_character": RequestError("no \ud800", details={"name": "\ud800"}),
}


class AnswersBench(Bench):
    """Handlers whose answers AMQP cannot carry."""

    def make_app(self) -> App:
        app = super().make_app()

        async def answer(call: Call) -> object:
            found = ANSWERS[call.path]
            if isinstance(found, RequestError):
                raise found
            return found

        for path in ANSWERS:
            app.handler(path)(answer)

        @app.handler("/large_progress")
        async def large_progress(call: Call) -> str:
            call.progress(Answer("x", headers=LARGE))
            return "done"

        return app

    async def open(self) -> None:
        """As the real channel does: nothing is sent whose headers cannot be encoded or do not fit into a frame."""
        await super().open()

        async def encode(message: Message) -> None:
            if len(message.properties().marshal()) > 100_000:
                raise MessageTooLargeError("The headers of the message have 131073 bytes.")

        self.around_replies(before=encode)


class OtherAddresses(Bench):
    addresses = ReplyAddresses(PoolNames("pool"), ("other-",))


class DirectBench(Bench):
    retry_exchange = None


bench = bench_fixture(AnswersBench, stuck_grace=0.0)


@pytest.fixture
async def probes(bench):
    await bench.channel.cancel(bench.consumer)
    intake = ProbeIntake(bench.broker_connection, bench.processor)
    yield intake
    intake.close()


async def test_reply_is_in_its_queue_before_the_request_is_acknowledged(bench):
    await bench.take("/wait")
    await bench.finish()
    assert bench.statuses() == ["ok"]
    assert [c.name for c in bench.broker.commands if c.name in {"publish", "ack"}][-1:] == ["ack"]


@pytest.mark.parametrize(("bench", "length"), [(DirectBench, None), (AnswersBench, 200)], indirect=["bench"])
async def test_long_name_of_a_route_makes_no_long_report(bench, length):
    """In a direct pool it is the caller's word. A report that is too large would end the worker."""
    bench.go.set()
    await bench.take("/wait", **{ROUTE_HEADER: b"\xff" * 100_000})
    route = (await bench.completed()).headers.get(COMPLETED_ROUTE_HEADER)
    assert (route and len(str(route))) == length


async def test_cancel_of_a_running_request_is_answered_once(bench):
    await bench.begin("/wait")
    bench.processor.cancel("c", "another client")
    await asyncio.sleep(0)
    assert not bench.calls[0].cancelled
    for _ in range(2):
        bench.processor.cancel("c", REPLIES)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.calls[0].cancelled) == (["cancelled"], True)


@pytest.mark.parametrize("bench", [OtherAddresses], indirect=True)
@pytest.mark.parametrize(("reason", "settled"), [("cancel", ["ack"]), ("requeue", ["nack"])])
@pytest.mark.proves("hostile/message-reaches-queue-pool")
async def test_interrupted_request_with_a_refused_reply_address_is_not_answered(bench, reason, settled):
    """A cancel that arrives before the first step must not send its answer to a queue of the pool's own."""
    await bench.take("/wait")
    if reason == "cancel":
        bench.processor.cancel("c", REPLIES)
    else:
        bench.processor.requeue()
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.calls, bench.settlements()) == ([], [], settled)


@pytest.mark.parametrize("statuses", [["cancelled", "ok"], ["ok", "ok"]], ids=["before it", "after its answer"])
async def test_cancel_counts_for_one_request(bench, statuses):
    if statuses[0] == "ok":
        await bench.take("/wait")
        await bench.finish()
    bench.processor.cancel("c", REPLIES)
    while len(bench.statuses()) < 2:
        await bench.take("/wait")
        await bench.finish()
    assert bench.statuses() == statuses


async def test_cancel_of_a_request_that_is_being_requeued_is_for_its_next_delivery(bench):
    await bench.begin("/wait")
    bench.processor.requeue(also_running=True)
    bench.processor.cancel("c", REPLIES)
    await bench.accept()
    await bench.finish()
    assert (bench.statuses(), len(bench.calls)) == (["cancelled"], 1)


async def test_cancel_while_the_answer_is_being_sent_comes_too_late(bench):
    async def cancel(message):
        bench.processor.cancel("c", REPLIES)
        await asyncio.sleep(0)

    bench.around_replies(before=cancel)
    bench.go.set()
    await bench.run("/wait")
    assert bench.statuses() == ["ok"]


@pytest.mark.parametrize(
    ("also_running", "statuses", "returned"),
    [(False, ["ok"], [0]), (True, [], [0, 0])],
    ids=["that waits", "that runs"],
)
async def test_request_is_requeued_without_a_failed_delivery(bench, also_running, statuses, returned):
    await bench.begin("/wait")
    await bench.take("/wait", correlation_id="second")
    await asyncio.sleep(0)
    await bench.channel.cancel(bench.consumer)
    bench.processor.requeue(also_running=also_running)
    await bench.finish()
    assert (bench.statuses(), bench.returned()) == (statuses, returned)


async def test_queue_that_is_no_longer_consumed_requeues_only_its_requests(bench):
    await bench.take("/wait")
    await until(bench.running.is_set)
    async with bench.consuming("first", "second") as queues:
        for queue in ("first", "second"):
            await bench.publish("/wait", queue=queue)
        await until(lambda: bench.processor.in_flight == 3)
        queues.set((QueueName("third"), QueueName("second")))
        await until(lambda: bench.processor.in_flight == 2)
        assert [len(bench.broker.look_up(queue).ready) for queue in ("first", "second")] == [1, 0]
        await bench.finish()
    assert bench.broker.count("nack", "second") == 0


async def test_lost_channel_ends_the_work_without_an_answer(bench):
    await bench.begin("/wait")
    await bench.channel.close()
    bench.processor.lose(bench.channel)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.calls[0].cancelled) == ([], True)


@pytest.mark.parametrize("path", ["/deaf", LONG_PATH], ids=["short", "long"])
async def test_handler_that_ignores_its_cancel_is_answered_and_ends_the_worker(bench, path):
    await bench.begin(path)
    bench.processor.cancel("c", REPLIES)
    await until(lambda: bench.exits)
    assert len(str(bench.exits[0])) < 400, "the reason repeats little of the path"
    assert bench.statuses() == ["cancelled"]
    await bench.finish()
    assert bench.statuses() == ["cancelled"]


@pytest.mark.parametrize(("path", "code"), [("/large", 413), ("/large_code", 500)])
async def test_report_has_the_status_and_code_that_the_caller_got(bench, path, code):
    """A report with a code that AMQP cannot carry would end the worker."""
    await bench.take(path)
    completed = await bench.completed()
    assert (bench.statuses(), completed.headers["x-status"], completed.headers["x-code"]) == (["error"], b"error", code)


async def test_failed_report_does_not_settle_the_request_again(bench, monkeypatch):
    def fail(*arguments, **named):
        bench.reporter.dropped()
        raise RuntimeError("the report failed")

    monkeypatch.setattr(bench.reporter, "completed", fail)
    await bench.take("/wait")
    await bench.finish()
    assert (bench.statuses(), bench.settlements()) == (["ok"], ["ack"])
    assert not bench.channel.is_closed


ODD = ["/odd_headers", "/large_headers", "/refuse_at_length", "/half_a_character", "/" + "nowhere" * 15_000]


@pytest.mark.parametrize("path", ODD, ids=lambda path: path[:20])
async def test_only_headers_that_amqp_cannot_carry_replace_answers(bench, path):
    await bench.run(path)
    assert (bench.statuses(), bench.unfinished()) == (["error"], 0)
    assert ("headers of the answer" in bench.bodies()["c"]) == path.endswith("_headers")


async def test_progress_with_headers_that_are_too_large_is_not_the_last_answer(bench):
    await bench.run("/large_progress", **{"x-progress": True})
    assert bench.statuses() == ["error", "ok"]
    assert bench.replies()[0].headers["x-non-terminating-response"] is True


class JobsOfSession:
    """The progress of jobs that the session reports, which each query moves on by one task of four."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[str] = []
        self.failures: list[Exception] = []
        monkeypatch.setattr(bench.processor._job_progress, "_dispatcher", self)

    async def job_progress(self, session: object, group_id: str) -> JobProgress:
        if self.failures:
            raise self.failures.pop()
        self.groups.append(group_id)
        return JobProgress(jobs=1, tasks_done=min(4, len(self.groups)), tasks_total=4, rows=10)


async def work_for(bench: Bench, seconds: int, **headers: object) -> None:
    """A request runs for some seconds and is answered."""
    await bench.begin("/wait", **headers)
    for _ in range(seconds):
        await bench.clock.advance(JOB_PROGRESS_INTERVAL)
    bench.go.set()
    await bench.processor.until_idle()
    await bench.clock.advance(10 * JOB_PROGRESS_INTERVAL)


async def test_progress_of_jobs_reaches_the_caller_every_second_and_before_the_answer(bench, monkeypatch):
    jobs = JobsOfSession(bench, monkeypatch)
    jobs.failures.append(RuntimeError("the session is busy"))
    await work_for(bench, 8, **{"x-job-progress": True})
    *parts, last = bench.replies()
    assert [JobProgress.from_json(part.body).tasks_done for part in parts] == [1, 2, 3, 4]
    for part in parts:
        assert (part.headers["x-job-progress"], part.headers["x-non-terminating-response"]) == (True, True)
    assert (last.body, "x-job-progress" in last.headers) == (b"done", False)
    assert len(set(jobs.groups)) == 1


@pytest.mark.parametrize("headers", [{}, {"x-progress": True}, {"x-job-progress": 7}], ids=str)
async def test_other_callers_get_no_progress_of_jobs(bench, monkeypatch, headers):
    """They would take it for the answer, or for a part of it."""
    jobs = JobsOfSession(bench, monkeypatch)
    await work_for(bench, 3, **headers)
    assert ([reply.body for reply in bench.replies()], jobs.groups) == ([b"done"], [])


async def test_cancelled_request_gets_no_more_progress_of_jobs(bench, monkeypatch):
    JobsOfSession(bench, monkeypatch)
    await bench.begin("/deaf", **{"x-job-progress": True})
    await bench.clock.advance(JOB_PROGRESS_INTERVAL)
    bench.processor.cancel("c", REPLIES)
    await bench.clock.settle()
    before = len(bench.replies())
    await bench.clock.advance(3 * JOB_PROGRESS_INTERVAL)
    assert (len(bench.replies()), bench.statuses()[-1]) == (before, "cancelled")
    await bench.finish()
    await bench.clock.advance(JOB_PROGRESS_INTERVAL)


@pytest.mark.parametrize(
    ("error", "reason"), [(QueueFullError("full"), FULL_QUEUE), (BrokerAccessError("refused"), NO_PERMISSION)]
)
async def test_refused_answer_is_tried_for_minutes_then_the_request_goes_back_as_a_failure(bench, error, reason):
    attempts = []

    async def refuse(message):
        attempts.append(message.correlation_id)
        raise error

    bench.around_replies(before=refuse)
    bench.go.set()
    await bench.take("/wait")
    await bench.channel.cancel(bench.consumer)
    await bench.clock.advance(UNTIL_NO_DEADLINE - 10.0)
    assert (bench.returned(), bench.processor.in_flight) == ([], 1)
    async with bench.reporting() as reports:
        bench.reporter.report(Event.BUSY)
        await bench.clock.advance(20.0)
        await bench.processor.until_idle()
        bench.reporter.flush()
        await bench.clock.settle()
        reported = [one.details.get(WAITING_ANSWERS_FIELD) for one in reports()]
        assert (reported[-1], [one for one in reported if one]) == (None, [{reason: 1}])
    assert (set(attempts), bench.returned()) == ({"c"}, [1])


async def test_expired_request_is_answered_and_not_run(bench):
    await bench.run("/wait", **{"x-deadline": 1})
    assert (bench.statuses(), bench.calls) == (["expired"], [])


async def test_answer_to_an_expired_request_is_tried_again_because_clocks_differ(bench):
    refusals = [BrokerAccessError("no permission")] * 4

    async def refuse(message):
        if refusals:
            raise refusals.pop()

    bench.around_replies(before=refuse)
    await bench.take("/wait", **{"x-deadline": 1})
    await bench.clock.advance(AT_LEAST - 1.0)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.calls) == (["expired"], [])


@pytest.mark.parametrize("steps", range(12))
async def test_cancel_at_every_step_settles_the_request_once(bench, steps):
    """Whenever a cancel comes, the request is answered exactly once and leaves the queue."""
    bench.go.set()
    await bench.take("/wait")
    for _ in range(steps):
        await asyncio.sleep(0)
    bench.processor.cancel("c", REPLIES)
    await bench.processor.until_idle()
    assert bench.statuses() in ([["cancelled"]] if steps == 0 else [["ok"], ["cancelled"]])
    assert len(bench.calls) <= steps
    assert bench.unfinished() == 0


async def test_handler_that_was_answered_for_does_not_answer_a_second_time(bench):
    """Also when it ends while the answer is on its way."""

    async def end_meanwhile(command):
        if command == ("publish", REPLIES, False):
            bench.go.set()
            for _ in range(20):
                await asyncio.sleep(0)

    await bench.begin("/deaf")
    bench.broker.hook = end_meanwhile
    bench.processor.cancel("c", REPLIES)
    await bench.processor.until_idle()
    assert (bench.statuses(), bench.broker.count("ack")) == (["cancelled"], 1)


async def test_probe_takes_exactly_one_request_and_its_report_repeats_the_id(bench, probes):
    assert not await probes.take_one("p", [QueueName(QUEUE)]), "there is no request"
    for name in "ab":
        await bench.publish("/wait", correlation_id=name)
    bench.go.set()
    assert await probes.take_one("p", [QueueName("missing"), QueueName(QUEUE)])
    completed = await bench.completed()
    assert (bench.by_name(), len(bench.broker.look_up(QUEUE).ready)) == ({"a": "ok"}, 1)
    assert (completed.headers["x-probe"], completed.details["count"]) == ("p", 1)


async def test_probe_of_a_lost_connection_returns_to_its_queue(bench, probes):
    await bench.publish("/wait")
    assert await probes.take_one("p", [QueueName(QUEUE)])
    await bench.running.wait()
    probes.close()
    await bench.processor.until_idle()
    await asyncio.sleep(0)
    assert (bench.statuses(), bench.unfinished()) == ([], 1)
