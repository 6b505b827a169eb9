"""The SparkSession of a worker: build it, control its jobs, end it.

`SparkSessions` is the `SessionFactory` for applications that use Spark: `App(sessions=SparkSessions())`. It reads the
`spark` part of `WORKER_CONFIG`: `master`, `conf`, and for a cluster `cores` and `start_timeout`. It deals with groups
of jobs, not with requests.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from osrdyne.errors import ConfigurationError, OsrdyneError, StartFailedError
from osrdyne.logs import get_logger, mask_uri
from osrdyne.protocol.spark_master import MasterKind, SparkMaster
from osrdyne_worker.app.app import Context, KeySessions, importing
from osrdyne_worker.app.errors import RequestError
from osrdyne_worker.app.errors import describe as describe_error
from osrdyne_worker.spark.cached_data import LOAD, OWNER, forget_former_loads, keep_loads_apart
from osrdyne_worker.spark.cluster import (
    PROBE_SHARE,
    ClusterLimits,
    StarvationWatch,
    cluster_defaults,
    executors,
    kubernetes_defaults,
    own_work_directory,
    probe,
    read_master,
    require_reachable,
)
from osrdyne_worker.spark.failures import missing_jars
from osrdyne_worker.spark.failures.exhaustion import exhaustion
from osrdyne_worker.spark.java import compiler, heap, jvm
from osrdyne_worker.spark.java.archive import DRIVER_OPTIONS, NO_PYSPARK, require_spark_home, spark_home, with_archive
from osrdyne_worker.spark.java.gateway import CLOSED, GatewayWatch, connect_to
from osrdyne_worker.spark.java.heap import HeapWatch, JvmHeap, LiveHeap
from osrdyne_worker.spark.java.jvm import Jvm, JvmStartError, StartingJvm
from osrdyne_worker.spark.java.surroundings import user_options
from osrdyne_worker.spark.jobs import EndedGroups, job_progress_of, memory_held, progress_of
from osrdyne_worker.spark.key_scheduling import master_of_keys, scheduler_of_keys
from osrdyne_worker.spark.task_times import ApplicationTimes, PoolTimes

if TYPE_CHECKING:
    from osrdyne_worker.app.tables import Rows
    from osrdyne_worker.spark.answers.streams import FrameBatches
    from osrdyne_worker.spark.key_sessions import LivingKeys

log = get_logger(__name__)

ResultT = TypeVar("ResultT")

DEFAULTS: Mapping[str, str] = {
    # Many workers on a host would compete for the port of the UI.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Spark would look up the line of source code for every column, which takes time and is useless for requests.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Reading several partitions at first usually saves a limited query its second job.
    "spark.sql.limit.initialNumPartitions": "4",
    # An answer has at most `requests.max_message_bytes` (16 MiB). Spark refuses a result above this limit while its
    # tasks finish, before Python holds any of it.
    "spark.driver.maxResultSize": "128m",
    heap.LIMIT: str(heap.DEFAULT_LIMIT),
}
"""Settings that a configuration may change."""

_LOCAL_DEFAULTS = {
    # All of Spark is one process: its ports need not be reachable from other machines.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # A task that runs out of memory fails its job. The default would end its process, here the JVM of the worker.
    "spark.executor.killOnFatalError.depth": "0",
}

_HEAP_OPTIONS = "-XX:InitialHeapSize=256m -XX:GCTimeRatio=4"
"""By default, G1 begins with a 64th of the host's memory, and lets the heap of a busy worker grow once collections take
more than 8 % of the time. With these options it begins with 256 MB, and grows if collections take more than 20 %, or if
the data needs it."""
_OWN_HEAP_OPTIONS = re.compile(r"-Xms|-XX:\+Use\w+GC\b|InitialHeapSize|InitialRAMPercentage|GCTimeRatio")
_LEAST_HEAP = re.compile(r"\s*(?:\d+[gtp]b?|(?:[3-9]\d\d|\d{4,})mb?)\s*", re.IGNORECASE)
"""A size above the initial heap: Java does not start with a smaller one."""

MAX_REASONS = 100
"""Groups whose reason for a cancel is remembered. The heap watch cancels one in several seconds."""
_CLASS_NAME = re.compile(r"(?:[a-z_]\w*\.){2,}[A-Z][\w$]*")
_SECRET = re.compile(r"secret|password|passwd|token|credential|access\.?key|account\.?key", re.IGNORECASE)


class SparkSessions:
    """Builds and controls the SparkSession of this process; there is at most one at a time.

    `required` are settings that the application depends on: they override the configuration. `java_options` are
    appended to the configured options of every JVM, and so override them as well.
    """

    shares_heap = False
    """Whether other workers use the same JVM."""

    def __init__(self, *, required: Mapping[str, str] | None = None, java_options: str = "") -> None:
        self._required = dict(required or {})
        self._is_shared = False
        """Whether several keys will share the session."""
        self._java_options = java_options
        # Cancelled and failed groups are remembered: some of their tasks may run on after the job is over.
        self._ended = EndedGroups()
        self._jvm: Jvm | None = None
        self.waiting_for: str | None = None
        """What `build` waits for, for the reports of the worker."""
        self._starvation: StarvationWatch | None = None
        self._start_times: Mapping[str, float] = {}
        self._heap_watch: HeapWatch | None = None
        self._gateway_watch: GatewayWatch | None = None
        self._out_of_memory: dict[str, str] = {}
        """The reasons for the last groups that the heap watch has cancelled."""
        self._work_directory: tempfile.TemporaryDirectory[str] | None = None
        self._living: LivingKeys | None = None
        self._heap: LiveHeap | None = None
        self._application_times = ApplicationTimes()
        self._pool_times: PoolTimes | None = None
        # Sessions are made while the application is imported: the JVM starts beside the other imports.
        self._early = self._start_early()

    def _start_early(self) -> StartingJvm | None:
        """Start the JVM if this process is importing its application. Never raises: `build` starts it again, and raises
        the reason."""
        early = importing.get()
        if early is None or early.is_taken:
            return None
        context = early.context
        try:
            if early.is_shared:
                self._share_among_keys()
            master = self._master(context)
            if master.is_connect or spark_home() is None:
                return None
            conf = self._conf(context, master)
            jvm.require_java()
            _set_variables(master, conf)
            # A master need not be reachable yet: the JVM connects to it when `build` creates the session.
            with self._with_work_directory(master):
                starting = StartingJvm(visible_settings(master, conf), require_spark_home())
            early.take(self, lambda: self._end_early(starting))
            return starting
        except (OsrdyneError, OSError) as error:
            log.debug("JVM not started early", error=str(error))
            return None

    def _end_early(self, starting: StartingJvm) -> None:
        starting.end()
        self._remove_work_directory()

    def _share_among_keys(self) -> None:
        """Require the scheduler that divides the executors among the keys of a shared session."""
        from osrdyne_worker.spark.key_sessions import FAIR_SCHEDULER

        self._is_shared = True
        self._required = {**self._required, **FAIR_SCHEDULER}

    def _master(self, context: Context) -> SparkMaster:
        master = read_master(context.worker_config)
        return master_of_keys(master) if self._is_shared else master

    def _conf(self, context: Context, master: SparkMaster) -> dict[str, str]:
        """The settings of the session. Raises `ConfigurationError`."""
        settings = context.worker_config.get("spark") or {}
        in_pod = master.kind is MasterKind.KUBERNETES
        own_pod = kubernetes_defaults(os.environ, Path(tempfile.gettempdir())) if in_pod else {}
        defaults = cluster_defaults(master, ClusterLimits.of(settings))
        conf = session_conf(
            master, {**defaults, **own_pod, **(settings.get("conf") or {})}, self._required, self._java_options
        )
        conf.setdefault("spark.app.name", app_name(context))
        return conf

    def check_settings(self, worker_config: Mapping[str, Any]) -> None:
        """Raise `ConfigurationError` if Spark cannot be used with these settings. Starts nothing."""
        if not read_master(worker_config).is_connect:
            require_spark_home()

    def build(self, context: Context) -> Any:
        """Build the session. Raises `ConfigurationError` (no Java, no pyspark) or `StartFailedError` (JVM exited)."""
        early, self._early = self._early, None
        try:
            return self._build(context, early)
        except BaseException:
            if early is not None and not early.is_connected:
                self._end_early(early)
            raise

    def _build(self, context: Context, early: StartingJvm | None) -> Any:
        master = self._master(context)
        limits = ClusterLimits.of(context.worker_config.get("spark") or {})
        conf = self._conf(context, master)
        if find_spec("pyspark") is None:
            raise ConfigurationError(NO_PYSPARK)
        # pyspark would write every failed query with its stack to stderr; the runtime answers and logs failures.
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
        if master.is_connect:
            return _connect(master.text, conf)
        limit = _heap_limit(conf)
        jvm.require_java()
        require_spark_home()
        # Before the JVM is started: Spark would try for a minute, and its start costs seconds.
        require_reachable(master)
        since = time.monotonic()
        with self._with_work_directory(master):
            session, self._jvm = _start(master, conf, early, of_keys=self._is_shared)
        if master.is_cluster:
            self._probe_cluster(session, master, PROBE_SHARE * limits.start_timeout - (time.monotonic() - since))
            self._starvation = StarvationWatch(master, limit=limits.start_timeout)
        # Includes the probe: the wait for executors of a slow cluster counts as time for the session.
        self._start_times = {"jvm": self._jvm.started_at - since, "session": time.monotonic() - self._jvm.started_at}
        _refuse_stop(session)
        session.conf.set(OWNER, context.worker_id)
        gateway = session.sparkContext._gateway
        self._gateway_watch = GatewayWatch(lambda: connect_to(gateway))
        if limit > 0:
            self._heap_watch = HeapWatch(
                JvmHeap(session._jvm),
                limit=limit,
                cancel=lambda group, why: self._cancel_for_memory(session, group, why),
                held_by=lambda groups: memory_held(session, groups),
            )
            self._heap_watch.start()
        return session

    @contextmanager
    def _with_work_directory(self, master: SparkMaster) -> Iterator[None]:
        """Give the executors of `local-cluster` a directory that is removed with the session."""
        if master.kind is not MasterKind.LOCAL_CLUSTER:
            yield
            return
        if self._work_directory is None:
            self._work_directory = tempfile.TemporaryDirectory(prefix="osrdyne-executors-", ignore_cleanup_errors=True)
        try:
            with own_work_directory(Path(self._work_directory.name), require_spark_home()):
                yield
        except BaseException:
            self._remove_work_directory()
            raise

    def _remove_work_directory(self) -> None:
        if self._work_directory is not None:
            self._work_directory.cleanup()
            self._work_directory = None

    def _probe_cluster(self, session: Any, master: SparkMaster, timeout: float) -> None:
        self.waiting_for = "executors"
        try:
            output = (lambda: []) if self._jvm is None else self._jvm.recent_output
            probe(session, master, timeout=timeout, recent_output=output)
        except BaseException:
            # Ends the JVM too: otherwise the application would continue to request cores from the cluster.
            self.close(session)
            raise
        finally:
            self.waiting_for = None

    def build_shared(self, context: Context) -> Any:
        """Build the session that several keys share, and run a few queries in it. Raises the errors of `build`."""
        from osrdyne_worker.spark.key_sessions import LivingKeys, warm_up

        if read_master(context.worker_config).is_connect:
            raise ConfigurationError(
                "worker.spark_master is a Spark Connect address, which pooled workers cannot share: "
                "use another master, or dedicated workers."
            )
        self._share_among_keys()
        shared = self.build(context)
        if self._jvm is not None and self._jvm.pid is not None:
            compiler.lower_priority(self._jvm.pid)
        since = time.monotonic()
        warm_up(shared)
        self._start_times = {**self._start_times, "warm_up": time.monotonic() - since}
        self._living, self._heap = LivingKeys(shared), LiveHeap(JvmHeap(shared._jvm))
        self._pool_times = PoolTimes(shared)
        return shared

    def for_key(self, shared: Any) -> KeySessions:
        """The session factory of one more key."""
        from osrdyne_worker.spark.key_sessions import KeySparkSessions

        assert self._living is not None, "build_shared comes first"
        return KeySparkSessions(self, shared, self._living)

    def heap(self, shared: Any) -> tuple[int, int] | None:
        """Bytes of the JVM's heap in use, and its maximum."""
        if self._heap is None:
            return None
        use = self._heap.use()
        return use.used, use.maximum

    def live_heap(self, shared: Any) -> int | None:
        """Bytes of the JVM's heap in use after its last collection; None if it was never half full."""
        return None if self._heap is None else self._heap.live

    def executor_seconds(self, session: Any) -> float | None:
        """How long tasks have run since the start, in seconds on one core; None with Connect."""
        return None if _is_connect_session(session) else self._application_times.seconds(session)

    def start_times(self) -> Mapping[str, float]:
        """Seconds that the JVM and the session took to start, and the warm-up of a shared one."""
        return self._start_times

    def run_in_group(self, session: Any, group_id: str, function: Callable[[], ResultT]) -> ResultT:
        """Call `function` with the jobs of this thread in the group.

        Raises `RequestError` with the cause if the request has exhausted memory and the session is still alive.
        """
        return self._run_in_group(session, group_id, function, loads=False)

    def load_in_group(self, session: Any, group_id: str, function: Callable[[], ResultT]) -> ResultT:
        """Like `run_in_group`, for a function that loads data: the heap watch cancels it before requests."""
        return self._run_in_group(session, group_id, function, loads=True)

    def _run_in_group(self, session: Any, group_id: str, function: Callable[[], ResultT], *, loads: bool) -> ResultT:
        if _is_connect_session(session):
            tag = _tag(group_id)
            session.addTag(tag)
            try:
                return function()
            finally:
                session.removeTag(tag)
        context = session.sparkContext
        # The group belongs to the thread, in Python and in the JVM: it is cleared when the request leaves the thread.
        context.setJobGroup(group_id, "osrdyne request", interruptOnCancel=True)
        if self._heap_watch is not None:
            self._heap_watch.began(group_id, loads=loads)
        try:
            result = function()
            if loads and (why := self._out_of_memory.get(group_id)) is not None:
                # A hook may treat the cancelled job as an error of one file, and return incomplete data.
                raise RequestError(why, 500, "out_of_memory")
            return result
        except Exception as error:
            # Failed or cancelled: its tasks may still run, and the health check reports them.
            self._ended.add(group_id)
            why = self._out_of_memory.get(group_id)
            if why is not None:
                raise RequestError(why, 500, "out_of_memory") from error
            exhausted = None if isinstance(error, RequestError) else exhaustion(error)
            # Only if the session is still alive: otherwise the worker must end, not just this request.
            if exhausted is not None and self.is_alive(session):
                raise RequestError(exhausted.message, exhausted.code, exhausted.condition) from error
            raise
        except BaseException:
            self._ended.add(group_id)
            raise
        finally:
            if self._heap_watch is not None:
                self._heap_watch.ended(group_id)
            self._out_of_memory.pop(group_id, None)
            with suppress(Exception):  # a dead JVM has no groups
                context._jsc.clearJobGroup()

    def _cancel_for_memory(self, session: Any, group_id: str, why: str) -> None:
        # Before the cancel: the handler fails at once, and its answer names this reason.
        self._out_of_memory[group_id] = why
        # The group may have ended at this moment: nothing removes its reason then. It is kept for the next
        # part of a stream, whose jobs are cancelled as well.
        for oldest in list(self._out_of_memory)[:-MAX_REASONS]:
            self._out_of_memory.pop(oldest, None)
        self.cancel(session, group_id)

    def cancel(self, session: Any, group_id: str) -> None:
        """Cancel the jobs of the group, running and future ones (Connect: running ones)."""
        if _is_connect_session(session):
            session.interruptTag(_tag(group_id))
        else:
            self._ended.add(group_id)
            # Future jobs as well: a handler that continues would submit the next one after the cancel.
            session.sparkContext._jsc.sc().cancelJobGroupAndFutureJobs(group_id)

    def progress(self, session: Any, group_id: str) -> Mapping[str, int]:
        """Running jobs of the group, and the tasks of all its jobs so far; zeros with Connect."""
        if _is_connect_session(session):
            return {"jobs": 0, "tasks_done": 0, "tasks_total": 0}
        progress = progress_of(session, group_id)
        if self._starvation is None:
            return progress
        waits = progress["jobs"] > 0 and executors(session) == 0
        return {**progress, "jobs_without_executors": progress["jobs"] if waits else 0}

    def job_progress(self, session: Any, group_id: str) -> Mapping[str, int]:
        """The fields of `JobProgress`; empty with Connect, which has no status tracker."""
        return {} if _is_connect_session(session) else job_progress_of(session, group_id)

    def request_session(self, session: Any) -> Any:
        """A copy of `session` with its views, functions and settings; changes to the copy do not affect `session`.

        Takes about a millisecond. With Spark Connect, returns `session` itself: the tags that cancel a request belong
        to it.
        """
        if _is_connect_session(session):
            return session
        # Not `newSession()`, which has none of the views and functions that `on_start` has created.
        return type(session)(session.sparkContext, session._jsparkSession.cloneSession())

    def session_for_load(self, session: Any) -> Any:
        """A copy of `session` in which other data is loaded: it does not find what requests with the former data cache
        from now on. With Spark Connect, returns `session` itself."""
        if not _is_connect_session(session):
            # Before the copy is made, because Spark builds the rules of a session with it.
            keep_loads_apart(session)
        return self.request_session(session)

    def begin_load(self, session: Any, load: str) -> None:
        """Make `session`, a copy, that of another load of the data, which uses nothing that an earlier one has cached.

        `load`: a name that no other load of this worker has. Called again when the load has ended: a request with the
        former data may have cached a frame meanwhile.
        """
        if _is_connect_session(session):
            return
        session.conf.set(LOAD, load)
        # Spark remembers the files of catalog tables; those of a path are listed by each read.
        session._jsparkSession.sessionState().catalog().invalidateAllCachedTables()
        forget_former_loads(session, owner=self._cache_owner, load=load)

    @property
    def _cache_owner(self) -> str | None:
        """The owner of the cached data of this factory; None: all of it in this Spark."""
        return None

    def refusal(self, error: Exception) -> RequestError | None:
        """The answer to a request whose handler raised an error of Spark: its error class, SQLSTATE and one line."""
        from osrdyne_worker.spark.failures.errors import describe

        failure = describe(error)
        return None if failure is None else failure.refusal()

    def rows(self, value: Any, *, limit: int) -> Rows | None:
        """The first `limit` rows of a DataFrame of Spark; None for any other value."""
        from pyspark.sql import DataFrame

        if not isinstance(value, DataFrame):
            return None
        # pyarrow and functions of Spark are needed only here
        from osrdyne_worker.spark.answers.results import prepare

        return prepare(value).run(limit=limit)

    def batches(self, value: Any) -> FrameBatches | None:
        """The record batches of a DataFrame of Spark, for a streamed answer; None for any other value."""
        # pyarrow and functions of Spark are needed only here
        from osrdyne_worker.spark.answers.streams import open_batches

        return open_batches(value)

    def is_alive(self, session: Any) -> bool:
        """False if the JVM has exited, accepts no connections, or its context was stopped (Connect: if the session
        ended)."""
        try:
            if _is_connect_session(session):
                return not session.is_stopped
            process = jvm.process()
            # First: a call to a JVM that is ending might not return.
            if process is not None and process.poll() is not None:
                return False
            if session.sparkContext._jsc.sc().isStopped():
                return False
            # After the JVM has answered: one that is paused accepts no connections either.
            if self._gateway_watch is not None and not self._gateway_watch.check():
                return False
            return self._starvation is None or not self._starvation.is_starved(session)
        except Exception:  # a call to a dead JVM may raise anything
            return False

    def loss_reason(self, session: Any) -> str | None:
        """Why the session is no longer alive; None if unknown."""
        if self._starvation is not None and self._starvation.reason is not None:
            return self._starvation.reason
        if self._jvm is None or _is_connect_session(session):
            return None
        why = self._jvm.why_ended()
        if self._gateway_watch is None or not self._gateway_watch.is_closed or not self._jvm.is_running:
            return why
        return CLOSED if why is None else f"{CLOSED} {why}"

    def stray_tasks(self, session: Any) -> Mapping[str, int]:
        """Running tasks of groups that were cancelled or failed; empty with Connect."""
        return {} if _is_connect_session(session) else self._ended.stray_tasks(session)

    def close(self, session: Any) -> None:
        """Stop the session and end the JVM, which must not outlive its worker."""
        if self._heap_watch is not None:
            # Before the session: the watch would call a JVM that is ending.
            self._heap_watch.close()
            self._heap_watch = None
        try:
            if self.is_alive(session):
                stop(session)
        except Exception:
            log.warning("spark session did not stop cleanly", exc_info=True)
        if not _is_connect_session(session):
            jvm.end()
        # After the JVM, whose executors write there.
        self._remove_work_directory()


