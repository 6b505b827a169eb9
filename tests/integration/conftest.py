"""Fixtures that several modules of this folder use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.pooled_stage import PooledStage, pooled_stage
from tests.integration.worker_process import Stage, stage


@pytest.fixture
async def pool(broker: Any, pool_id: str) -> AsyncIterator[Stage]:
    """One group, as the controller would have made it; the test starts its workers."""
    async with stage(broker.amqp_uri, pool_id) as result:
        yield result


@pytest.fixture
async def pooled(broker: Any, pool_id: str) -> AsyncIterator[PooledStage]:
    """The same for pooled processes."""
    async with pooled_stage(broker.amqp_uri, pool_id) as made:
        yield made
