"""The circuits of a pool over HTTP: `/v1/circuits`. Their configuration is in `manifests`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from osrdyne.api.access.checks import Author
from osrdyne.api.problems import NotFoundError
from osrdyne.ingress.circuits.state import CircuitState
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.pool.views import CircuitInspector

_Hash = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="The hash of a circuit, 16 hexadecimal digits.")]


class CircuitHashes(BaseModel):
    """The circuits of a pool."""

    pool: str
    circuits: list[str] = Field(description="Their hashes, by route and key.")


class CircuitStatus(BaseModel):
    """The state of one circuit."""

    status: str = Field(description="`closed`, `half_open` or `open`.")


class CircuitDetails(CircuitStatus):
    """One circuit with its statistics."""

    hash: str
    route: str | None = Field(description="Null: the requests of no named route.")
    key: str | None = Field(description="The group, with `circuitScope: group`; null: all groups of the route.")
    fail_ratio: int = Field(description="Percentage of the counted requests that failed, rounded down.")
    successes: int
    failures: int
    since: float = Field(description="When it got its state, seconds since the epoch.")
    paused: int = Field(description="The number of groups that it pauses, or that wait since it was closed.")

    @classmethod
    def of(cls, view: CircuitView) -> CircuitDetails:
        return cls(
            status=view.status.name.lower(),
            hash=view.hash,
            route=view.route,
            key=view.key,
            fail_ratio=view.fail_ratio,
            successes=view.successes,
            failures=view.failures,
            since=view.since,
            paused=view.paused,
        )


class ClosedCircuits(BaseModel):
    """The result of closing circuits."""

    pool: str
    closed: list[str] = Field(
        description="The hashes of those that were not closed before. Of the others the statistics are cleared, too."
    )


class AllCircuits(BaseModel):
    """Every circuit of a pool with its statistics."""

    pool: str
    circuits: list[CircuitDetails]


async def find_circuit(inspector: CircuitInspector, hash: str) -> CircuitView:
    """The circuit with this hash. Raises `NotFoundError`."""
    for view in await inspector.circuits():
        if view.hash == hash:
            return view
    raise NotFoundError(
        "There is no circuit with this hash, or it has counted no request.",
        "`osrdyne circuits list` shows the circuits.",
    )


def require_closed(wanted: CircuitStatus) -> None:
    """Raises `HTTPException` for a state that cannot be set."""
    if wanted.status != CircuitState.CLOSED.name.lower():
        raise HTTPException(HTTPStatus.FORBIDDEN, "A circuit can only be closed by hand: send the status `closed`.")


def circuit_routes(inspector: CircuitInspector) -> APIRouter:
    """Routes of circuits. Include them after the routes of the configuration, or `{hash}` would match `config`."""
    router = APIRouter(prefix="/v1/circuits")

    @router.get("", summary="The hashes of the circuits")
    async def hashes() -> CircuitHashes:
        return CircuitHashes(pool=inspector.pool, circuits=[one.hash for one in await inspector.circuits()])

    @router.get("/_all", summary="Every circuit with its statistics")
    async def everything() -> AllCircuits:
        views = await inspector.circuits()
        return AllCircuits(pool=inspector.pool, circuits=[CircuitDetails.of(one) for one in views])

    @router.get("/{hash}", summary="One circuit with its statistics")
    async def details(hash: _Hash) -> CircuitDetails:
        return CircuitDetails.of(await find_circuit(inspector, hash))

    @router.get("/{hash}/status", summary="The state of one circuit")
    async def status(hash: _Hash) -> CircuitStatus:
        return CircuitStatus(status=CircuitDetails.of(await find_circuit(inspector, hash)).status)

    async def close(circuit: str | None, wanted: CircuitStatus, author: str) -> ClosedCircuits:
        require_closed(wanted)
        closed = await inspector.close_circuits(circuit, author=author)
        return ClosedCircuits(pool=inspector.pool, closed=[one.hash for one in closed])

    @router.put("/_all/status", summary="Close every circuit")
    async def close_all(wanted: CircuitStatus, author: Author) -> ClosedCircuits:
        return await close(None, wanted, author)

    @router.put("/{hash}/status", summary="Close one circuit")
    async def close_one(hash: _Hash, wanted: CircuitStatus, author: Author) -> ClosedCircuits:
        await find_circuit(inspector, hash)
        return await close(hash, wanted, author)

    return router
