"""The quick bound of what headers take on the wire: wrong on the low side, it would cost a connection."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from pamqp import encode

from osrdyne.amqp import Message

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
    table_length = 4
    encoded = encode.field_table(headers)  # type: ignore[arg-type]
    assert len(encoded) - table_length <= Message(headers=headers).headers_at_most() < math.inf


def test_nested_headers_have_no_quick_bound() -> None:
    assert Message(headers={"x-death": [{"count": 1}]}).headers_at_most() == math.inf
