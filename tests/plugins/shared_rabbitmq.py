"""A pytest plugin: one private RabbitMQ for all processes of a run, instead of one for each.

Only in runs of a tier that uses it. Nothing is started where `OSRDYNE_TEST_AMQP_URI` and `OSRDYNE_TEST_MANAGEMENT_URI`
name another.
"""

import asyncio
import os
from typing import Any

import pytest

URIS = ("OSRDYNE_TEST_AMQP_URI", "OSRDYNE_TEST_MANAGEMENT_URI")


TIERS = ("test", "process", "spark", "docker", "kubernetes", "nightly")
SHARED = pytest.StashKey[tuple[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Start it in the process that starts those of pytest-xdist."""
    needed = config.getoption("tier") in TIERS and not config.option.collectonly
    if not needed or hasattr(config, "workerinput") or all(uri in os.environ for uri in URIS):
        return
    from osrdyne.dev.rabbitmq.embedded import EmbeddedBroker  # for this process only

    node = EmbeddedBroker()
    config.add_cleanup(lambda: asyncio.run(node.close()))
    asyncio.run(node.start())
    config.stash[SHARED] = (node.amqp_uri, node.management_uri)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand its addresses over, and not in the environment: tests look for credentials in environments."""
    if SHARED in node.config.stash:
        node.workerinput["rabbitmq"] = list(node.config.stash[SHARED])


def addresses(config: pytest.Config) -> list[str] | None:
    """The AMQP and management URIs of the shared node; None where there is none."""
    given: list[str] | None = getattr(config, "workerinput", {}).get("rabbitmq")
    return given or (list(config.stash[SHARED]) if SHARED in config.stash else None)
