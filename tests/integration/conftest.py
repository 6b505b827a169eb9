"""Fixtures that several modules of this folder use."""

import pytest

from tests.integration.pooled_stage import pooled_stage
from tests.integration.worker_process import stage


@pytest.fixture
async def pool(broker, pool_id):
    """One group, as the controller would have made it; the test starts its workers."""
    async with stage(broker.amqp_uri, pool_id, forked=True) as result:
        yield result


@pytest.fixture
async def pooled(broker, pool_id):
    """The same for pooled processes."""
    async with pooled_stage(broker.amqp_uri, pool_id, forked=True) as made:
        yield made
