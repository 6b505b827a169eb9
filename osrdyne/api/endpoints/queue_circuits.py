"""The circuits of a pool in the shapes of Gateleen's queue circuit breaker (seed 001), for its clients.

`CIRCUITS_PATH` is the path in the application. The guard maps `api.circuits_path` to it, with and without a slash at
the end.
"""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from osrdyne.api.access.checks import author_or
from osrdyne.api.endpoints.circuits import CircuitDetails, CircuitStatus, find_circuit, require_closed
from osrdyne.auth.endpoints import CIRCUITS_PATH
from osrdyne.pool.routing.circuits import CircuitView
from osrdyne.pool.views import CircuitInspector

_UNKNOWN_AUTHOR = "unknown"  # Gateleen's clients name none.


class CircuitInfo(BaseModel):
    """The statistics of one circuit."""

    failRatio: int = Field(description="Percentage of the counted requests that failed.")
    circuit: str = Field(description="Its route, with `circuitScope: group` followed by its key.")

    @classmethod
    def of(cls, view: CircuitView) -> Self:
        route = "requests of no named route" if view.route is None else view.route
        return cls(failRatio=view.fail_ratio, circuit=route if view.key is None else f"{route} {view.key}")


class QueueCircuit(CircuitStatus):
    """One circuit."""

    info: CircuitInfo


class ListedQueueCircuit(CircuitStatus):
    """One circuit in the list of all."""

    infos: CircuitInfo


async def _author(request: Request, author: Annotated[str, Query(max_length=200)] = _UNKNOWN_AUTHOR) -> str:
    return author_or(request, author or _UNKNOWN_AUTHOR)


_Author = Annotated[str, Depends(_author)]


def queue_circuit_routes(inspector: CircuitInspector) -> APIRouter:
    router = APIRouter(prefix=CIRCUITS_PATH)

    @router.get("", summary="Every circuit, by its hash, as Gateleen shows them")
    @router.get("/_all", summary="Every circuit, by its hash, as Gateleen shows them")
    async def everything() -> dict[str, ListedQueueCircuit]:
        return {
            one.hash: ListedQueueCircuit(status=CircuitDetails.of(one).status, infos=CircuitInfo.of(one))
            for one in await inspector.circuits()
        }

    @router.get("/{hash}", summary="One circuit, as Gateleen shows it")
    async def details(hash: str) -> QueueCircuit:
        found = await find_circuit(inspector, hash)
        return QueueCircuit(status=CircuitDetails.of(found).status, info=CircuitInfo.of(found))

    @router.get("/{hash}/status", summary="The state of one circuit, as Gateleen shows it")
    async def status(hash: str) -> CircuitStatus:
        return CircuitStatus(status=CircuitDetails.of(await find_circuit(inspector, hash)).status)

    @router.put("/_all/status", summary="Close every circuit, as in Gateleen")
    async def close_all(wanted: CircuitStatus, author: _Author) -> CircuitStatus:
        require_closed(wanted)
        await inspector.close_circuits(None, author=author)
        return wanted

    @router.put("/{hash}/status", summary="Close one circuit, as in Gateleen")
    async def close_one(hash: str, wanted: CircuitStatus, author: _Author) -> CircuitStatus:
        await find_circuit(inspector, hash)
        require_closed(wanted)
        await inspector.close_circuits(hash, author=author)
        return wanted

    return router
