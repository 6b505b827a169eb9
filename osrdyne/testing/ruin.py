"""What a person may do to a broker behind our back, and osrdyne itself never does."""

from __future__ import annotations

from osrdyne.amqp import Channel
from osrdyne.amqp.errors import translated

TIMEOUT = 30.0


async def purge_queue(channel: Channel, name: str) -> int:
    """Drop everything that is ready in a queue; how much it was."""
    with translated(f"purge queue {name}"):
        answer = await channel._underlay.queue_purge(name, timeout=TIMEOUT)
    return answer.message_count or 0


async def delete_exchange(channel: Channel, name: str) -> None:
    """Delete an exchange; a missing one is not an error."""
    with translated(f"delete exchange {name}"):
        await channel._underlay.exchange_delete(name, timeout=TIMEOUT)
