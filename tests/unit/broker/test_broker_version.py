"""Versions of RabbitMQ."""

from __future__ import annotations

import pytest

from osrdyne.broker.topology.version import BrokerVersion


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.10.8", (3, 10, 8)),
        ("4.3.0-rc.1", (4, 3, 0)),
        ("3.13.7+1.g2b4c", (3, 13, 7)),
        ("4.2", (4, 2, 0)),
        ("", (0, 0, 0)),
        ("next", (0, 0, 0)),
    ],
)
def test_version_is_read(text: str, expected: tuple[int, int, int]) -> None:
    assert BrokerVersion.parse(text) == BrokerVersion(*expected)


def test_versions_are_ordered_by_number() -> None:
    assert BrokerVersion.parse("3.9.29") < BrokerVersion.parse("3.10.8") < BrokerVersion.parse("4.0.0")


@pytest.mark.parametrize(
    ("text", "supported", "tested"),
    [
        ("3.9.29", False, False),
        ("3.10.0", True, True),
        ("4.3.6", True, True),
        ("4.4.0", True, False),
        ("5.0.0", True, False),
        ("", False, False),
    ],
)
def test_supported_and_tested_versions(text: str, supported: bool, tested: bool) -> None:
    version = BrokerVersion.parse(text)
    assert (version.is_supported, version.is_tested) == (supported, tested)


@pytest.mark.parametrize(("text", "expected"), [("3.11.28", False), ("3.12.0", True), ("4.0.5", True)])
def test_consumer_timeout_policy_comes_with_3_12(text: str, expected: bool) -> None:
    assert BrokerVersion.parse(text).has_consumer_timeout_policy is expected
