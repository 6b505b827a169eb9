"""Failed requests that are tried again, in the worker: into the wait queue with a confirm, and what a crash leaves."""

import pytest
from broker_steps import refuse
from worker_bench import QUEUE, REPLIES, RETRIES, WAIT, Bench, bench_fixture

from osrdyne.amqp import Message
from osrdyne.errors import BrokerSilentError
from osrdyne.protocol.messages import DUPLICATE_HEADER, FAILED_DELIVERIES_HEADER, HOPS_HEADER, PATH_HEADER
from osrdyne.protocol.retries import ATTEMPTS_HEADER, DELAY_HEADER, TERMS_HEADER, RetryTerms
from osrdyne.testing.fakes.amqp import FakeConnection
from osrdyne.testing.fakes.broker import Command
from osrdyne_worker import App, Call, RequestError

TERMS = RetryTerms(("5xx",), 3, (1000, 300_000)).to_header()


class RetryBench(Bench):
    """A bench with a wait queue behind the retry exchange."""

    def make_app(self) -> App:
        app = super().make_app()

        @app.handler("/busy")
        async def busy(call: Call) -> None:
            raise RequestError("Too much to do.", code=503)

        return app

    async def open(self) -> None:
        await super().open()
        self.declare_wait()

    async def fail(self, **headers: object) -> None:
        await self.run("/busy", **{TERMS_HEADER: TERMS, **headers})

    def waiting(self) -> list[Message]:
        return [stored.message for stored in self.broker.look_up(WAIT).ready]

    def break_at(self, name: str, target: str, *, done: bool) -> None:
        """The connection is lost at this command, once."""

        async def hook(command: Command) -> None:
            if command == (name, target, done):
                self.broker.hook = None
                self.connection.cut()

        self.broker.hook = hook

    async def connect_again(self) -> None:
        """Reconnect as the worker does: the same queues, a new connection."""
        self.connection = FakeConnection(self.broker, self.connection.options)
        await self.connect()


bench = bench_fixture(RetryBench, stuck_grace=0.0)


async def test_failed_request_goes_to_wait_instead_of_being_answered(bench):
    await bench.fail(**{HOPS_HEADER: 7, FAILED_DELIVERIES_HEADER: 4, "x-own": "kept"})
    [message] = bench.waiting()
    headers = {name: value for name, value in message.headers.items() if name not in {TERMS_HEADER, PATH_HEADER}}
    assert headers == {ATTEMPTS_HEADER: 1, DELAY_HEADER: "1000", "x-own": "kept"}
    assert (message.reply_to, message.correlation_id, message.expiration) == (REPLIES, "c", None)
    assert (bench.statuses(), bench.broker.bodies(QUEUE)) == ([], [])
    # It is acknowledged after the confirm.
    assert [c.name for c in bench.broker.commands if c.name in {"publish", "ack"}][-2:] == ["publish", "ack"]


async def test_last_attempt_is_answered_with_its_outcome_and_the_count(bench):
    await bench.fail(**{ATTEMPTS_HEADER: 2})
    [reply] = bench.replies()
    assert (reply.headers["x-code"], reply.headers[ATTEMPTS_HEADER]) == (503, 3)
    assert bench.waiting() == []


@pytest.mark.parametrize("missing", ["exchange", "queue"])
@pytest.mark.proves("managed/queue-delay-retry-exchange")
async def test_request_that_nothing_takes_is_answered(bench, missing):
    if missing == "exchange":
        del bench.broker.exchanges[RETRIES]
    else:
        bench.broker.delete_queue(WAIT)
    await bench.fail()
    await bench.fail()  # what the first one has cost, a channel, is there again
    assert (bench.statuses(), bench.broker.bodies(QUEUE)) == (["error", "error"], [])


@pytest.mark.proves("managed/queue-delay-retry-exchange")
async def test_wait_queue_that_does_not_confirm_costs_its_request_the_retry_alone(bench):
    refuse(bench.broker, BrokerSilentError("No confirm came."), ("publish", RETRIES, True))
    await bench.fail()
    assert (bench.statuses(), bench.broker_connection.is_closed) == (["error"], False)


@pytest.mark.parametrize("done", [False, True], ids=["before the publish", "before the confirm"])
@pytest.mark.proves("managed/worker-dies-rabbitmq-confirmed")
async def test_connection_lost_at_the_publish_brings_the_request_back(bench, done):
    bench.break_at("publish", RETRIES, done=done)
    await bench.fail()
    assert (bench.returned(), bench.statuses(), len(bench.waiting())) == ([1], [], int(done))


@pytest.mark.proves("managed/worker-dies-acknowledges-request")
async def test_worker_lost_between_confirm_and_acknowledgement_leaves_a_duplicate_that_is_marked(bench):
    bench.break_at("ack", QUEUE, done=False)
    await bench.fail()
    assert (bench.returned(), len(bench.waiting())) == ([1], 1)
    await bench.connect_again()
    await bench.accept()
    await bench.processor.until_idle()
    marks = [(message.headers[ATTEMPTS_HEADER], DUPLICATE_HEADER in message.headers) for message in bench.waiting()]
    assert marks == [(1, False), (1, True)]


@pytest.mark.parametrize(
    ("before", "attempts", "delay"),
    [({}, 1, 1.0), ({ATTEMPTS_HEADER: 1}, 2, 300.0), (None, 2, 599.0)],
    ids=["after the first attempt", "after the second", "sent to an absent worker"],
)
@pytest.mark.proves("managed/worker-ends-request-tried")
async def test_cancel_of_a_request_that_waits_is_answered_when_it_comes_back(bench, before, attempts, delay):
    if before is not None:
        await bench.fail(**before)
    bench.processor.cancel("c", REPLIES, keep_for=600.0)
    await bench.clock.advance(delay)
    await bench.fail(**{ATTEMPTS_HEADER: attempts})
    assert bench.statuses() == ["cancelled"]


async def test_cancel_of_a_request_that_waits_leaves_a_later_one_of_its_name_alone(bench):
    bench.processor.cancel("c", REPLIES, keep_for=600.0)
    await bench.clock.advance(61.0)
    await bench.fail()
    assert (bench.statuses(), len(bench.waiting())) == ([], 1)


async def test_cancel_that_comes_while_a_request_goes_to_wait_is_kept(bench):
    async def hook(command):
        if command.name == "publish" and command.target == RETRIES and command.done:
            bench.processor.cancel("c", REPLIES)

    bench.broker.hook = hook
    await bench.fail()
    await bench.fail(**{ATTEMPTS_HEADER: 1})
    assert bench.statuses() == ["cancelled"]
