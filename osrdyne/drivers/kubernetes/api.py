"""The calls of the Kubernetes API server that the driver needs, with errors translated. No other module sends any.

It uses lightkube for kubeconfig, credentials, TLS, watches and decoding. Two calls bypass lightkube's client, which
lacks them: the deletion of an object with a given uid, and the log of the previous run of a container.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec
import yaml
from lightkube import ApiError, KubeConfig
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError
from lightkube.core.generic_client import BasicRequest, GenericAsyncClient, WatchDriver
from lightkube.core.resource import NamespacedResource, api_info
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource
from lightkube.resources.core_v1 import PodLog
from lightkube.types import CascadeType, PatchType

from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.errors import DriverUnavailableError
from osrdyne.logs import mask_uri

R = TypeVar("R", bound=NamespacedResource)

# Seconds after which the API server ends a watch. If nothing arrives for longer, the connection is dead.
WATCH_SECONDS = 240
_WATCH_SLACK = 30.0
_PAGE = 500
_REMEDIES = {
    401: "Check the credentials in the kubeconfig, or the service account.",
    403: "Give the daemon's service account this right: the Role of the Helm chart holds all of them.",
}


class KubernetesError(DriverUnavailableError):
    """The API server refused or failed a call.

    `code`: the HTTP status; 0 without an answer. `is_final`: the same call would be refused again.
    """

    def __init__(self, message: str, *, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    @property
    def is_final(self) -> bool:
        return self.code in {400, 403, 404, 405, 422}


def resource_kind(api_version: str, kind: str, plural: str) -> type[GenericNamespacedResource]:
    """A kind that lightkube does not have, or has in another version."""
    group, _, version = api_version.rpartition("/")
    return create_namespaced_resource(group, version, kind, plural)


class KubernetesApi:
    """The API server of one cluster, and one namespace in it. Connects at the first call."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self._client: Any = None  # a GenericAsyncClient; half of its methods are not annotated
        self._opening = asyncio.Lock()
        self._server = ""

    async def _connected(self) -> Any:
        """The client. It is created in a thread, because it reads kubeconfig and certificates."""
        async with self._opening:
            if self._client is None:
                self._client = await asyncio.to_thread(self._open)
            return self._client

    def _open(self) -> Any:
        limits = ConnectionParams(timeout=httpx2.Timeout(self._options.request_timeout))
        try:
            config = load_config(self._options)
            self._server = config.cluster.server
            return GenericAsyncClient(limits, config, namespace=self._options.namespace)
        except (ConfigError, OSError, KeyError, ValueError, AssertionError) as error:
            raise KubernetesError(
                f"The access to Kubernetes cannot be set up: {error}. Check driver.options.kubeconfig and context.",
                reason="Config",
            ) from error

    async def namespace(self) -> str:
        """The namespace of the workers. Raises `KubernetesError` if the access cannot be set up."""
        return str((await self._connected()).namespace)

    @property
    def server(self) -> str:
        """The address of the API server, once the access is set up."""
        return self._server

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    # --- objects

    async def apply(self, kind: type[R], manifest: dict[str, Any], *, manager: str, force: bool = False) -> R:
        """Server-side apply. Without `force`, a different value of another manager is a conflict (409)."""
        params = {"fieldManager": manager, "force": "true" if force else "false"}
        headers = {"Content-Type": PatchType.APPLY.value}
        name = manifest["metadata"]["name"]
        client = await self._connected()
        request = client.prepare_request("patch", kind, obj=manifest, name=name, params=params, headers=headers)
        try:
            applied: R = await self._send("patch", request)
        except KubernetesError as error:
            if error.code == 403:  # the API server does not name a missing `create`
                message = f"{error.message} Applying needs create and patch on {api_info(kind).plural}."
                raise KubernetesError(message, code=403, reason=error.reason) from error
            raise
        return applied

    async def list(self, kind: type[R], selector: str) -> tuple[list[R], str]:
        """All objects that the label selector matches, and the resource version of the list."""
        client = await self._connected()
        request = client.prepare_request("list", kind, params={"labelSelector": selector, "limit": str(_PAGE)})
        found: list[R] = []
        version = ""
        try:
            async for page_version, page in client.list_chunks(request):
                found += page
                version = page_version
        except _FOREIGN as error:
            raise self._translate(error) from error
        return found, version

    async def delete(
        self,
        kind: type[NamespacedResource],
        name: str,
        *,
        uid: str | None = None,
        cascade: CascadeType = CascadeType.BACKGROUND,
        grace: int | None = None,
    ) -> None:
        """Delete an object; with `uid` only if it has this uid. No-op if it is gone, or was replaced meanwhile."""
        request = (await self._connected()).prepare_request("delete", kind, name=name)
        request.data = {"propagationPolicy": cascade.value}
        if uid is not None:
            request.data["preconditions"] = {"uid": uid}
        if grace is not None:
            request.data["gracePeriodSeconds"] = grace
        try:
            await self._send("delete", request)
        except KubernetesError as error:
            if error.code not in {404, 409}:
                raise

    async def watch(self, kind: type[R], selector: str, version: str) -> AsyncGenerator[tuple[str, R], None]:
        """Yields changes since the resource version, until the API server ends the watch.

        Raises `KubernetesError` with code 410 if the API server no longer has that version."""
        client = await self._connected()
        params = {"labelSelector": selector, "timeoutSeconds": str(WATCH_SECONDS), "resourceVersion": version}
        request = client.prepare_request("list", kind, watch=True, params=params)
        request.timeout = httpx2.Timeout(self._options.request_timeout, read=WATCH_SECONDS + _WATCH_SLACK)
        decoder: Any = WatchDriver(request, client.build_adapter_request)
        try:
            answer = await client.send(client.build_adapter_request(request), stream=True)
            async with contextlib.aclosing(answer):
                if answer.is_error:
                    await answer.aread()
                client.raise_for_status(answer)
                async for line in answer.aiter_lines():
                    yield decoder.process_one_line(line)
        except _FOREIGN as error:
            raise self._translate(error) from error

    async def logs(self, pod: str, *, container: str, lines: int, previous: bool) -> tuple[str, ...]:
        """The last lines of a container, or of its previous run; none if they cannot be read."""
        params = {"container": container, "tailLines": str(lines), "previous": "true" if previous else "false"}
        request = (await self._connected()).prepare_request("get", PodLog, name=pod, params=params)
        try:
            answer = await self._send_raw(request)
        except KubernetesError as error:
            if error.code in {400, 404, 500}:  # not started yet, gone, its node does not answer
                return ()
            raise
        return tuple(mask_uri(line) for line in answer.content.decode(errors="replace").splitlines())

    # --- the API server itself

    async def get_json(self, path: str) -> Any:
        """A document of the API server outside of namespaces, such as a list of versions."""
        return msgspec.json.decode((await self._send_raw(BasicRequest("GET", path))).content)

    async def may(self, *, verb: str, group: str, resource: str, subresource: str = "") -> bool:
        """Whether this client has a right in its namespace."""
        right = {"namespace": await self.namespace(), "verb": verb, "group": group, "resource": resource}
        if subresource:
            right["subresource"] = subresource
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": right},
        }
        request = BasicRequest("POST", "apis/authorization.k8s.io/v1/selfsubjectaccessreviews", data=review)
        answer = msgspec.json.decode((await self._send_raw(request)).content)
        return bool(answer["status"].get("allowed"))

    # --- internals

    async def _send(self, method: str, request: BasicRequest) -> Any:
        client = await self._connected()
        try:
            return client.handle_response(method, await client.send(client.build_adapter_request(request)), request)
        except _FOREIGN as error:
            raise self._translate(error) from error

    async def _send_raw(self, request: BasicRequest) -> httpx2.Response:
        client = await self._connected()
        try:
            answer: httpx2.Response = await client.send(client.build_adapter_request(request))
            client.raise_for_status(answer)
        except _FOREIGN as error:
            raise self._translate(error) from error
        return answer

    def _translate(self, error: BaseException) -> KubernetesError:
        """Translate an error. Messages of the API server name objects and fields, never the value of a secret."""
        if isinstance(error, ApiError):
            code, reason = error.status.code or 0, (error.status.message or "no reason given").rstrip(".")
            message = " ".join(filter(None, (f"Kubernetes refused: {reason}.", _REMEDIES.get(code))))
            return KubernetesError(message, code=code, reason=error.status.reason or "")
        if isinstance(error, httpx2.HTTPStatusError):
            code = error.response.status_code
            return KubernetesError(f"The API server at {self.server} answered {code}.", code=code)
        what = str(error) or type(error).__name__
        return KubernetesError(f"The API server at {self.server} does not answer: {what}.")


# The errors of lightkube and of its HTTP client; `KeyError` for an answer without a content type.
_FOREIGN = (httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError, TimeoutError, OSError, KeyError, ConfigError)


def load_config(options: KubernetesOptions) -> SingleConfig:
    """The kubeconfig of the options, else the pod's service account, else `$KUBECONFIG` or its default file."""
    try:
        found = KubeConfig.from_env() if options.kubeconfig is None else KubeConfig.from_file(Path(options.kubeconfig))
        config = found.get(options.context)
    except yaml.YAMLError:
        raise ConfigError("the kubeconfig is not YAML") from None
    if config is None:
        raise ConfigError("the kubeconfig names no current context; set driver.options.context")
    return config
