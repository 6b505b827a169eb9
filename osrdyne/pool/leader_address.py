"""Where the API of the daemon that leads is: announced by it at the start of its term, read by those that stand by.

Kept in a global parameter of RabbitMQ, because the token itself is seen by nobody but its holder. It is a hint for
people and clients: an old leader's late word sends somebody to a daemon that says that it does not lead.
"""

from __future__ import annotations

from osrdyne.pool.pins import Parameters


class LeaderAddress:
    """The address of one pool's leader."""

    def __init__(self, parameters: Parameters, *, pool: str) -> None:
        self._parameters = parameters
        self._name = f"osrdyne-{pool}-leader"

    async def announce(self, url: str, *, term: int) -> None:
        await self._parameters.put_global_parameter(self._name, {"api": url, "term": term})

    async def find(self) -> str | None:
        """The address last announced; None where there is none."""
        value = await self._parameters.get_global_parameter(self._name)
        url = value.get("api") if isinstance(value, dict) else None
        return url if isinstance(url, str) else None
