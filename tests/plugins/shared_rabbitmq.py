"""A pytest plugin: one private RabbitMQ for all processes of a run, instead of one for each.

Loaded by `make test`. Nothing is started where `OSRDYNE_TEST_AMQP_URI` and `OSRDYNE_TEST_MANAGEMENT_URI` name another.
"""

from __future__ import annotations

import asyncio
import os

import pytest

URIS = ("OSRDYNE_TEST_AMQP_URI", "OSRDYNE_TEST_MANAGEMENT_URI")


def pytest_configure(config: pytest.Config) -> None:
    """Start it before the processes of pytest-xdist, which inherit its addresses."""
    if hasattr(config, "workerinput") or all(uri in os.environ for uri in URIS):
        return
    from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker  # for this process only

    node = EmbeddedBroker()
    config.add_cleanup(lambda: asyncio.run(node.close()))
    asyncio.run(node.start())
    os.environ.update(zip(URIS, (node.amqp_uri, node.management_uri), strict=True))
