"""The table of the HTTP API: the grant that each endpoint needs, and for which keys. Pure.

The most specific paths come first, as in the router: `{key:path}` would match an action as a part of the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from osrdyne.auth.grants import Grant

CIRCUITS_PATH = "/queuecircuitbreaker/circuit"
"""The circuits in the shapes of Gateleen; `api.circuits_path` is another name of it."""

_PLURALS = {"group": "groups", "queue": "queues", "circuit": "circuits"}  # Both paths of one name the same actions.


class KeysOf(Enum):
    """The keys that an endpoint concerns, to check a grant that is limited to some keys."""

    NONE = "none: a limited grant is enough"
    ALL = "those of the whole pool: a limited grant is not enough"
    PATH = "the key in the path"
    QUERY = "the one `key=` of the query"
    ENDPOINT = "the endpoint finds them, and checks or filters them itself"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table. `grant` None: open to everyone."""

    method: str
    path: str
    grant: Grant | None
    keys: KeysOf = KeysOf.ALL

    @property
    def is_change(self) -> bool:
        """Whether it changes something, so that each use is recorded (`osrdyne.api.access.audit`). A POST with the
        grant `view` only reads: its parameters do not fit into a query."""
        return self.method not in {"", "GET"} and self.grant not in {None, Grant.VIEW}

    @property
    def is_probe(self) -> bool:
        """Whether probes use it: its answer must not wait for RabbitMQ."""
        return self.path in {"/health", "/ready"}

    @property
    def target_parameters(self) -> tuple[str, ...]:
        """The parameters of the query that name the target of a change."""
        if self.path.startswith("/v1/poison/"):
            return ("id",)
        if self.path.endswith("/rollback"):
            return ("version",)
        return ("key",) if self.keys is KeysOf.QUERY else ()

    @property
    def action(self) -> str:
        """The name of a change in records: `groups.stop`, `routes.put`, `queues.create`."""
        names = [_PLURALS.get(name, name) for name in self.path.split("/")[2:] if not name.startswith("{")]
        if self.method != "POST":
            names.append(self.method.lower())
        elif len(names) == 1:
            names.append("create")
        return ".".join(names)


def _circuits(prefix: str) -> tuple[Endpoint, ...]:
    return (
        Endpoint("GET", prefix, Grant.VIEW),
        Endpoint("GET", f"{prefix}/_all", Grant.VIEW),
        Endpoint("PUT", f"{prefix}/_all/status", Grant.OPERATE),
        Endpoint("PUT", f"{prefix}/{{hash}}/status", Grant.OPERATE),
        Endpoint("GET", f"{prefix}/{{hash}}", Grant.VIEW),
        Endpoint("GET", f"{prefix}/{{hash}}/status", Grant.VIEW),
    )


def _manifest(name: str) -> tuple[Endpoint, ...]:
    return (
        Endpoint("GET", f"/v1/{name}", Grant.VIEW),
        Endpoint("PUT", f"/v1/{name}", Grant.ADMIN),
        Endpoint("DELETE", f"/v1/{name}", Grant.ADMIN),
        Endpoint("GET", f"/v1/{name}/history", Grant.VIEW),
        Endpoint("POST", f"/v1/{name}/rollback", Grant.ADMIN),
    )


def _group(prefix: str, keys: KeysOf) -> tuple[Endpoint, ...]:
    actions = ("start", "stop", "pin", "unpin", "reload")
    return (
        Endpoint("GET", f"{prefix}/logs", Grant.VIEW, keys),
        *(Endpoint("POST", f"{prefix}/{action}", Grant.OPERATE, keys) for action in actions),
        Endpoint("GET", prefix, Grant.VIEW, keys),
    )


