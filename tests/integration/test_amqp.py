"""The AMQP layer against a real RabbitMQ: confirms, returns, ends of consumers, odd bytes, closing."""

import asyncio
import random
from collections.abc import Mapping

import pytest
from broker_api import PATIENCE, close_connections, ready_in, until

from osrdyne import amqp
from osrdyne.amqp import Channel, ConnectionOptions, Delivery, Message
from osrdyne.errors import BrokerAccessError, BrokerNotFoundError, BrokerUnavailableError, PublishRefusedError

QUORUM: dict[str, object] = {"x-queue-type": "quorum"}
NOT_UTF8 = b"\xff\xfe key".decode("utf-8", "surrogateescape")


async def declared(channel: Channel, pool: str, name: str = "q", arguments: Mapping[str, object] | None = None) -> str:
    queue = f"{pool}-{name}"
    await channel.declare_queue(queue, arguments=QUORUM | dict(arguments or {}))
    return queue


async def published(channel: Channel, queue: str, *bodies: bytes) -> None:
    for body in bodies:
        await channel.publish(Message(body), exchange="", routing_key=queue, mandatory=True)


async def first(consumer: amqp.Consumer) -> Delivery:
    async with asyncio.timeout(PATIENCE):
        return await consumer.get()


class TestPublish:
    async def test_message_without_a_queue_or_for_a_full_one_is_refused_and_the_channel_lives_on(
        self, channel, pool_id
    ):
        with pytest.raises(PublishRefusedError, match="no queue"):
            await published(channel, f"{pool_id}-nowhere", b"1")
        full = await declared(channel, pool_id, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
        with pytest.raises(PublishRefusedError, match="full"):
            for _ in range(50):
                await published(channel, full, b"x")
        await published(channel, await declared(channel, pool_id, "other"), b"2")

    async def test_publish_to_a_missing_exchange_closes_the_channel_only(self, connection, pool_id):
        channel = await connection.channel(confirms=True)
        with pytest.raises((BrokerNotFoundError, BrokerUnavailableError)):
            await channel.publish(Message(b""), exchange=f"{pool_id}-none", routing_key="k")
        assert channel.is_closed
        assert not connection.is_closed

    @pytest.mark.parametrize("message_id", [None, "always the same"])
    async def test_returned_message_is_refused_whatever_its_id_and_others_arrive_unchanged(
        self, channel, pool_id, message_id
    ):
        queue = await declared(channel, pool_id)
        message = Message(b"", message_id=message_id)
        routes = [queue if number % 2 else f"{pool_id}-nowhere" for number in range(40)]
        outcomes = await asyncio.gather(
            *(channel.publish(message, exchange="", routing_key=route, mandatory=True) for route in routes),
            return_exceptions=True,
        )
        assert [isinstance(outcome, PublishRefusedError) for outcome in outcomes] == [
            route != queue for route in routes
        ]
        assert await ready_in(channel, queue) == 20
        received = await channel.get(queue)
        assert received is not None
        assert (received.properties.message_id, "x-osrdyne-publish" in received.headers) == (message_id, False)

    async def test_header_that_would_end_the_connection_is_left_empty(self, channel, pool_id):
        queue = await declared(channel, pool_id)
        message = Message(b"", headers={"nan": float("nan"), "inf": float("-inf"), "float": 0.1})
        await channel.publish(message, exchange="", routing_key=queue, mandatory=True)
        received = await channel.get(queue)
        assert received is not None
        assert [received.headers[name] for name in message.headers] == [None, None, 0.1]


class TestEndOfChannel:
    @pytest.mark.proves("broker/call-cancelled-times-out")
    async def test_cancelled_calls_cost_their_channels_and_not_the_connection(self, connection):
        """RabbitMQ closes the connection for one frame after the end of a channel (broker: channel-ends)."""
        chance = random.Random(1)

        async def cancel_at_any_time():
            channel = await connection.channel()
            question = asyncio.create_task(channel.declare_queue("missing", passive=True))
            await asyncio.sleep(chance.uniform(0, 0.004))
            if chance.random() < 0.8:
                question.cancel()
            await asyncio.gather(question, return_exceptions=True)
            closing = asyncio.create_task(channel.close())
            await asyncio.sleep(chance.uniform(0, 0.004))
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await channel.close()

        for _ in range(100):
            await asyncio.gather(*(cancel_at_any_time() for _ in range(4)))
        another = await connection.channel()
        await another.ping()
        assert not connection.is_closed


class TestConsumer:
    @pytest.mark.proves("reference-defects/15-confirms-prefetch-back")
    async def test_prefetch_limits_what_arrives_in_order_and_what_is_given_back_comes_again(self, channel, pool_id):
        queue = await declared(channel, pool_id)
        await published(channel, queue, *(b"%d" % number for number in range(9)))
        consumer = await channel.consume(queue, prefetch=2)
        held = [await first(consumer), await first(consumer)]
        assert consumer.waiting() == 0
        for number in range(2, 9):
            await held[-2].ack()
            held.append(await first(consumer))
            assert [one.body for one in held[-2:]] == [b"%d" % (number - 1), b"%d" % number]
        await held[-2].ack()
        await held[-1].nack(requeue=True)
        delivery = await first(consumer)
        await delivery.reject(requeue=True)
        assert delivery.redelivered and (await first(consumer)).redelivered

    async def test_deleted_queue_ends_its_consumer_and_not_the_other_one_of_the_channel(
        self, connection, channel, pool_id
    ):
        going, staying = [
            await channel.consume(await declared(channel, pool_id, name)) for name in ("going", "staying")
        ]
        await (await connection.channel()).delete_queue(going.queue)
        with pytest.raises(BrokerUnavailableError, match=going.queue):
            await first(going)
        assert going.ended
        await published(channel, staying.queue, b"1")
        assert (await first(staying)).body == b"1"

    async def test_killed_connection_ends_the_consumer_and_tells_the_owner(self, broker, channel, pool_id):
        doomed = await amqp.connect(ConnectionOptions(uri=broker.amqp_uri, name=f"{pool_id} doomed"))
        assert doomed.server_version[0].isdigit()
        consumer = await (await doomed.channel()).consume(await declared(channel, pool_id))
        await close_connections(broker.management_uri, name=f"{pool_id} doomed")
        with pytest.raises(BrokerUnavailableError):
            await first(consumer)
        async with asyncio.timeout(PATIENCE):
            assert await doomed.wait_closed() is not None
        with pytest.raises(BrokerUnavailableError):
            await doomed.channel()

    @pytest.mark.parametrize("single", [True, False], ids=["single active", "plain"])
    async def test_messages_of_a_consumer_that_took_more_return_in_their_order(self, broker, channel, pool_id, single):
        """RabbitMQ returns them consumer by consumer, in the order of the tags (broker: returns-by-tag)."""
        queue = await declared(channel, pool_id, arguments={"x-single-active-consumer": True} if single else {})
        bodies = [b"%d" % number for number in range(26)]
        await published(channel, queue, *bodies)
        connection = await amqp.connect(ConnectionOptions(uri=broker.amqp_uri))
        taking = await connection.channel()
        consumer = await taking.consume(queue, prefetch=2)
        held = [await first(consumer) for _ in range(2)]
        while len(held) < 24:
            await taking.take_more(consumer, prefetch=2)
            held += [await first(consumer) for _ in range(2)]
        assert [delivery.body for delivery in held] == bodies[:24]
        assert await ready_in(channel, queue) == 2
        await connection.close()
        await until(lambda: ready_in(channel, queue), equals=len(bodies))
        again = await channel.consume(queue)
        assert [(await first(again)).body for _ in bodies] == bodies


async def test_routing_key_that_is_not_utf8_is_received_and_can_be_sent_on(channel, pool_id):
    queue = await declared(channel, pool_id)
    await channel.declare_exchange(f"{pool_id}-x", "fanout")
    await channel.bind_queue(queue, f"{pool_id}-x")
    message = Message(b"1", correlation_id=NOT_UTF8, app_id=NOT_UTF8, headers={NOT_UTF8: b"\xff"})
    await channel.publish(message, exchange=f"{pool_id}-x", routing_key=NOT_UTF8)
    consumer = await channel.consume(queue)
    received = await first(consumer)
    again = received.to_message(headers=received.headers, expiration=None)
    await channel.publish(again, exchange=f"{pool_id}-x", routing_key=received.routing_key)
    for delivery in (received, await first(consumer)):
        assert delivery.routing_key == NOT_UTF8
        assert delivery.properties.correlation_id == NOT_UTF8
        assert delivery.headers[NOT_UTF8] == b"\xff"


class TestConnection:
    async def test_wrong_password_and_virtual_host_are_refused_without_showing_the_password(self, broker):
        uri = broker.amqp_uri
        stranger = uri.replace(uri.split("@")[0], "amqp://stranger:s3cret")
        for wrong in (stranger, f"{uri.rstrip('/')}/no-such-vhost"):
            with pytest.raises(BrokerAccessError) as caught:
                await amqp.connect(ConnectionOptions(uri=wrong))
            assert "s3cret" not in str(caught.value)

    async def test_silent_listener_is_given_up_in_time(self):
        gone = asyncio.Event()

        async def silent(reader, writer):
            await reader.read()
            gone.set()
            writer.close()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(BrokerUnavailableError, match=str(port)):
                await amqp.connect(ConnectionOptions(uri=f"amqp://127.0.0.1:{port}/", connect_timeout=0.2))
            async with asyncio.timeout(PATIENCE):
                await gone.wait()

    async def test_closing_twice_and_using_a_closed_connection_never_hang(self, broker, pool_id):
        connection = await amqp.connect(ConnectionOptions(uri=broker.amqp_uri))
        channel = await connection.channel(confirms=True)
        for closing in (connection, connection, channel):
            await closing.close()
        assert channel.is_closed
        for use in (channel.declare_queue("q"), channel.publish(Message(b""), exchange="", routing_key="q")):
            with pytest.raises(BrokerUnavailableError):
                await use

    async def test_closed_channel_gives_back_what_it_held(self, connection, pool_id):
        channel, other = await connection.channel(confirms=True), await connection.channel()
        queue = await declared(channel, pool_id)
        await published(channel, queue, b"1")
        consumer = await channel.consume(queue)
        delivery = await first(consumer)
        await channel.close()
        assert [late async for late in consumer] == []
        with pytest.raises(BrokerUnavailableError):
            await delivery.ack()
        assert (await first(await other.consume(queue))).redelivered
