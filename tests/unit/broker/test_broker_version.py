"""Versions of RabbitMQ."""

from __future__ import annotations

import pytest

from osrdyne.broker.topology.version import BrokerVersion


@pytest.mark.parametrize(
    ("text", "expected", "supported", "tested"),
    [
        ("3.9.29", (3, 9, 29), False, False),
        ("3.10.0", (3, 10, 0), True, True),
        ("3.13.7+1.g2b4c", (3, 13, 7), True, True),
        ("4.2", (4, 2, 0), True, True),
        ("4.3.0-rc.1", (4, 3, 0), True, True),
        ("4.4.0", (4, 4, 0), True, False),
        ("5.0.0", (5, 0, 0), True, False),
        ("next", (0, 0, 0), False, False),
        ("", (0, 0, 0), False, False),
    ],
)
def test_version_is_read_and_judged(text: str, expected: tuple[int, int, int], supported: bool, tested: bool) -> None:
    version = BrokerVersion.parse(text)
    assert version == BrokerVersion(*expected)
    assert (version.is_supported, version.is_tested) == (supported, tested)


def test_versions_are_ordered_by_number() -> None:
    assert BrokerVersion.parse("3.9.29") < BrokerVersion.parse("3.10.8") < BrokerVersion.parse("4.0.0")
