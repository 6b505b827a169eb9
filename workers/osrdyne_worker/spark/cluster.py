"""Spark on a cluster: settings that limit the cores of one worker, and a probe that checks that the cluster starts
executors.

A cluster without free cores accepts an application and starts no executor for it: Spark only logs "Initial job has not
accepted any resources", and each request would wait until its deadline. So a worker runs one JVM task and one Python
task before it is ready. A worker whose jobs have no executors for a long time exits and is replaced. Used by `session`.
Source: docs/reference/workers/clusters.md.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osrdyne.errors import ConfigurationError, StartFailedError
from osrdyne.logs import get_logger
from osrdyne.protocol.spark_master import EXECUTOR_IMAGE, MasterKind, SparkMaster, find_reachable, parse_spark_master
from osrdyne_worker.spark.java import jvm

log = get_logger(__name__)

DEFAULT_CORES = 4
DEFAULT_START_TIMEOUT = 300.0
PROBE_SHARE = 0.8
"""The probe ends after this share of `start_timeout`, so that its error reaches the controller before the controller
stops the worker for missing `start_timeout`."""
MIN_PROBE_TIMEOUT = 5.0
REACH_TIMEOUT = 5.0
PROBE_GROUP = "osrdyne start probe"

DRIVER_PORT = 7078
BLOCK_MANAGER_PORT = 7079
EXECUTOR_CONTAINER = "executor"
EXECUTOR_POD: Mapping[str, object] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"labels": {"app.kubernetes.io/name": "osrdyne-executor"}},
    "spec": {
        # The Pod Security Standard "restricted", as for workers; executors never call the API server.
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": EXECUTOR_CONTAINER,
                # Worker images contain this command. Spark's own images use an entry point instead.
                "command": ["osrdyne-spark-executor"],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    },
}
"""The pod template; Spark adds image, resources, variables and owner."""

_EXECUTOR_IDLE = {
    # Executors end after a minute without a task. Those with cached tables or shuffle files stay for five minutes:
    # otherwise a key in use would have to compute these again.
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.executorIdleTimeout": "60s",
    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "300s",
    "spark.dynamicAllocation.shuffleTracking.timeout": "300s",
}
_REFUSED_POD = re.compile(r"KubernetesClientException: .*\bMessage: (.+?)\. Received status:")
_PYTHON_MISMATCH = re.compile(r"Python in worker has different version: \(?'?(\d+)[., ']+(\d+)")


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """`cores`: the maximum that the worker may use at once. `start_timeout`: seconds for the whole start of the
    worker."""

    cores: int
    start_timeout: float

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ClusterLimits:
        """Parse the `spark` part of `WORKER_CONFIG`. Raises `ConfigurationError`."""
        cores = settings.get("cores", DEFAULT_CORES)
        if not isinstance(cores, int) or isinstance(cores, bool) or cores < 1:
            raise ConfigurationError(f"WORKER_CONFIG.spark.cores must be a number of cores, not {cores!r}.")
        timeout = settings.get("start_timeout", DEFAULT_START_TIMEOUT)
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0:
            raise ConfigurationError(f"WORKER_CONFIG.spark.start_timeout must be seconds, not {timeout!r}.")
        return cls(cores, float(timeout))


def read_master(worker_config: Mapping[str, Any]) -> SparkMaster:
    """The master in a `WORKER_CONFIG`. Raises `ConfigurationError`."""
    try:
        return parse_spark_master(str((worker_config.get("spark") or {}).get("master") or "local[*]"))
    except ValueError as error:
        raise ConfigurationError(f"worker.spark_master: {error}.") from None


def cluster_defaults(master: SparkMaster, limits: ClusterLimits) -> dict[str, str]:
    """Spark settings for a worker on this cluster; `worker.spark_conf` takes precedence."""
    if not master.is_shared:
        return {}
    # One core for each executor: every host with a free core can start one. Without the setting an executor of a
    # standalone cluster takes all cores of its host.
    shared = {**_EXECUTOR_IDLE, "spark.executor.cores": "1"}
    if master.kind is MasterKind.STANDALONE:
        # An application without a limit takes all cores of the cluster, and the next one gets none.
        return {**shared, "spark.cores.max": str(limits.cores)}
    return {**shared, "spark.dynamicAllocation.maxExecutors": str(limits.cores)}


def kubernetes_defaults(variables: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Spark settings for a worker in a pod of the Kubernetes driver, which runs its executors as pods (client mode).

    `variables`: the environment variables in which the driver describes the pod. Without them (a worker elsewhere) the
    result is `{}`. Writes the template of the executor pods to `directory`.
    """
    pod, address = variables.get("OSRDYNE_POD"), variables.get("OSRDYNE_POD_IP")
    if not pod or not address:
        return {}
    template = directory / "osrdyne-executor.json"
    template.write_text(json.dumps(EXECUTOR_POD))
    # Executors connect to the pod itself: fixed ports, so that a NetworkPolicy can name them.
    return {
        "spark.driver.host": f"[{address}]" if ":" in address else address,
        "spark.driver.bindAddress": "0.0.0.0",  # nosec B104 - a pod has an address of its own
        "spark.driver.port": str(DRIVER_PORT),
        "spark.driver.blockManager.port": str(BLOCK_MANAGER_PORT),
        # The worker's pod owns the executors, so Kubernetes deletes them with the worker, however it ends.
        "spark.kubernetes.driver.pod.name": pod,
        "spark.kubernetes.namespace": variables["OSRDYNE_NAMESPACE"],
        EXECUTOR_IMAGE: variables["OSRDYNE_IMAGE"],
        "spark.kubernetes.executor.podTemplateFile": str(template),
        "spark.kubernetes.executor.podTemplateContainerName": EXECUTOR_CONTAINER,
    }


