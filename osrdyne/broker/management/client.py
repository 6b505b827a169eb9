"""RabbitMQ's HTTP API: listings, policies, global parameters, users of workers, and queries of `doctor`.

It never changes the pool's queues or bindings: that is done over AMQP, on the channel that holds the leader token. It
deletes exchanges and queues that code in a worker has declared under the worker's own name.

Every call has a time-out, every answer is validated, and no error, log or repr holds a password.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

import httpx

from osrdyne.aio.clock import Clock, SystemClock
from osrdyne.aio.tasks import off_loop
from osrdyne.amqp.errors import describe_unreachable
from osrdyne.amqp.tls import describe_tls_error, ssl_context
from osrdyne.broker.management.models import (
    Binding,
    ListedBinding,
    ListedExchange,
    NodeStatus,
    Overview,
    Permissions,
    QueueHistory,
    QueueTotals,
    Whoami,
    read_any_binding,
    read_binding,
    read_consuming_connections,
    read_exchange,
    read_history,
    read_node,
    read_overview,
    read_permissions,
    read_policy,
    read_totals,
    read_whoami,
)
from osrdyne.broker.topology.policies import PolicySpec
from osrdyne.config.models import BrokerSettings
from osrdyne.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerError,
    BrokerNotFoundError,
    ManagementUnavailableError,
)

MAX_PAGE_SIZE = 500  # RabbitMQ refuses larger pages.
_MAX_NESTING = 32  # Levels of an answer that are read where it is nested too deeply for the JSON parser.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_QUEUE_COLUMNS = "name,arguments,messages,messages_ready,messages_unacknowledged,state,type,policy,members,online"

_HISTORY = {"age": 300, "incr": 30}  # Seconds; RabbitMQ keeps these statistics for ten minutes.

MAX_LISTING_TIMEOUT = 10
"""How many times as long as other calls a listing may take: each that is too late doubles the limit of the next one."""

LIST_ATTEMPTS = 3
LIST_PAUSE = 0.2
"""Attempts to list the users, and seconds between two of them."""


class _ServerError(ManagementUnavailableError):
    """RabbitMQ answered 500: the request made it fail. Another 5xx means that it does not run properly."""


class ManagementClient:
    """A client of the HTTP API for one virtual host, that of the AMQP URI. Close it with `close` or `async with`.

    Errors of every method: `ManagementUnavailableError` when the API cannot be reached, fails or is too late,
    `BrokerAccessError` when it refuses the user, `BrokerNotFoundError`, `BrokerError` when something else answers.
    """

    def __init__(
        self, settings: BrokerSettings, *, clock: Clock | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        uri = urlsplit(settings.effective_management_uri())
        self.vhost = vhost_of(settings.uri.get_secret_value())
        self.user = unquote(uri.username or "guest")
        self._address = f"{uri.scheme}://{uri.netloc.rpartition('@')[2]}"
        self._clock = clock or SystemClock()
        self._large: set[str] = set()
        self._timeout = settings.management_timeout
        self._listing_timeout = settings.management_timeout
        self._client = httpx.AsyncClient(
            base_url=f"{self._address}{uri.path.rstrip('/')}/api/",
            auth=(self.user, unquote(uri.password or "guest")),
            timeout=None,  # httpx's limits are for each read and write; `_request` limits the whole call
            verify=ssl_context(settings.effective_tls(), place="broker.tls") if uri.scheme == "https" else False,
            trust_env=False,  # ignores proxies of the environment, which may not reach a local broker
            transport=transport,
        )

    def __repr__(self) -> str:
        return f"ManagementClient({self._address}, vhost={self.vhost!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def overview(self) -> Overview:
        """Version and name of the cluster, and the broker's clock."""
        answer = await self._request("GET", "overview")
        return read_overview(_object(answer), date=answer.headers.get("date"), now=self._clock.time())

    async def whoami(self) -> Whoami:
        return read_whoami(_object(await self._request("GET", "whoami")))

    async def nodes(self) -> list[NodeStatus]:
        """Memory, disk, file descriptors and alarms of every node; needs the tag `monitoring`.

        Most values are None in the first seconds of a node.
        """
        return [read_node(item) for item in _objects(await self._request("GET", "nodes"))]

    async def permissions(self, user: str | None = None) -> Permissions | None:
        """The permissions of a user on the virtual host, by default of this client's user; None if it has none. Needs
        the tag `administrator`."""
        answer = await self._find("permissions", self.vhost, user or self.user)
        return None if answer is None else read_permissions(_object(answer))

    async def disabled_feature_flags(self) -> list[str]:
        """Stable feature flags that have not been enabled since an upgrade."""
        flags = _objects(await self._request("GET", "feature-flags"))
        return sorted(str(flag.get("name")) for flag in flags if flag.get("state") == "disabled")

    async def list_queues(self, prefix: str, *, page_size: int = MAX_PAGE_SIZE) -> list[QueueTotals]:
        """All queues whose name begins with `prefix`, with their message totals (broker: totals-listing).

        Lists one page if that holds them all, else all queues of the virtual host at once: queues that are declared or
        deleted between two pages would hide others, and RabbitMQ scans all queues for each page. A queue that exists
        during the whole call is in the result.
        """
        # After a result of several pages, the next call starts with the full listing: one request instead of two.
        if prefix not in self._large:
            # Before the request, so that the totals never count as newer than they are.
            asked_at = self._clock.monotonic()
            body = _object(await self._list_queues(_page_of(prefix, page_size)))
            if int(body.get("page_count") or 0) <= 1:
                return _totals_of(body.get("items"), prefix, asked_at)
        asked_at = self._clock.monotonic()
        answer = await self._list_queues({})
        queues = await off_loop(len(answer.content), lambda: _totals_of(_json(answer), prefix, asked_at))
        # Half of the limit, so that a pool near it does not alternate between both kinds of listing.
        if len(queues) > page_size / 2:
            self._large.add(prefix)
        else:
            self._large.discard(prefix)
        return queues

    async def _list_queues(self, page: Mapping[str, str]) -> httpx.Response:
        totals = {"disable_stats": "true", "enable_queue_totals": "true", "columns": _QUEUE_COLUMNS}
        return await self._list("queues", self.vhost, query={**totals, **page})

    async def _list(self, *path: str, query: Mapping[str, str] | None = None) -> httpx.Response:
        """Request a listing that grows with the pool. RabbitMQ makes the whole one for each page of it, so that pages
        would not be ready earlier; with thousands of queues it may need longer than any other call."""
        try:
            return await self._request("GET", *path, query=query, timeout=self._listing_timeout)
        except ManagementUnavailableError as error:
            if isinstance(error.__cause__, TimeoutError | httpx.TimeoutException):
                self._listing_timeout = min(2 * self._listing_timeout, MAX_LISTING_TIMEOUT * self._timeout)
            raise

    async def list_bindings(self, exchange: str) -> list[Binding]:
        """The bindings of queues to `exchange`; none if the exchange does not exist."""
        answer = await self._list("exchanges", self.vhost, exchange, "bindings", "source")
        items = await off_loop(len(answer.content), lambda: _objects(answer))
        return [binding for item in items if (binding := read_binding(item)) is not None]

    async def has_binding(self, exchange: str, queue: str, routing_key: str) -> bool:
        """Whether the queue is bound to the exchange by this routing key."""
        answer = await self._find("bindings", self.vhost, "e", exchange, "q", queue)
        items = [] if answer is None else _objects(answer)
        return any(item.get("routing_key") == routing_key for item in items)

    async def get_queue_arguments(self, name: str) -> Mapping[str, object] | None:
        """The arguments of a queue; None if it does not exist. Unlike a listing, the cost does not grow with the number
        of queues."""
        query = {"disable_stats": "true", "columns": "name,arguments"}
        try:
            answer = _object(await self._request("GET", "queues", self.vhost, name, query=query))
        except BrokerNotFoundError:
            return None
        arguments = answer.get("arguments")
        return arguments if isinstance(arguments, dict) else {}

    async def count_consuming_connections(self, queue: str) -> int | None:
        """How many connections had a consumer of the queue some seconds ago; None if RabbitMQ does not report it.

        One connection may have several consumers.
        """
        answer = await self._find("queues", self.vhost, queue)
        return 0 if answer is None else read_consuming_connections(_object(answer))

    async def queue_history(self, name: str) -> QueueHistory | None:
        """The last minutes of a queue; None if it does not exist."""
        query = {f"{kind}_{what}": str(value) for kind in ("lengths", "msg_rates") for what, value in _HISTORY.items()}
        try:
            return read_history(name, _object(await self._request("GET", "queues", self.vhost, name, query=query)))
        except BrokerNotFoundError:
            return None

    async def find_exchanges(self, prefix: str) -> list[ListedExchange]:
        """The exchanges whose name begins with `prefix`; at most `MAX_PAGE_SIZE`."""
        query = {"name": f"^{re.escape(prefix)}", "use_regex": "true", "page": "1", "page_size": str(MAX_PAGE_SIZE)}
        body = _object(await self._request("GET", "exchanges", self.vhost, query=query))
        return [read_exchange(item) for item in body.get("items") or [] if isinstance(item, dict)]

    async def list_source_bindings(self, exchange: str) -> list[ListedBinding]:
        """All bindings from `exchange`, to queues and to exchanges; none if it does not exist."""
        answer = await self._list("exchanges", self.vhost, exchange, "bindings", "source")
        return [read_any_binding(item) for item in _objects(answer)]

    async def list_policies(self) -> list[PolicySpec]:
        """All policies of the virtual host."""
        return [read_policy(item) for item in _objects(await self._request("GET", "policies", self.vhost))]

    async def list_operator_policies(self) -> list[PolicySpec]:
        """All operator policies of the virtual host; none if this user may not read them."""
        try:
            answer = await self._request("GET", "operator-policies", self.vhost)
        except BrokerAccessError:
            return []
        return [read_policy(item) for item in _objects(answer)]

    async def get_policy(self, name: str) -> PolicySpec | None:
        answer = await self._find("policies", self.vhost, name)
        return None if answer is None else read_policy(_object(answer))

    async def put_policy(self, policy: PolicySpec) -> None:
        """Create or replace a policy. Needs the tag `policymaker`."""
        await self._request("PUT", "policies", self.vhost, policy.name, body=policy.to_json())

    async def delete_policy(self, name: str) -> None:
        """Delete a policy; a missing one is not an error."""
        await self._find("policies", self.vhost, name, method="DELETE")

    async def get_global_parameter(self, name: str) -> object | None:
        """The value of a global parameter; None when it is not set."""
        answer = await self._find("global-parameters", name)
        return None if answer is None else _object(answer).get("value")

    async def list_global_parameters(self, prefix: str) -> list[str]:
        """The names of the global parameters that begin with `prefix`."""
        found = _objects(await self._request("GET", "global-parameters", query={"columns": "name"}))
        return [name for one in found if (name := str(one.get("name"))).startswith(prefix)]

    async def put_global_parameter(self, name: str, value: object) -> None:
        await self._request("PUT", "global-parameters", name, body={"name": name, "value": value})

    async def list_users(self, prefix: str) -> list[str]:
        """The users whose name begins with `prefix`. Commands on users and permissions need the tag `administrator`."""
        users = _objects(await self._list_users())
        return sorted(name for user in users if (name := str(user.get("name"))).startswith(prefix))

    async def _list_users(self) -> httpx.Response:
        # RabbitMQ answers 500 if a user is deleted while it makes the list.
        for _ in range(LIST_ATTEMPTS - 1):
            with suppress(_ServerError):
                return await self._request("GET", "users", query={"columns": "name"})
            await self._clock.sleep(LIST_PAUSE)
        return await self._request("GET", "users", query={"columns": "name"})

    async def put_user(self, name: str, *, password: str) -> None:
        """Create a user without tags and permissions, or change its password."""
        await self._request("PUT", "users", name, body={"password": password, "tags": ""})

    async def put_user_limit(self, user: str, limit: str, value: int) -> None:
        await self._request("PUT", "user-limits", user, limit, body={"value": value})

    async def put_permissions(self, user: str, permissions: Permissions) -> None:
        """Set the permissions of the user on the virtual host."""
        await self._request("PUT", "permissions", self.vhost, user, body=asdict(permissions))

    async def put_topic_permissions(self, user: str, exchange: str, *, write: str, read: str) -> None:
        """Set the routing keys with which the user may publish to a topic exchange, and bind queues to it."""
        body = {"exchange": exchange, "write": write, "read": read}
        await self._request("PUT", "topic-permissions", self.vhost, user, body=body)

    async def delete_user(self, name: str) -> None:
        """Delete a user, which closes its connections (broker: user-per-worker); a missing one is not an error."""
        await self._find("users", name, method="DELETE")

    async def list_exchanges(self) -> list[str]:
        """The names of all exchanges of the virtual host."""
        answer = await self._request("GET", "exchanges", self.vhost, query={"columns": "name"})
        return [str(item.get("name")) for item in _objects(answer)]

    async def delete_exchange(self, name: str) -> None:
        """Delete an exchange; a missing one is not an error."""
        await self._find("exchanges", self.vhost, name, method="DELETE")

    async def delete_queue(self, name: str) -> None:
        """Delete a queue that does not belong to the pool itself; a missing one is not an error."""
        await self._find("queues", self.vhost, name, method="DELETE")

    async def _find(self, *path: str, method: str = "GET") -> httpx.Response | None:
        try:
            return await self._request(method, *path)
        except BrokerNotFoundError:
            return None

    async def _request(
        self,
        method: str,
        *path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        timeout: float | None = None,
    ) -> httpx.Response:
        doing = f"{method} {path[0]} at {self._address}"
        try:
            async with asyncio.timeout(self._timeout if timeout is None else timeout):
                answer = await self._client.request(
                    method,
                    # Keys and names of queues are data: a slash in them must not become a part of the path.
                    "/".join(quote(part, safe="") for part in path),
                    params=query,
                    json=body,
                )
        except (TimeoutError, httpx.TimeoutException) as error:
            # A change may have been made; all changes of this client can be repeated.
            raise ManagementUnavailableError(f"RabbitMQ's HTTP API did not answer in time ({doing}).") from error
        except (httpx.ConnectError, ssl.SSLError) as error:
            if (trouble := describe_tls_error(error)) is not None:
                raise ManagementUnavailableError(f"TLS failed at RabbitMQ's HTTP API ({doing}): {trouble}.") from error
            trouble = describe_unreachable(error) or str(error)
            raise ManagementUnavailableError(
                f"RabbitMQ's HTTP API cannot be reached at {self._address}: {trouble}. Check broker.management_uri, "
                "and that the management plugin is on (rabbitmq-plugins enable rabbitmq_management)."
            ) from error
        except httpx.RequestError as error:
            raise ManagementUnavailableError(
                f"The connection to RabbitMQ's HTTP API failed ({doing}: {error}); "
                "if this continues, check that broker.management_uri is not the AMQP port."
            ) from error
        self._raise_for_status(answer, doing)
        return answer

    def _raise_for_status(self, answer: httpx.Response, doing: str) -> None:
        if answer.is_success:
            return
        reason = _reason(answer)
        # An error of the server, for example while it starts: a retry may succeed.
        if answer.status_code >= 500:
            kind = _ServerError if answer.status_code == 500 else ManagementUnavailableError
            raise kind(f"RabbitMQ's HTTP API failed ({doing}: {answer.status_code} {reason or ''}).")
        if reason is None:
            raise BrokerError(
                f"The server at {self._address} is not RabbitMQ's HTTP API (status {answer.status_code}, no JSON): "
                "check broker.management_uri."
            )
        if answer.status_code in {401, 403}:
            raise BrokerAccessError(f"RabbitMQ's HTTP API refused the user {self.user!r} ({doing}): {reason}.")
        if answer.status_code == 404:
            raise BrokerNotFoundError(f"RabbitMQ's HTTP API found no such object ({doing}).")
        if answer.status_code == 409:
            raise BrokerConflictError(f"RabbitMQ's HTTP API refused a change ({doing}): {reason}.")
        raise BrokerError(f"RabbitMQ's HTTP API refused the request ({doing}): {reason}.")


