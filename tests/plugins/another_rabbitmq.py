"""A pytest plugin: run the tests that are about RabbitMQ, and only them, against another one.

Loaded by `make test-docker`. `--rabbitmq-image IMAGE` starts a container of that image; without it the RabbitMQ is the
one that `OSRDYNE_TEST_AMQP_URI` and `OSRDYNE_TEST_MANAGEMENT_URI` name. Chosen are the tests with the fixture `broker`,
or the parameter `rabbitmq`. Out stay those without RabbitMQ, and those that start, configure or break a node of their
own.
"""

from __future__ import annotations

import asyncio
import os

import pytest

URIS = ("OSRDYNE_TEST_AMQP_URI", "OSRDYNE_TEST_MANAGEMENT_URI")
GIVEN, OWN = "broker", "own_broker"
"""Fixtures."""
REAL = "rabbitmq"
"""A parameter."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rabbitmq-image", metavar="IMAGE", help="the image of the RabbitMQ to test against")


def pytest_configure(config: pytest.Config) -> None:
    """Start the container, once: the processes of pytest-xdist inherit its addresses."""
    image = config.getoption("--rabbitmq-image")
    if image is None or hasattr(config, "workerinput"):
        return
    from tests.chaos.nodes import ContainerNode  # the path to it is not known any earlier

    node = ContainerNode(image)
    config.add_cleanup(lambda: asyncio.run(node.close()))
    asyncio.run(node.start())
    os.environ.update(zip(URIS, (node.amqp_uri, node.management_uri), strict=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if isinstance(item, pytest.Function) and is_about_rabbitmq(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def is_about_rabbitmq(test: pytest.Function) -> bool:
    """Whether the test is about the RabbitMQ that it is given; some suites run on a fake as well."""
    parameters = test.callspec.params.values() if hasattr(test, "callspec") else ()
    return (GIVEN in test.fixturenames or REAL in parameters) and OWN not in test.fixturenames
