"""The part of a node, for an API server without nodes: it binds pods, reports their state, and serves their logs.

It runs in a thread and a loop of its own and plays every pod of one namespace as the worker of the conformance suite
would behave; `WORKER_CONFIG` of the pod says how. A process of the suite of pooled workers is really run. It reads the
pod as a kubelet does. Two behaviours are its own: `config["played"]` may be `no-image` or `no-node`.
"""

import asyncio
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from lightkube import ApiError, AsyncClient
from lightkube.config.kubeconfig import SingleConfig
from lightkube.models.core_v1 import ObjectReference
from lightkube.models.meta_v1 import ObjectMeta, Status
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Node, NodeStatus, Pod, PodBinding, PodStatus, Secret
from lightkube.types import on_error_retry

from osrdyne.testing.pooled_process import DIRECTORY_VARIABLE

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_]*)\))")
_DONE_CODE = 143
_KILLED = 137
_TIDYING = 0.2
"""Seconds between the end of a container and that of its pod, when its log can still be read."""
_UNREAD = 30.0
"""Seconds that the pod of a busy worker stays at most where nothing has read its log since its container ended."""


@dataclass
class Played:
    """One pod being played."""

    pod: Pod
    lines: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    gone: bool = False
    killed: bool = False
    process: asyncio.subprocess.Process | None = None
    read: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def config(self) -> dict[str, Any]:
        """How the worker behaves."""
        found: dict[str, Any] = json.loads(variables_of(self.pod).get("WORKER_CONFIG", "{}"))
        return found

    @property
    def grace(self) -> float | None:
        """Seconds it may take to end; None until that is requested."""
        metadata = self.pod.metadata
        if self.gone:
            return 0.0
        return metadata.deletionGracePeriodSeconds if metadata.deletionTimestamp else None


