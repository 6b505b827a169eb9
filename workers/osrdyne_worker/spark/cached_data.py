"""What the sessions of one Spark have cached: whose it is, from which load, and how to remove it.

Spark keeps one list for all sessions, and finds cached data by comparing plans. Two reads of a path have equal plans,
also if its files were replaced in between: data that an earlier load has cached would be served as that of a later one.
Source: decision 0133.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from osrdyne.logs import get_logger

log = get_logger(__name__)

OWNER = "spark.osrdyne.worker"
"""Setting of a key's session: the worker id. Spark copies it to the sessions in which it plans cached data."""
LOAD = "spark.osrdyne.load"
"""Setting of a session: the load of the data that it belongs to, empty for the first. Copied as `OWNER` is."""
VIEW_PREFIX = "osrdyne_cached_"
"""Names of the views that the SQL pipeline caches. Their plans name the version of their data, so that no other load
uses them, and the pipeline removes them."""


@dataclass(frozen=True, slots=True)
class CachedData:
    """An entry of the list. `name`: of the view that was cached, if it was one."""

    owner: str
    load: str
    name: str | None
    entry: Any
    manager: Any

    def remove(self, session: Any) -> None:
        """Remove it from memory. Frames that use it read their files again."""
        self.manager.uncacheQuery(session._jsparkSession, self.entry.plan(), False, False)

    def has_changed(self) -> bool:
        """Whether files that it was read from have changed since they were listed."""
        return any(_has_changed(leaf) for leaf in _elements(self._plan().collectLeaves()))

    def _plan(self) -> Any:
        return self.entry.cachedRepresentation().cacheBuilder().cachedPlan()


def cached_data(session: Any) -> Iterator[CachedData]:
    """All entries of the Spark of this session.

    Spark has no public list of cached data: with a version of Spark that lacks these methods, there is no entry.
    """
    manager = session._jsparkSession.sharedState().cacheManager()
    try:
        field = manager.getClass().getDeclaredField("cachedData")
        field.setAccessible(True)
        for entry in _elements(field.get(manager)):
            builder = entry.cachedRepresentation().cacheBuilder()
            conf, name = builder.cachedPlan().session().conf(), builder.tableName()
            yield CachedData(
                owner=str(conf.get(OWNER, "")),
                load=str(conf.get(LOAD, "")),
                name=str(name.get()) if name.isDefined() else None,
                entry=entry,
                manager=manager,
            )
    except Exception as error:  # py4j raises several types for a method that is missing
        log.warning("cached data of Spark unknown", reason=type(error).__name__)


def forget_former_loads(session: Any, *, owner: str | None, load: str) -> None:
    """Remove what earlier loads have cached, so that the load of `session` reads its files.

    `owner`: of a key that shares its Spark. Data of other keys is removed as well if its files have changed: its plan
    may equal one of this load.
    """
    for cached in list(cached_data(session)):
        if cached.name is not None and cached.name.startswith(VIEW_PREFIX):
            continue
        is_own = owner is None or cached.owner == owner
        if cached.load != load if is_own else cached.has_changed():
            cached.remove(session)


def stored_data(session: Any, view: str) -> list[Any]:
    """Spark's figures (`RDDInfo`) of the cached data that a view of this session reads.

    By the plan of the view and not by a name: views of other sessions may have the same one.
    """
    leaves = _elements(session.table(view)._jdf.queryExecution().withCachedData().collectLeaves())
    builders = [leaf.cacheBuilder() for leaf in leaves if leaf.getClass().getSimpleName() == "InMemoryRelation"]
    # Of data that is still being read nothing is known: to ask would start to read it.
    ids = {one.cachedColumnBuffers().id() for one in builders if one.isCachedColumnBuffersLoaded()}
    return [info for info in session.sparkContext._jsc.sc().getRDDStorageInfo() if info.id() in ids]


def _elements(sequence: Any) -> Iterator[Any]:
    """Those of a Scala sequence."""
    elements = sequence.iterator()
    while elements.hasNext():
        yield elements.next()


def _has_changed(leaf: Any) -> bool:
    if leaf.getClass().getSimpleName() != "FileSourceScanExec":
        return False
    location = leaf.relation().location()
    if not hasattr(location, "allFiles"):
        return True  # the index of a catalog or of Delta Lake: unknown
    # The text has the path, the size and the time of each file.
    before = str(location.allFiles())
    location.refresh()
    return str(location.allFiles()) != before
