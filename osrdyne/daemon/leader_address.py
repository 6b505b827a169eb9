"""The address of the leader's API: announced by the leader at the start of its term, read by standbys.

Stored in a global parameter of RabbitMQ, because only the holder of the token can read the token. The address is a
hint: a late announcement of an earlier leader names a daemon that answers that it is on standby. The announcement also
contains the term, from which the next leader counts on if the leader queue was deleted together with the token.
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
        """The address announced last; None without an announcement."""
        url = (await self._read()).get("api")
        return url if isinstance(url, str) else None

    async def last_term(self) -> int | None:
        """The term announced last; None without an announcement, or if it is malformed."""
        term = (await self._read()).get("term")
        return term if isinstance(term, int) and not isinstance(term, bool) and 0 <= term <= MAX_TERM else None

    async def _read(self) -> Mapping[str, object]:
        value = await self._parameters.get_global_parameter(self.name)
        return value if isinstance(value, dict) else {}
