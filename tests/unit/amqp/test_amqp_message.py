"""Messages: the quick bound of what headers take on the wire, and copies that are sent on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import encode

from osrdyne.amqp import Delivery, Message
from osrdyne.testing.amqp import FakeChannel
from osrdyne.testing.broker import FakeBroker
from osrdyne.testing.clock import VirtualClock

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
    assert len(encoded) - table_length <= Message(headers=headers).headers_at_most() < math.inf


def test_nested_headers_have_no_quick_bound() -> None:
    assert Message(headers={"x-death": [{"count": 1}]}).headers_at_most() == math.inf


@pytest.mark.parametrize(
    ("reply_to", "sent_on"),
    [("amq.rabbitmq.reply-to", None), ("amq.rabbitmq.reply-to.g1h2", "amq.rabbitmq.reply-to.g1h2"), ("q", "q")],
)
def test_copy_never_asks_for_answers_to_ourselves(reply_to: str, sent_on: str | None) -> None:
    """RabbitMQ takes the bare name for the address of the publisher, and closes a channel that has none."""
    properties = Message(reply_to=reply_to).properties()
    delivery = Delivery(FakeChannel(FakeBroker(VirtualClock())), 1, "x", "a", False, b"", properties)
    assert delivery.to_message(headers={}, expiration=None).reply_to == sent_on
