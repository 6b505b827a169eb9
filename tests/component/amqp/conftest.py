"""A scripted broker to which every connection of a test leads."""

import asyncio

import pytest
from scripted_broker import ScriptedBroker


@pytest.fixture
async def broker(monkeypatch):
    scripted = ScriptedBroker()

    async def create_connection(factory, *_, **__):
        scripted.protocol = factory()
        scripted.protocol.connection_made(scripted)
        return scripted, scripted.protocol

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create_connection)
    return scripted
