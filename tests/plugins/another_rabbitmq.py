"""A pytest plugin: `--rabbitmq-image IMAGE` starts a container of that image, and the tests run against it.

Without it, `OSRDYNE_TEST_AMQP_URI` and `OSRDYNE_TEST_MANAGEMENT_URI` can name another RabbitMQ.
"""

import asyncio
import os

import pytest

URIS = ("OSRDYNE_TEST_AMQP_URI", "OSRDYNE_TEST_MANAGEMENT_URI")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rabbitmq-image", metavar="IMAGE", help="the image of the RabbitMQ to test against")


def pytest_configure(config: pytest.Config) -> None:
    """Start the container, once: the processes of pytest-xdist inherit its addresses."""
    image = config.getoption("--rabbitmq-image")
    if image is None or hasattr(config, "workerinput"):
        return
    from tests.chaos.nodes import ContainerNode  # Docker's library takes a part of a second to import

    node = ContainerNode(image)
    config.add_cleanup(lambda: asyncio.run(node.close()))
    asyncio.run(node.start())
    os.environ.update(zip(URIS, (node.amqp_uri, node.management_uri), strict=True))