ENDPOINTS = (
    Endpoint("GET", "/health", None, KeysOf.NONE),
    Endpoint("GET", "/ready", None, KeysOf.NONE),
    Endpoint("GET", "/version", Grant.VIEW, KeysOf.NONE),
    Endpoint("GET", "/openapi.json", Grant.VIEW, KeysOf.NONE),
    Endpoint("GET", "/metrics", Grant.VIEW),
    Endpoint("GET", "/status", Grant.VIEW, KeysOf.ENDPOINT),
    Endpoint("GET", "/v1/leadership", Grant.VIEW, KeysOf.NONE),
    Endpoint("GET", "/v1/processes", Grant.VIEW),
    Endpoint("GET", "/v1/processes/{worker_id}/logs", Grant.VIEW),
    Endpoint("GET", "/v1/processes/{worker_id}", Grant.VIEW),
    Endpoint("GET", "/v1/audit", Grant.ADMIN),
    Endpoint("GET", "/v1/poison", Grant.VIEW, KeysOf.ENDPOINT),
    Endpoint("POST", "/v1/poison/replay", Grant.OPERATE, KeysOf.ENDPOINT),
    Endpoint("POST", "/v1/poison/drop", Grant.OPERATE, KeysOf.ENDPOINT),
    Endpoint("GET", "/v1/poison/{entry}", Grant.BODIES, KeysOf.ENDPOINT),
    *_manifest("routes"),
    *_manifest("splitter"),
    *_manifest("profiles"),
    *_manifest("policies"),
    *_manifest("quota"),
    Endpoint("GET", "/v1/policies/effective", Grant.VIEW, KeysOf.QUERY),
    Endpoint("GET", "/v1/telemetry", Grant.VIEW),
    Endpoint("GET", "/v1/last", Grant.VIEW, KeysOf.QUERY),
    Endpoint("GET", "/v1/lag", Grant.VIEW, KeysOf.ENDPOINT),
    *_manifest("circuits/config"),
    *_circuits("/v1/circuits"),
    *_circuits(CIRCUITS_PATH),
    Endpoint("POST", "/v1/capacity", Grant.VIEW, KeysOf.NONE),
    # Open: they show what the sender may discover by the policy of each queue.
    Endpoint("GET", "/v1/queues", None, KeysOf.ENDPOINT),
    Endpoint("GET", "/v1/queue", None, KeysOf.ENDPOINT),
    Endpoint("POST", "/v1/queues", Grant.OPERATE, KeysOf.QUERY),
    Endpoint("PUT", "/v1/queue", Grant.OPERATE, KeysOf.QUERY),
    Endpoint("DELETE", "/v1/queue", Grant.OPERATE, KeysOf.QUERY),
    Endpoint("POST", "/v1/explain", Grant.VIEW, KeysOf.ENDPOINT),
    Endpoint("GET", "/v1/groups", Grant.VIEW, KeysOf.ENDPOINT),
    *_group("/v1/group", KeysOf.QUERY),
    *_group("/v1/groups/{key:path}", KeysOf.PATH),
)
UNKNOWN = Endpoint("", "", Grant.ADMIN)
"""The grant for a method and path without a row, which have no endpoint."""

_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


def _expression(path: str) -> re.Pattern[str]:
    pieces, at = [], 0
    for found in _PARAMETER.finditer(path):
        pieces += [re.escape(path[at : found.start()]), f"(?P<{found[1]}>{'.*' if found[2] else '[^/]+'})"]
        at = found.end()
    return re.compile("".join([*pieces, re.escape(path[at:])]), re.DOTALL)


_ROWS = [(endpoint, _expression(endpoint.path)) for endpoint in ENDPOINTS]


def find_endpoint(method: str, path: str) -> tuple[Endpoint, Mapping[str, str]]:
    """The row of a request by its raw path, as the router sees it, and the parts of the path by name."""
    method = "GET" if method == "HEAD" else method
    for endpoint, expression in _ROWS:
        if endpoint.method == method and (found := expression.fullmatch(path)) is not None:
            return endpoint, found.groupdict()
    return UNKNOWN, {}
