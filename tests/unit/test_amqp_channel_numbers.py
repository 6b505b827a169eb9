"""Which numbers the channels of a connection get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from osrdyne.amqp import Connection, ConnectionOptions
from osrdyne.errors import BrokerUnavailableError


def connection(*, channel_max: int) -> tuple[Connection, dict[int, Any]]:
    tune = SimpleNamespace(channel_max=channel_max)
    underlay: Any = SimpleNamespace(channels={}, connection_tune=tune, _Connection__connection_unblocked=None)
    return Connection(ConnectionOptions("amqp://fake"), underlay), underlay.channels


def open_next(connection: Connection, channels: dict[int, Any]) -> int:
    number = connection._free_number()
    channels[number] = None
    return number


def test_channels_that_come_and_go_never_get_a_number_that_is_not_allowed() -> None:
    opened, channels = connection(channel_max=10)
    older = open_next(opened, channels)
    for _ in range(100):
        newer = open_next(opened, channels)
        del channels[older]  # always the younger one stays
        older = newer
        assert 1 <= newer <= 10


def test_number_that_has_just_become_free_comes_last() -> None:
    opened, channels = connection(channel_max=3)
    del channels[open_next(opened, channels)]
    assert [open_next(opened, channels) for _ in range(3)] == [2, 3, 1]


def test_no_number_is_left_is_told() -> None:
    opened, channels = connection(channel_max=1)
    open_next(opened, channels)
    with pytest.raises(BrokerUnavailableError, match="the 1 channels"):
        opened._free_number()