class PlayedKubelet:
    """`start`, then pods of `namespace` come up; `stop` at the end."""

    def __init__(self, config: SingleConfig, namespace: str, directory: Path) -> None:
        self._config = config
        self._namespace = namespace
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="played kubelet", daemon=True)
        self._pods: dict[str, Played] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.node = f"played-{namespace}"
        self.faults: list[Exception] = []

    def start(self) -> None:
        for kind in (Pod, Deployment, Secret, Node, PodBinding, Status):
            with suppress(msgspec.ValidationError):  # msgspec crashes when two threads meet a type for the first time
                msgspec.json.decode(b"{}", type=kind)
        self._thread.start()
        self.call(self._start())

    def stop(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert self.faults == []

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=240)

    async def crash(self, worker_id: str, *, code: int = _KILLED, reason: str = "Error") -> None:
        """From any loop: the worker's containers end and are never well again."""
        await self._everywhere(worker_id, lambda played: self._crash(played, code=code, reason=reason))

    async def kill_process(self, worker_id: str) -> None:
        """From any loop: kill a process of pooled workers."""

        async def kill(played: Played) -> None:
            assert played.process is not None
            played.process.kill()

        await self._everywhere(worker_id, kill)

    async def end_once(self, worker_id: str) -> None:
        """From any loop: the worker's containers end and come up again at once, as Kubernetes sees to it."""
        await self._everywhere(worker_id, self._restart)

    async def _everywhere(self, worker_id: str, action: Any) -> None:
        async def run() -> None:
            for played in list(self._pods.values()):
                if played.pod.metadata.labels.get("osrdyne.dev/worker") == worker_id:
                    await action(played)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    # --- in its own loop

    async def _start(self) -> None:
        self._client = AsyncClient(config=self._config, namespace=self._namespace)
        key, certificate = (str(self._directory / name) for name in ("kubelet.key", "kubelet.pem"))
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=played"]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=240)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server = await asyncio.start_server(self._serve_logs, "127.0.0.1", 0, ssl=context)
        port = self._server.sockets[0].getsockname()[1]
        await self._client.create(Node(metadata=ObjectMeta(name=self.node)))
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        status = {"addresses": addresses, "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}
        await self._client.patch(NodeStatus, self.node, {"status": status})
        self._watching = asyncio.create_task(self._watch())

    async def _stop(self) -> None:
        tasks = [self._watching, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.delete(Node, self.node)
        self._server.close()
        await self._client.close()

    async def _watch(self) -> None:
        async for event, pod in self._client.watch(Pod, on_error=on_error_retry):
            uid = pod.metadata.uid
            if event == "DELETED":
                if gone := self._pods.pop(uid, None):
                    gone.gone = True  # not cancelled: a request that is cancelled may leave its connection open
                continue
            played = self._pods.setdefault(uid, Played(pod))
            played.pod = pod
            if played.task is None:
                played.task = asyncio.create_task(self._play(played))
                self._tasks.add(played.task)
                played.task.add_done_callback(self._tasks.discard)

    async def _play(self, played: Played) -> None:
        try:
            await self._run(played)
            await self._end(played)
        except Exception as error:
            if not isinstance(error, ApiError) or error.status.code not in {404, 409}:  # it is gone already
                self.faults.append(error)

    async def _run(self, played: Played) -> None:
        config = played.config
        if config.get("played") == "no-node":
            unscheduled = _condition("PodScheduled", False, "Unschedulable", "0/3 nodes fit.")
            return await self._say(played, conditions=[unscheduled])
        name = played.pod.metadata.name
        target = ObjectReference(kind="Node", name=self.node)
        with suppress(msgspec.ValidationError):  # the answer is no Binding
            await self._client.create(PodBinding(metadata=ObjectMeta(name=name), target=target), name)
        if config.get("played") == "no-image":
            waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
            return await self._container(played, {"waiting": waiting})
        secret = await self._existing_secret(played)
        if secret is None:
            return None
        if DIRECTORY_VARIABLE in variables_of(played.pod):
            return await self._run_process(played, secret)
        played.lines = [json.dumps(_report(played.pod, secret, config))]
        played.lines += [f"line {number}" for number in range(config.get("lines", 0))]
        behaviour = config.get("behaviour")
        if behaviour == "silent":
            return await self._container(played, {"running": {}})
        played.lines.append("ready")
        if behaviour == "exit":
            return await self._crash(played, code=config.get("code", 0), reason="Completed")
        return await self._container(played, {"running": {}}, ready=True)

    async def _run_process(self, played: Played, secret: Secret) -> None:
        """Run the process of the pod to its end. Kubernetes keeps its pod, whose container has terminated."""
        environment = os.environ | variables_of(played.pod, secret)
        played.process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "osrdyne.testing.pooled_process", env=environment, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        await self._container(played, {"running": {}}, ready=True)
        ended = asyncio.ensure_future(process.wait())
        # The pod may be deleted, or deleted at once while it has time left to end.
        while not ended.done():
            if played.grace is not None:
                process.terminate()
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(ended), max(played.grace, _TIDYING))
                if not ended.done():
                    process.kill()
                await ended
            await asyncio.wait({ended}, timeout=0.02)
        played.lines = (await process.stdout.read()).decode().splitlines()
        code = process.returncode or 0
        terminated = _terminated(128 - code if code < 0 else code, "Error" if code else "Completed")
        if not played.gone:
            await self._container(played, {"terminated": terminated}, phase="Failed" if code else "Succeeded")

    async def _end(self, played: Played) -> None:
        """End as asked: the stubborn one by being killed when its time is over."""
        behaviour = played.config.get("behaviour")
        while played.grace is None:
            await asyncio.sleep(0.02)
        waited = 0.0
        while behaviour == "stubborn" and not played.killed and waited < (played.grace or 0.0):
            await asyncio.sleep(0.05)
            waited += 0.05
        code = _KILLED if behaviour == "stubborn" else 0
        if behaviour == "busy":
            await asyncio.sleep(0.3)
            played.lines.append("job finished")
        if played.process is None and (played.pod.spec.nodeName or played.lines):
            played.read.clear()
            await self._container(played, {"terminated": _terminated(code)})
            await asyncio.sleep(_TIDYING)
            if behaviour == "busy":  # on a busy machine the driver reads the last line later than that
                with suppress(TimeoutError):
                    await asyncio.wait_for(played.read.wait(), _UNREAD)
        await self._client.delete(Pod, played.pod.metadata.name, grace_period=0)

    async def _crash(self, played: Played, *, code: int, reason: str) -> None:
        terminated = _terminated(code, reason)
        played.killed = True
        await self._container(played, {"terminated": terminated})
        waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}}
        await self._container(played, waiting, last={"terminated": terminated})

    async def _restart(self, played: Played) -> None:
        terminated = _terminated(_DONE_CODE)
        await self._container(played, {"terminated": terminated})
        await self._container(played, {"running": {}}, last={"terminated": terminated}, ready=True)

    async def _container(
        self, played: Played, state: Any, *, last: Any = None, ready: bool = False, phase: str = "Running"
    ) -> None:
        """Report the state; with the `last` one, the container has restarted once."""
        container = played.pod.spec.containers[0]
        image = {"name": container.name, "image": container.image, "imageID": ""}
        states = {"state": state, "lastState": last or {}, "restartCount": int(last is not None)}
        status = {**image, **states, "ready": ready}
        conditions = [_condition("PodScheduled", True), _condition("Ready", ready)]
        await self._say(played, phase=phase, containerStatuses=[status], conditions=conditions)

    async def _say(self, played: Played, **status: Any) -> None:
        await self._client.patch(PodStatus, played.pod.metadata.name, {"status": status})

    async def _existing_secret(self, played: Played) -> Secret | None:
        """A kubelet tries again until the Secret is there; None when the pod is to end before that."""
        name = secret_of(played.pod)
        while played.grace is None:
            try:
                return await self._client.get(Secret, name)
            except ApiError as error:
                if error.status.code != 404:
                    raise
            await asyncio.sleep(0.05)
        return None

    async def _serve_logs(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`GET /containerLogs/NAMESPACE/POD/CONTAINER`, as the API server asks a kubelet."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        parts = urlsplit(head.split()[1])
        pod = parts.path.split("/")[3]
        played = next((one for one in self._pods.values() if one.pod.metadata.name == pod), None)
        lines = played.lines if played else []
        wanted = int(parse_qs(parts.query).get("tailLines", ["1000000"])[0])
        body = "".join(f"{line}\n" for line in lines[-wanted:]).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/plain\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()
        if played:
            played.read.set()


def _report(pod: Pod, secret: Secret, config: dict[str, Any]) -> dict[str, Any]:
    """The first line of the suite's worker, as if started with the pod's variables."""
    variables = variables_of(pod, secret)
    container = pod.spec.containers[0]
    key = variables.get("WORKER_KEY")
    if key is None:
        escaped = variables["WORKER_KEY_ESCAPED"].encode()
        key = re.sub(rb"\+([0-9A-F]{2})", lambda found: bytes.fromhex(found[1].decode()), escaped).decode()
    return {
        "worker_id": variables["WORKER_ID"],
        "key": key,
        "pool": variables["WORKER_POOL"],
        "queue": variables.get("WORKER_REQUESTS_QUEUE"),  # a process of pooled workers has none
        "uri_sha256": hashlib.sha256(variables["WORKER_AMQP_URI"].encode()).hexdigest(),
        "config": config,
        "arguments": [expand(part, variables) for part in container.command],
        "variables": variables,
    }


def secret_of(pod: Pod) -> str:
    """The name of the Secret that a variable of the pod's container refers to."""
    sources = (item.valueFrom for item in pod.spec.containers[0].env)
    return next(str(source.secretKeyRef.name) for source in sources if source is not None and source.secretKeyRef)


def variables_of(pod: Pod, secret: Secret | None = None) -> dict[str, str]:
    """The environment of the pod's container, as a kubelet makes it; without the Secret, what is known before."""
    variables: dict[str, str] = {}
    for item in pod.spec.containers[0].env:
        if item.valueFrom is not None and item.valueFrom.secretKeyRef is not None:
            if secret is not None:
                variables[item.name] = b64decode(secret.data[item.valueFrom.secretKeyRef.key]).decode()
        elif item.valueFrom is not None:
            assert item.valueFrom.fieldRef.fieldPath == "metadata.name"
            variables[item.name] = pod.metadata.name
        else:
            variables[item.name] = expand(item.value or "", variables)
    return variables


def expand(text: str, variables: dict[str, str]) -> str:
    """`$(NAME)` of a variable that is known, `$$` for a dollar sign. Source: Kubernetes, "dependent environment
    variables"."""

    return _REFERENCE.sub(lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text)


def _terminated(code: int, reason: str = "Completed") -> dict[str, Any]:
    return {"exitCode": code, "reason": reason}


def _condition(kind: str, holds: bool, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": "True" if holds else "False", "reason": reason, "message": message}
