"""The RabbitMQ users of workers whose start is repeated: a real leader on fakes, in virtual time."""

from collections.abc import Callable, Set
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from osrdyne.broker.management.credentials import ScopedCredentials, user_prefix
from osrdyne.broker.topology.layout import QueueLayout
from osrdyne.daemon import wiring
from osrdyne.drivers.base import Instance, WorkerSpec
from osrdyne.errors import DriverUnavailableError, SlotTakenError
from osrdyne.pool.context import TermContext
from osrdyne.protocol.activity import Event
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.drivers import FakeDriver
from osrdyne.testing.fakes.broker import FakeBroker
from osrdyne.testing.fakes.management import FakeManagement
from osrdyne.testing.fakes.stack import POOL, Stack

A = Key("a")
PREFIX = user_prefix(POOL, "/")
START_TIMEOUT, INTERVAL = 300.0, 60.0
SILENT = DriverUnavailableError("The engine does not answer.")


class FakeUsers(FakeManagement):
    """RabbitMQ's users, with their passwords."""

    def __init__(self) -> None:
        super().__init__(FakeBroker(VirtualClock()))
        self.vhost = "/"
        self.passwords: dict[str, str] = {}
        self.created = 0

    async def list_users(self, prefix: str) -> list[str]:
        return [user for user in self.passwords if user.startswith(prefix)]

    async def put_user(self, name: str, *, password: str) -> None:
        self.passwords[name] = password
        self.created += 1

    async def _ignore(self, *_: object, **__: object) -> None:
        """Of no interest here."""

    put_user_limit = put_permissions = put_topic_permissions = _ignore

    async def delete_user(self, name: str) -> None:
        del self.passwords[name]

    async def list_exchanges(self) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def users(monkeypatch):
    made = FakeUsers()

    def choose(
        context: TermContext, *, layout: QueueLayout, alive: Callable[[], Set[WorkerId]], **_: Any
    ) -> ScopedCredentials:
        return ScopedCredentials(
            names=context.names,
            layout=layout,
            management=made,
            uri="amqp://daemon@nowhere/",
            alive=alive,
            start_timeout=START_TIMEOUT,
            interval=INTERVAL,
            clock=context.clock,
        )

    monkeypatch.setattr(wiring, "choose_credentials", choose)
    return made


async def require(stack: Stack) -> None:
    stack.require(A)
    await stack.clock.settle()


def users_of_workers(driver: FakeDriver) -> list[str]:
    return [f"{PREFIX}{worker.instance.worker_id}" for worker in driver.workers_of(A)]


def lose_answers(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of the driver takes effect, but its answer is lost, and so is every listing."""
    start = driver.start

    async def start_and_fail(spec: WorkerSpec) -> Instance:
        await start(spec)
        raise SILENT

    async def fail() -> list[Instance]:
        raise SILENT

    monkeypatch.setattr(driver, "start", start_and_fail)
    monkeypatch.setattr(driver, "list_instances", fail)


@pytest.mark.proves("workers/platform-answer-start-worker")
async def test_repeated_start_uses_the_user_of_the_attempt_before(stack, users):
    for _ in range(200):
        stack.driver.fail_next_start(SILENT)
    await require(stack)
    await stack.clock.advance(2 * START_TIMEOUT)
    assert stack.driver.count("start", A) == 201
    (worker,) = stack.driver.workers_of(A)
    uri = urlsplit(worker.spec.environment.amqp_uri)
    assert users.created == 1
    assert users.passwords == {unquote(uri.username or ""): uri.password}
    assert list(users.passwords) == users_of_workers(stack.driver)


@pytest.mark.proves("workers/platform-answer-start-worker")
async def test_worker_whose_start_was_not_confirmed_keeps_its_user(stack, users):
    """The second attempt finds the slot taken: by the worker of the first one, which uses the same user."""
    with pytest.MonkeyPatch.context() as patch:
        lose_answers(stack.driver, patch)
        await require(stack)
        await stack.clock.advance(10.0)
        assert stack.driver.count("start", A) > 1
    await stack.report("a", Event.READY)
    await stack.clock.advance(2 * START_TIMEOUT)
    assert list(users.passwords) == users_of_workers(stack.driver)
    instances = [worker.instance for worker in stack.driver.workers_of(A)]
    assert [entry.instance for entry in stack.instances_of(A)] == instances


async def test_worker_that_has_ended_is_not_started_again_under_its_id(stack, users):
    stack.driver.fail_next_start(SILENT)
    await require(stack)
    await stack.clock.advance(3.0)
    (first,) = stack.driver.workers_of(A)
    stack.driver.exit_instance(first.instance.instance_id, 1)
    await stack.clock.advance(60.0)
    (second,) = stack.driver.workers_of(A)
    assert second.instance.worker_id != first.instance.worker_id
    assert list(users.passwords) == users_of_workers(stack.driver)


async def test_user_of_a_start_whose_slot_another_worker_has_is_deleted(stack, users):
    stack.driver.fail_next_start(SILENT)
    stack.driver.fail_next_start(SlotTakenError("A container of that name exists."))
    await require(stack)
    await stack.clock.settle()
    assert len(users.passwords) == 1
    await stack.clock.advance(3.0)
    assert users.passwords == {}
