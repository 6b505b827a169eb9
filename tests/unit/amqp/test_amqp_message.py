"""Messages: the quick bound of what headers take on the wire, and copies that are sent on."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
from aiormq.abc import DeliveredMessage
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands as spec
from pamqp import encode
from pamqp.header import ContentHeader

from osrdyne.amqp import Delivery, Message
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.amqp import FakeChannel
from osrdyne.testing.fakes.broker import FakeBroker

SIMPLE = st.one_of(
    st.text(max_size=50),
    st.binary(max_size=50),
    st.binary(max_size=50).map(bytearray),
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.floats(),
    st.booleans(),
    st.none(),
)


@given(st.dictionaries(st.text(max_size=30), SIMPLE, max_size=20))
def test_headers_take_no_more_than_the_bound(headers: dict[str, object]) -> None:
    """Wrong on the low side, it would cost a connection."""
    table_length = 4
    encoded = encode.field_table(headers)  # type: ignore[arg-type]
    assert len(encoded) - table_length <= Message(headers=headers).max_header_bytes() < math.inf


def test_nested_headers_have_no_quick_bound() -> None:
    assert Message(headers={"x-death": [{"count": 1}]}).max_header_bytes() == math.inf


@pytest.mark.parametrize(
    ("reply_to", "sent_on"),
    [("amq.rabbitmq.reply-to", None), ("amq.rabbitmq.reply-to.g1h2", "amq.rabbitmq.reply-to.g1h2"), ("q", "q")],
)
def test_copy_never_asks_for_answers_to_ourselves(reply_to: str, sent_on: str | None) -> None:
    """RabbitMQ takes the bare name for the address of the publisher, and closes a channel that has none."""
    properties = Message(reply_to=reply_to).properties()
    delivery = Delivery(FakeChannel(FakeBroker(VirtualClock())), 1, "x", "a", False, b"", properties)
    assert delivery.to_message(headers={}, expiration=None).reply_to == sent_on


@pytest.mark.parametrize("properties", [{"expiration": "1001"}, {"correlation_id": ""}, {"priority": None}], ids=str)
def test_delivery_has_the_properties_as_received(properties: dict[str, Any]) -> None:
    """The message class of aio-pika changes each of these (decision 0042)."""
    header = ContentHeader(properties=spec.Basic.Properties(**properties))
    deliver = spec.Basic.Deliver("c1", 1, False, "", "q")
    message = DeliveredMessage(delivery=deliver, header=header, body=b"", channel=Mock(is_closed=False))
    delivery = Delivery.from_aiormq(Mock(), message)
    assert {name: delivery.properties[name] for name in properties} == properties