def _refuse_stop(session: Any) -> None:
    """Refuse `stop` of the session, of its copies and of its context: it would end the requests that run beside."""

    def refuse() -> None:
        raise RequestError(
            "Spark cannot be stopped by a handler or a hook: other requests use it, in a pooled process those of other "
            "keys too. The worker stops Spark when it ends; remove the call of stop().",
            500,
            "stop_refused",
        )

    # Of the context: each session of this process stops Spark by its context.
    session.sparkContext.stop = refuse


def stop(session: Any) -> None:
    """Stop the session and its context. Only for the owner of the session."""
    if not _is_connect_session(session):
        vars(session.sparkContext).pop("stop", None)
    session.stop()


def session_conf(
    master: SparkMaster, configured: Mapping[str, Any], required: Mapping[str, str], java_options: str = ""
) -> dict[str, str]:
    """The settings of the session. Required settings of the application override configured ones, which override
    defaults."""
    local = _LOCAL_DEFAULTS if master.is_on_this_host else {}
    conf = {**DEFAULTS, **local, **{name: setting_text(value) for name, value in configured.items()}, **required}
    if master.is_on_this_host and (options := with_heap_options(conf)):
        conf[DRIVER_OPTIONS] = options
    if java_options:
        for name in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
            conf[name] = f"{conf.get(name, '')} {java_options}".strip()
    return conf


