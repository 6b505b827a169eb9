"""What a managed pool has in the benchmark of its ingress: routes, policies, quotas and circuits."""

import json
from collections.abc import Callable, Mapping

from osrdyne.broker.management.client import ManagementClient
from osrdyne.ingress.circuits.configuration import load_circuits_json
from osrdyne.ingress.policies.manifest import load_policies_json
from osrdyne.ingress.quotas.document import load_quotas_json
from osrdyne.ingress.routes.manifest import load_manifest, load_manifest_json
from osrdyne.pool.routing.manifest_store import Document, ManifestKind, ManifestStore

CONDITIONS = (
    "level = 'x{n}' AND $body.celsius > {n}",
    "as_number(size) > 1{n:03} AND $body.celsius >= 1{n:03}",
    "starts_with(site, 'x{n}') AND $body.name = '{n}'",
)
"""On headers and body, each with values of its own."""
POLICIES = {
    "policies": [
        *({"match": f"site-{number}/{{device}}", "MaxMessageSize": 10_000 + number} for number in range(10)),
        {"match": "hub={number}", "MaxQueueLength": 1_000},
        {"match": "device={number}", "MaxMessageSize": 60_000, "MaxMessageAge": 300, "MaxQueueLength": 100_000},
    ],
    "default": {"MaxMessageSize": 9_000},
}
"""A dozen patterns. The last one matches the keys of the benchmark: size, age and length of each request count."""
QUOTA = {
    "pool": {"messages_per_day": 10**9, "share": "key"},
    "rules": [{"name": "each", "per": "principal", "messages_per_day": 10**9, "send_rate": 10**6, "burst": 10**6}],
}
CIRCUITS = {"circuitCheckEnabled": True, "statisticsUpdateEnabled": True, "openToHalfOpen": {"enabled": True}}
LOADERS: dict[ManifestKind, Callable[[str], Document]] = {
    ManifestKind.ROUTES: load_manifest_json,
    ManifestKind.POLICIES: load_policies_json,
    ManifestKind.QUOTA: load_quotas_json,
    ManifestKind.CIRCUITS: load_circuits_json,
}
CHECKS: Mapping[ManifestKind, Document] = {
    ManifestKind.POLICIES: load_policies_json(json.dumps(POLICIES)),
    ManifestKind.QUOTA: load_quotas_json(json.dumps(QUOTA)),
    ManifestKind.CIRCUITS: load_circuits_json(json.dumps(CIRCUITS)),
}
"""Documents whose limits no request of the benchmark reaches: each is checked, and passes."""


def routes(count: int) -> Document:
    """Routes with conditions that no request of this benchmark fulfils, and one for the rest."""
    found: dict[str, object] = {
        f"r{number}": {
            "route": f"FROM /messages/* WHERE {CONDITIONS[number % 3].format(n=number)} INTO $upstream",
            "priority": number % 3,
        }
        for number in range(count - 1)
    }
    return load_manifest(json.dumps({"routes": {**found, "rest": "FROM /messages/* INTO $upstream"}}))


async def store_documents(
    management: ManagementClient, *, pool: str, documents: Mapping[ManifestKind, Document]
) -> None:
    """Make these documents the active ones of the pool, without a leader."""
    for kind, document in documents.items():
        store = ManifestStore(management, pool=pool, kind=kind, load=LOADERS[kind])
        await store.save(document, author="bench", at=0.0)
