"""Answers that RabbitMQ refuses for a time: a real worker process and real RabbitMQ."""

import asyncio
import secrets
from urllib.parse import urlsplit

import pytest
from broker_api import until
from pydantic import SecretStr
from test_term import daemon_of, settings_of
from worker_process import PATIENCE, Stage, stage

from osrdyne.amqp import Message
from osrdyne.broker.management.models import Permissions
from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker
from osrdyne.protocol.names import PoolNames, QueueName
from osrdyne.protocol.statuses import decode_text

pytestmark = [pytest.mark.rabbitmq4, pytest.mark.usefixtures("processes")]

NOT_THE_DEFAULT_EXCHANGE = "^(?!amq.default).*"


@pytest.fixture
async def user(management):
    name = f"worker-{secrets.token_hex(4)}"
    await management.put_user(name, password=name)
    yield name
    await management.delete_user(name)


def uri_of(broker: EmbeddedBroker, user: str) -> str:
    uri = urlsplit(broker.amqp_uri)
    return uri._replace(netloc=f"{user}:{user}@{uri.netloc.rpartition('@')[2]}").geturl()


async def ask(scene: Stage, replies: QueueName, path: str = "/echo", **properties: str) -> None:
    message = Message(b"1", headers={"x-rpc-path": path}, reply_to=replies, **properties)  # type: ignore[arg-type]
    await scene.channel.publish(message, exchange=scene.names.requests_exchange, routing_key=scene.key)


@pytest.mark.proves("requests/reply-queue-full")
async def test_answer_waits_for_the_permission_to_publish_it(broker, pool_id, management, user):
    """No request runs twice: the handler counts its runs in the queue of its own answers."""
    async with stage(broker.amqp_uri, pool_id, forked=True) as scene:
        replies = QueueName(f"{pool_id}-callers")
        await scene.channel.declare_queue(replies, exclusive=True)
        await management.put_permissions(user, Permissions(".*", NOT_THE_DEFAULT_EXCHANGE, ".*"))
        scene.uri = uri_of(broker, user)
        worker = await scene.start(runtime={"concurrency": 4})
        for number in range(10):
            await ask(scene, replies, correlation_id=str(number))
        await worker.until_line("tried until the deadline")
        assert (await scene._request_queue(replies)).ready == 0
        await management.put_permissions(user, Permissions(".*", ".*", ".*"))
        async with asyncio.timeout(PATIENCE):
            answers = await scene.channel.consume(replies, no_ack=True)
            found = [(await answers.get()).properties.correlation_id for _ in range(10)]
        assert sorted(found) == [str(number) for number in range(10)]
        assert not [line for line in worker.lines if "no connection to RabbitMQ" in line]


@pytest.mark.proves("requests/reply-queue-full")
async def test_leader_without_permission_keeps_its_term_and_its_answers(
    broker, broker_settings, pool_id, management, user, monkeypatch
):
    """Shown by `status`. Answers to direct reply-to and to a queue are sent when the user may publish again."""
    await management.put_permissions(user, Permissions(".*", ".*", ".*"))
    # The leader token is published to the default exchange, too: no renewal must fall into this time.
    monkeypatch.setattr("osrdyne.broker.leadership.token.RENEW_EVERY_WHERE_REATTACHED", 300.0)
    limited = broker_settings.model_copy(update={"uri": SecretStr(uri_of(broker, user))})
    async with (
        daemon_of(settings_of(limited, pool_id)) as running,
        stage(broker.amqp_uri, f"{pool_id}-x", forked=True) as scene,
    ):
        term, replies = await running.leads(), QueueName(f"{pool_id}-callers")
        await scene.channel.declare_queue(replies, exclusive=True)
        await management.put_permissions(user, Permissions(".*", NOT_THE_DEFAULT_EXCHANGE, ".*"))
        await asyncio.sleep(3)  # RabbitMQ remembers the permissions of a channel until it has had nothing to do
        refused = Message(b"1", headers={"x-no-activate": True}, reply_to=replies)
        for key in ("a", "a", "b"):
            await scene.channel.publish(refused, exchange=PoolNames(pool_id).requests_exchange, routing_key=key)
        await until(lambda: (finding := running.term.processors.replier.finding({})) and "3 for" in finding.message)
        await management.put_permissions(user, Permissions(".*", ".*", ".*"))
        async with asyncio.timeout(PATIENCE):
            answers = await scene.channel.consume(replies, no_ack=True)
            found = [decode_text((await answers.get()).headers["x-status"]) for _ in range(3)]
        assert (found, await running.leads()) == (["not-running"] * 3, term)
