"""The route manifest in force and those before it."""

from __future__ import annotations

from osrdyne.ingress.routes.manifest import Manifest, load_manifest_json
from osrdyne.pool.routing.manifest_store import ManifestKind, ManifestStore
from osrdyne.pool.state.pins import Parameters


class RouteStore(ManifestStore[Manifest]):
    """The route manifests of one pool."""

    def __init__(self, parameters: Parameters, *, pool: str) -> None:
        super().__init__(parameters, pool=pool, kind=ManifestKind.ROUTES, load=load_manifest_json)
