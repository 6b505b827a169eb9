"""Puts views with `cache: true` into memory while requests are served from the files.

Used by the SQL pipeline. Spark finds cached data by the plan of a view. If the view itself were cached, queries would
wait until its partitions are in memory. So another view, whose plan differs by a condition that is always true, is
cached first; then the view gets this plan, and further queries read memory.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import functions as F

from osrdyne.logs import get_logger
from osrdyne_worker.spark.cached_data import MARK, VIEW_PREFIX
from osrdyne_worker.spark.jobs import POOL, job_properties, set_job_properties

log = get_logger(__name__)

START_DELAY = 3.0
"""Seconds that caching waits for the first request, which it would slow down."""


class _CachedPlans:
    """The plans that the sessions of this process have cached, by view. Thread-safe.

    In a pooled process Spark stores the data of equal plans once, and one call removes it for all sessions that read
    it. So it is removed only with the last view that has its plan.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak: the session of a key that was cut off does not count once it is gone.
        self._plans: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()

    def cache(self, session: Any, name: str, plan: int) -> None:
        """Cache the view of this name, which has this plan."""
        # With the lock: another session must not remove the data between these two lines.
        with self._lock:
            self._plans.setdefault(session, {})[name] = plan
            session.catalog.cacheTable(name)

    def uncache(self, session: Any, name: str) -> None:
        """Remove the data of a view from memory, unless a view of another session reads it."""
        with self._lock:
            plan = self._plans.get(session, {}).pop(name, None)
            # None: dropped before, or inherited from the session that this one was cloned from.
            if plan is None or any(plan in other.values() for other in self._plans.values()):
                return
            if session.catalog.tableExists(name) and session.catalog.isCached(name):
                session.catalog.uncacheTable(name)


_plans = _CachedPlans()
"""Of the process, as Spark's cache."""


def cache_now(
    session: Any, view: str, frame: Any, mark: str = "", *, on_begin: Callable[[str], None] = lambda view: None
) -> None:
    """Put a view into memory before this returns, as `VIEW_PREFIX` and its name.

    `mark` identifies the data. Spark compares plans, in which the files of a path do not count: data that was cached
    with another mark is not used. Keys of a pooled process share data with the same mark; without one, none. `on_begin`
    is called with the view before its data can be in memory.
    """
    # Another plan than that of the view: queries would otherwise wait for partitions that are just being cached.
    marked = frame.where(F.lit(f"{MARK}{mark}").isNotNull() if mark else F.lit(True))
    marked.createOrReplaceTempView(f"{VIEW_PREFIX}{view}")
    on_begin(view)
    _plans.cache(session, f"{VIEW_PREFIX}{view}", marked.semanticHash())
    # Spark caches at the first use: this reads all rows now, and no request has to.
    session.table(f"{VIEW_PREFIX}{view}").count()
    # Last: until the data is in memory, queries read the files.
    marked.createOrReplaceTempView(view)


def drop_cached(session: Any, views: Iterable[str]) -> None:
    """Remove the views of a session that `cache_now` has put into memory. Data that another session reads stays."""
    for view in views:
        _plans.uncache(session, f"{VIEW_PREFIX}{view}")


class BackgroundCaching:
    """Caches the views of one key in a thread, after the first request has ended or after `START_DELAY`.

    `on_cached` is called after each view: queries that were prepared before still read the files. A failure is logged;
    the view then stays on its files.
    """

    def __init__(
        self, session: Any, key: str, frames: Mapping[str, Any], on_cached: Callable[[], None], mark: str = ""
    ) -> None:
        self._session = session
        self._mark = mark
        # Unique, also if a pooled process loads the same files of a key again: Spark runs no job in a group whose
        # future jobs `close` has cancelled.
        self._group = f"osrdyne caching {key} {uuid.uuid4().hex}"
        self._pool = job_properties(session, [POOL]) if frames else {}
        self._frames = frames
        self._on_cached = on_cached
        self._may_start = threading.Event()
        self._closed = False
        self._drops = False
        self._thread = threading.Thread(target=self._run, name="caching", daemon=True)
        if frames:
            self._thread.start()

    def request_ended(self) -> None:
        """Start now, if caching still waits for the first request."""
        self._may_start.set()

    def close(self, *, drop: bool = False) -> None:
        """Stop caching. Returns without waiting for the thread, which ends when its job is cancelled.

        `drop`: the thread removes what it still puts into memory after this call.
        """
        # Before `_closed`: a thread that has seen that must see this too.
        self._drops = drop
        self._closed = True
        self._may_start.set()
        if self._thread.is_alive() and hasattr(self._session, "_jsparkSession"):
            with suppress(Exception):  # the JVM may have ended
                # Future jobs too: the thread may be about to start the next one.
                self._session.sparkContext._jsc.sc().cancelJobGroupAndFutureJobs(self._group)

    def wait(self, timeout: float) -> bool:
        """Wait until everything is cached; False after `timeout` seconds."""
        self._may_start.set()
        if self._frames:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # The first request has all processors: caching would delay its answer.
        self._may_start.wait(START_DELAY)
        for view, frame in self._frames.items():
            if self._closed:
                return
            self._cache(view, frame)
            if self._drops:
                # Its job may have begun after `close` had cancelled those of the group.
                with suppress(Exception):  # the JVM may have ended
                    drop_cached(self._session, [view])

    def _cache(self, view: str, frame: Any) -> None:
        try:
            if hasattr(self._session, "_jsparkSession"):  # Spark Connect has no groups
                set_job_properties(self._session, self._pool)
                self._session.sparkContext.setJobGroup(self._group, "osrdyne caching", interruptOnCancel=True)
            cache_now(self._session, view, frame, self._mark)
        except Exception as error:
            if not self._closed:
                log.warning("view not cached, queries read its files", view=view, error=type(error).__name__)
            return
        log.info("view cached", view=view)
        # Prepared queries hold plans that read the files: they are prepared again, and find the cached data.
        self._on_cached()
