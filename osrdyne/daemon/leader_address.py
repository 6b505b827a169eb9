"""Where the API of the daemon that leads is: announced by it at the start of its term, read by those that stand by.

Kept in a global parameter of RabbitMQ, because the token itself is visible to its holder only. It is a hint for
people and clients: an old leader's late word sends a client to a daemon that says that it does not lead. The term in it
is what a leader goes on from when the leader queue was deleted, with the last token in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from osrdyne.pool.state.groups.pins import Parameters
from osrdyne.protocol.control import MAX_TERM


class LeaderAddress:
    """The address of one pool's leader."""

    def __init__(self, parameters: Parameters, *, pool: str, own: Callable[[], str]) -> None:
        """`own`: the address of this daemon's API, which is known once the API listens."""
        self._parameters = parameters
        self.name = f"osrdyne-{pool}-leader"
        self.own = own
        self._announced: object = None

    async def announce(self, *, term: int) -> None:
        """Announce this daemon as the leader of the term."""
        self._announced = {"api": self.own(), "term": term}
        await self._parameters.put_global_parameter(self.name, self._announced)

    async def is_missing(self) -> bool:
        """Whether this daemon's address was announced, and RabbitMQ has none."""
        return self._announced is not None and await self._parameters.get_global_parameter(self.name) is None

    async def store_again(self) -> None:
        """Announce the same address again."""
        await self._parameters.put_global_parameter(self.name, self._announced)

    async def find(self) -> str | None:
        """The address last announced; None where there is none."""
        url = (await self._read()).get("api")
        return url if isinstance(url, str) else None

    async def last_term(self) -> int | None:
        """The term last announced; None if there is none, or if it is malformed."""
        term = (await self._read()).get("term")
        return term if isinstance(term, int) and not isinstance(term, bool) and 0 <= term <= MAX_TERM else None

    async def _read(self) -> Mapping[str, object]:
        value = await self._parameters.get_global_parameter(self.name)
        return value if isinstance(value, dict) else {}
