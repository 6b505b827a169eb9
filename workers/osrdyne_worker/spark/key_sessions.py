"""Sessions of several keys in one Spark application: the session factory of each key of a pooled process.

Sessions share the SparkContext, the executors, the heap, and the tables and global views of the catalog. Temporary
views, functions, the configuration and cached data belong to one session; each key has its own scheduler pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from osrdyne.logs import get_logger
from osrdyne_worker.app.app import Context
from osrdyne_worker.spark.cached_data import OWNER, CachedData, cached_data, keep_loads_apart
from osrdyne_worker.spark.jobs import POOL
from osrdyne_worker.spark.session import ResultT, SparkSessions, setting_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = get_logger(__name__)

FAIR_SCHEDULER = {"spark.scheduler.mode": "FAIR"}
"""Required setting if several keys share Spark: it gives executor slots to the jobs of each key's pool in turn."""
WARM_UP = (
    "select count(*), sum(id) from range(1000) where id % 2 = 0",
    "select id, count(*) from range(100) group by id",
)
"""Queries that load Spark's classes before the first key arrives."""

_thread = threading.local()


def warm_up(session: Any) -> None:
    """Run a few queries as the pipelines do."""
    with suppress(Exception):  # otherwise Spark warns once for each key that its pool has no configuration
        log4j = session._jvm.org.apache.logging.log4j
        log4j.core.config.Configurator.setLevel("org.apache.spark.scheduler.FairSchedulableBuilder", log4j.Level.ERROR)
    for query in WARM_UP:
        session.sql(query).toArrow()


class KeySparkSessions(SparkSessions):
    """The session factory of one key, which builds one session. `shared`: a session of the same Spark that no key
    uses."""

    shares_heap = True

    def __init__(self, parent: SparkSessions, shared: Any, keys: LivingKeys) -> None:
        super().__init__(required=parent._required)
        self._shared = shared
        self._keys = keys
        self._session: Any = None
        self._owner = self._pool = ""
        # All keys share one heap watch and its cancel reasons; groups of different keys have different names.
        self._heap_watch, self._out_of_memory = parent._heap_watch, parent._out_of_memory
        self._starvation = parent._starvation
        self._pool_times, self._time_before = parent._pool_times, 0.0
        self._gateway_watch, self._jvm = parent._gateway_watch, parent._jvm
        patch_active_session(shared)

    def enter_thread(self) -> None:
        _thread.sessions = self

    def build(self, context: Context) -> Any:
        """Build a session with those of the key's `spark.sql` settings that may differ between sessions."""
        session = self._shared.newSession()
        settings = context.worker_config.get("spark") or {}
        for name, value in (settings.get("conf") or {}).items():
            if name.startswith("spark.sql.") and name not in self._required and session.conf.isModifiable(name):
                session.conf.set(name, setting_text(value))
        # One pool for each key and not for each session, because Spark never removes a pool. The prefix prevents a
        # clash with Spark's pool "default".
        self._owner, self._pool = context.worker_id, f"key {context.key}"
        # An earlier worker of the key may have used the pool.
        self._time_before = self._time_of_pool()
        session.conf.set(OWNER, self._owner)
        self._session = session
        self._keys.add(self._owner, session)
        self._use_pool()
        return session

    def _run_in_group(self, session: Any, group_id: str, function: Callable[[], ResultT], *, loads: bool) -> ResultT:
        self._use_pool()
        return super()._run_in_group(session, group_id, function, loads=loads)

    @property
    def _cache_owner(self) -> str | None:
        return self._owner

    def executor_seconds(self, session: Any) -> float | None:
        return None if self._pool_times is None else self._time_of_pool() - self._time_before

    def _time_of_pool(self) -> float:
        return 0.0 if self._pool_times is None else self._pool_times.seconds(self._pool)

    def close(self, session: Any) -> None:
        """Drop the key's views, and the cached data that no other key uses. The shared Spark continues."""
        self._keys.remove(self._owner)
        if not self.is_alive(session):
            return
        catalog = session._jsparkSession.sessionState().catalog()
        for table in session.catalog.listTables():
            if table.isTemporary:  # the public method would also remove equal cached data of other keys
                catalog.dropTempView(table.name)
        self._keys.uncache_unused()

    def _use_pool(self) -> None:
        """Run the jobs of this thread in the pool of the key. The property belongs to the thread, in Python and in the
        JVM."""
        if getattr(_thread, "pool", None) != self._pool:
            self._session.sparkContext.setLocalProperty(POOL, self._pool)
            _thread.pool = self._pool


class LivingKeys:
    """The sessions of the keys in one Spark, and the cached data of released keys. Thread-safe.

    Made before the sessions: no key then finds what another one has cached, except views with `cache: true`.
    """

    def __init__(self, shared: Any) -> None:
        keep_loads_apart(shared)
        self._shared = shared
        self._lock = threading.Lock()
        self._sessions: dict[str, Any] = {}

    def add(self, owner: str, session: Any) -> None:
        with self._lock:
            self._sessions[owner] = session

    def remove(self, owner: str) -> None:
        with self._lock:
            self._sessions.pop(owner, None)

    def uncache_unused(self) -> None:
        """Remove cached data of released keys, unless another key reads it too: data of equal plans is cached once."""
        with self._lock:
            living = dict(self._sessions)
            for cached in cached_data(self._shared):
                if cached.owner and cached.owner not in living and not _is_read(cached, living):
                    cached.remove()


def _is_read(cached: CachedData, living: Mapping[str, Any]) -> bool:
    """Whether a view of another key uses this data. Compares only views of the same name, so that few are compared."""
    return cached.name is not None and any(_reads(cached, session) for session in living.values())


def _reads(cached: CachedData, session: Any) -> bool:
    with suppress(Exception):  # the key has no such view, or has just dropped it
        found = cached.manager.lookupCachedData(session.table(cached.name)._jdf)
        identity = session._jvm.java.lang.System.identityHashCode
        return bool(found.isDefined()) and identity(found.get()) == identity(cached.entry)
    return False


def patch_active_session(shared: Any) -> None:
    """Make PySpark's functions for the current session return the key's session in threads of a key, and in all other
    threads a session of no key: the shared session is never handed out.

    PySpark has one active and one default session for all threads of a process: the active one is the session in which
    any thread last created a DataFrame from Python values; the default one is the shared session.
    """
    from pyspark.sql import SparkSession

    if getattr(SparkSession.getActiveSession, "of_keys", False):
        return
    of_no_key = shared.newSession()

    def get_active_session(cls: type[SparkSession]) -> SparkSession:
        return cast("SparkSession", _session_of_thread() or of_no_key)

    def get_or_create(builder: SparkSession.Builder) -> SparkSession:
        session = cast("SparkSession", _session_of_thread() or of_no_key)
        module = SparkSession._get_j_spark_session_module(session._jvm)
        module.applyModifiableSettings(session._jsparkSession, builder._options)
        return session

    get_active_session.of_keys = True  # type: ignore[attr-defined]
    SparkSession.getActiveSession = classmethod(get_active_session)  # type: ignore[assignment, method-assign]
    SparkSession.Builder.getOrCreate = get_or_create  # type: ignore[assignment, method-assign]


def _session_of_thread() -> Any:
    sessions: KeySparkSessions | None = getattr(_thread, "sessions", None)
    return None if sessions is None else sessions._session