def with_heap_options(conf: Mapping[str, str]) -> str:
    """The options of the driver's JVM, with those that keep its heap small, unless the configuration has its own."""
    options = conf.get(DRIVER_OPTIONS, "")
    is_large_enough = _LEAST_HEAP.fullmatch(conf.get("spark.driver.memory", "1g"))
    if not is_large_enough or _OWN_HEAP_OPTIONS.search(options):
        return options
    return f"{_HEAP_OPTIONS} {options}".strip()


def _heap_limit(conf: Mapping[str, str]) -> float:
    value = conf.get(heap.LIMIT, str(heap.DEFAULT_LIMIT))
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if not 0 <= limit <= 1:
        raise ConfigurationError(
            f"worker.spark_conf.{heap.LIMIT} must be a share of the heap from 0 to 1, not {value!r}."
        )
    return limit


def app_name(context: Context) -> str:
    """The name of the Spark application: pool and key, without characters that a command line cannot contain."""
    name = f"osrdyne {context.pool} {context.key}".strip()
    return "".join(character if character.isprintable() else "�" for character in name)


def setting_text(value: object) -> str:
    """The value of a setting as Spark parses it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tag(group_id: str) -> str:
    """The tag of a group: Connect allows neither commas nor an empty tag."""
    return "osrdyne-" + hashlib.blake2s(group_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _is_connect_session(session: Any) -> bool:
    return type(session).__module__.startswith("pyspark.sql.connect")


def _set_variables(master: SparkMaster, conf: Mapping[str, str]) -> None:
    """Set the environment variables that Spark reads."""
    if master.is_on_this_host:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # Spark warns if the host name is a loopback address
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark would use the first python3 on the PATH
    if (python := conf.get("spark.pyspark.python")) is not None:
        # pyspark reads the Python of the executors from the environment; only `spark-submit` reads it from the setting.
        os.environ["PYSPARK_PYTHON"] = python


def visible_settings(master: SparkMaster, conf: Mapping[str, str]) -> dict[str, str]:
    """The settings for the JVM's command line, which all users of the host can read. Secrets reach the JVM through its
    socket instead."""
    options = " ".join([*user_options(), conf.get(DRIVER_OPTIONS, "")]).strip()
    conf = {**conf, DRIVER_OPTIONS: options} if options else conf
    chosen = {name: value for name, value in with_archive(conf).items() if not _SECRET.search(name)}
    return {"spark.master": master.text, **chosen}


def _start(master: SparkMaster, conf: dict[str, str], early: StartingJvm | None, *, of_keys: bool) -> tuple[Any, Jvm]:
    _set_variables(master, conf)
    visible = visible_settings(master, conf)
    if early is not None and (jvm.is_started() or early.settings != visible):
        # The application has started Spark itself, or the settings have changed since.
        early.end()
        early = None
    try:
        starting = None if jvm.is_started() else early or StartingJvm(visible, require_spark_home())
        # While the JVM starts.
        from pyspark.sql import SparkSession

        started = Jvm.present() if starting is None else starting.connect()
        with scheduler_of_keys(master) if of_keys else nullcontext():
            return SparkSession.builder.master(master.text).config(map=dict(conf)).getOrCreate(), started
    except JvmStartError as error:
        raise StartFailedError(f"Spark's Java process could not be started: {error}") from None
    except Exception as error:
        # Before the JVM ends: py4j can get the text of a Java exception only from a running JVM.
        failure = start_failure(error, conf)
        jvm.end()
        raise StartFailedError(failure) from None
    except BaseException:
        jvm.end()
        raise


def start_failure(error: Exception, conf: Mapping[str, str]) -> str:
    """Why the session could not be built: Spark's own message, and the settings whose value is a class named in it."""
    try:
        java_exception = getattr(error, "java_exception", None)
        text = describe_error(error) if java_exception is None else jvm.root_message(java_exception)
    except Exception:  # the JVM that holds the message has ended
        text = type(error).__name__
    named = [name for name, value in conf.items() if _CLASS_NAME.fullmatch(value) and value in text]
    where = f" Check worker.spark_conf: {', '.join(named)}." if named else ""
    remedy = missing_jars.remedy(text)
    return f"Spark could not be started: {mask_uri(text.rstrip('.'))}.{where}{f' {remedy}' if remedy else ''}"


def _connect(master: str, conf: dict[str, str]) -> Any:
    try:
        from pyspark.sql.connect.session import SparkSession
    except ImportError as error:
        raise ConfigurationError(
            f"spark.master is a Spark Connect address, and the Connect client is incomplete ({error}): "
            "install pyspark[connect]."
        ) from error
    runtime: dict[str, Any] = {name: value for name, value in conf.items() if name.startswith("spark.sql.")}
    return SparkSession.builder.remote(master).config(map=runtime).getOrCreate()