@contextmanager
def own_work_directory(directory: Path, home: Path) -> Iterator[None]:
    """Make the executors of `local-cluster` that are started meanwhile write their files to `directory`.

    Spark writes to `work` below SPARK_HOME, which is the installation of pyspark: other users may own it, and nothing
    would remove the files. There is no setting for it, so SPARK_HOME is a directory of links to the installation.
    """
    before = os.environ.get("SPARK_HOME")
    for entry in home.iterdir():
        if entry.name != "work" and not (directory / entry.name).is_symlink():
            (directory / entry.name).symlink_to(entry)
    os.environ["SPARK_HOME"] = str(directory)
    try:
        yield
    finally:
        # Of the JVM only: code of the application may look for Spark.
        if before is None:
            del os.environ["SPARK_HOME"]
        else:
            os.environ["SPARK_HOME"] = before


def require_reachable(master: SparkMaster) -> None:
    """Raise `StartFailedError` at once if the master's addresses accept no connection: Spark itself would try for a
    minute."""
    if not master.addresses or master.is_connect:
        return
    failure = find_reachable(master.addresses, timeout=REACH_TIMEOUT)
    if failure is not None:
        raise StartFailedError(f"The Spark cluster at {master.text} cannot be reached: {failure}.")


def probe(
    session: Any, master: SparkMaster, *, timeout: float, recent_output: Callable[[], Sequence[str]] = tuple
) -> None:
    """Run one JVM task and one Python task on the cluster. Raises `StartFailedError` with the reason if they fail or do
    not finish within `timeout` seconds. `recent_output`: the last lines that the JVM has written."""
    since = time.monotonic()
    # Not as a context manager: that would wait for a thread whose tasks never run.
    threads = ThreadPoolExecutor(1, thread_name_prefix="start-probe")
    try:
        threads.submit(_run_tasks, session).result(timeout=max(MIN_PROBE_TIMEOUT, timeout))
    except Exception as error:
        refusal = refused_pods(recent_output())
        if refusal is not None:
            # Spark stops by itself after some refusals; its own error says only that it was stopped.
            reason = f"The Spark cluster at {master.text} starts no executor: Kubernetes refuses its pod: {refusal}."
        elif isinstance(error, TimeoutError):
            reason = _why_no_answer(session, master, time.monotonic() - since)
        else:
            reason = f"The Spark cluster at {master.text} failed a first task: {_why(error)}."
        raise StartFailedError(reason) from None
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    log.info("cluster runs tasks", master=master.text, seconds=round(time.monotonic() - since, 3))


def _run_tasks(session: Any) -> None:
    """The task uses functions of Python only, so executors need no package of osrdyne."""
    context = session.sparkContext
    context.setJobGroup(PROBE_GROUP, "osrdyne start probe", interruptOnCancel=True)
    session.range(0, 1, 1, 1).collect()
    context.parallelize([1], 1).map(abs).collect()


def executors(session: Any) -> int:
    """The number of executors that the worker has now, without the Spark driver."""
    return int(session.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1


def refused_pods(lines: Sequence[str]) -> str | None:
    """Why Kubernetes refuses to create executor pods (a quota, a limit, missing rights), from the output of the JVM, in
    which Spark logs each refusal; None without a refusal."""
    found = (_REFUSED_POD.search(line) for line in reversed(lines))
    return next((match[1][: jvm.MAX_MESSAGE] for match in found if match is not None), None)


def _why_no_answer(session: Any, master: SparkMaster, seconds: float) -> str:
    try:
        count = executors(session)
    except Exception:  # the JVM may be gone
        count = 0
    if count:
        return (
            f"The executors of the Spark cluster at {master.text} did not finish a first task within {seconds:.0f} s."
        )
    remedy = "wait until other applications end, or give the cluster more workers"
    if master.kind is MasterKind.KUBERNETES:
        remedy = "see the events of the executor pods: image, quota, free nodes"
    return (
        f"The Spark cluster at {master.text} has started no executor within {seconds:.0f} s: it has no free cores or "
        f"memory, or its executors cannot reach this worker; {remedy}."
    )


def _why(error: Exception) -> str:
    java_exception = getattr(error, "java_exception", None)
    text = str(error) if java_exception is None else f"{jvm.root_message(java_exception)}\n{error}"
    if (found := _PYTHON_MISMATCH.search(text)) is not None:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"executors run Python {found[1]}.{found[2]}, the worker {here}: set spark.pyspark.python in "
            "worker.spark_conf to the same version on the executors"
        )
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), type(error).__name__)


class StarvationWatch:
    """Detects jobs that have had no executors for a long time although the worker had some before: the master was
    restarted and has lost the application, or other applications hold all cores. Called every few seconds from
    one thread."""

    def __init__(self, master: SparkMaster, *, limit: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.reason: str | None = None
        """Why the session can no longer run jobs; None if it can."""
        self._master = master
        self._limit = limit
        self._monotonic = monotonic
        self._since: float | None = None

    def is_starved(self, session: Any) -> bool:
        """Whether the jobs of Spark have waited without any executor for the time limit."""
        jobs = len(session.sparkContext.statusTracker().getActiveJobsIds())
        return self.note(jobs=jobs, executors=executors(session) if jobs else 0)

    def note(self, *, jobs: int, executors: int) -> bool:
        """Record the numbers of now; the result of `is_starved`."""
        now = self._monotonic()
        if not jobs or executors:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= self._limit:
            self.reason = (
                f"The Spark cluster at {self._master.text} has given this worker no executor for {self._limit:.0f} s "
                "although jobs wait: it has no free cores or memory, or it was restarted and has lost the application."
            )
        return self.reason is not None
