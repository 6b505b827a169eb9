"""A scripted broker to which every connection of a test leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted_broker import ScriptedBroker


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> ScriptedBroker:
    scripted = ScriptedBroker()

    async def create_connection(factory: Callable[[], Any], *_: Any, **__: Any) -> tuple[ScriptedBroker, Any]:
        scripted.protocol = factory()
        scripted.protocol.connection_made(scripted)
        return scripted, scripted.protocol

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
    return scripted