def _page_of(prefix: str, page_size: int) -> dict[str, str]:
    name = f"^{re.escape(prefix)}"
    return {"name": name, "use_regex": "true", "sort": "name", "page": "1", "page_size": str(page_size)}


def _totals_of(items: object, prefix: str, asked_at: float) -> list[QueueTotals]:
    """Parse a listing. Raises `BrokerError` if it is malformed."""
    if not isinstance(items, list):
        raise BrokerError("RabbitMQ's HTTP API returned no list of queues.")
    queues = (read_totals(item, asked_at=asked_at) for item in items)
    return [queue for queue in queues if queue is not None and queue.name.startswith(prefix)]


def vhost_of(amqp_uri: str) -> str:
    """The virtual host of an AMQP URI; `/` if the URI has none or an empty one, as in the AMQP client."""
    return unquote(urlsplit(amqp_uri).path.removeprefix("/")) or "/"


def _json(answer: httpx.Response) -> Any:
    """Parse the body; None if it is not JSON."""
    text = answer.content.decode("utf-8", "replace")
    try:
        try:
            return json.loads(text)
        except RecursionError:
            return json.loads(_without_deep_values(text))
    except ValueError:
        return None


def _without_deep_values(text: str) -> str:
    """Replace arrays and objects below `_MAX_NESTING` levels by null: any user of the virtual host may declare a queue
    with arguments that are nested so deeply (defects: foreign-queues)."""
    kept, depth, start = [], 0, 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth == _MAX_NESTING + 1:
                kept += [text[start : found.start()], "null"]
        elif found[0] in "]}":
            if depth == _MAX_NESTING + 1:
                start = found.end()
            depth -= 1
    return "".join([*kept, text[start:]])


def _reason(answer: httpx.Response) -> str | None:
    """The reason that RabbitMQ gives; None if the answer is not one of its JSON objects."""
    body = _json(answer)
    return str(body.get("reason") or body.get("error")) if isinstance(body, dict) else None


def _object(answer: httpx.Response) -> dict[str, Any]:
    body = _json(answer)
    if not isinstance(body, dict):
        raise _not_rabbitmq(answer)
    return body


def _objects(answer: httpx.Response) -> list[dict[str, Any]]:
    body = _json(answer)
    if not isinstance(body, list):
        raise _not_rabbitmq(answer)
    return [item for item in body if isinstance(item, dict)]


def _not_rabbitmq(answer: httpx.Response) -> BrokerError:
    url = answer.request.url
    return BrokerError(
        f"The server at {url.scheme}://{url.netloc.decode()} is not RabbitMQ's HTTP API: check broker.management_uri."
    )
