"""What the sessions of one Spark have cached: whose it is, from which load, and how to remove it.

Spark keeps one list for all sessions, and finds cached data by comparing plans. Two reads of a path have equal plans,
also if its files were replaced in between: data that an earlier load or another key has cached would be served as that
of a later load. `OwnCachedData.java` makes the plans of each load differ. Source: decision 0133.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from osrdyne.logs import get_logger
from osrdyne_worker.spark.java.janino import compiled_method

log = get_logger(__name__)

OWNER = "spark.osrdyne.worker"
"""Setting of a session: the worker id. Spark copies it to the sessions in which it plans cached data."""
LOAD = "spark.osrdyne.load"
"""Setting of a session: the load of the data that it belongs to, empty for the first. Copied as `OWNER` is."""
MARK = "osrdyne data "
"""Begins the text of a condition that is always true and names the data below it, in the plans that Spark compares."""
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
    session: Any
    """Of the JVM, in which it was planned."""

    def remove(self) -> None:
        """Remove it from memory. Frames that use it read their files again."""
        # By its own session: another one may have the rule of `keep_loads_apart`, and not find a plan without a mark.
        self.manager.uncacheQuery(self.session, self.entry.plan(), False, False)


def keep_loads_apart(session: Any) -> None:
    """Let the sessions of this Spark that are made from now on, also as copies, find only what their own load has
    cached. May be called again."""
    context = session.sparkContext
    if getattr(context, "keeps_loads_apart", False):
        return
    gateway = context._gateway
    arguments = gateway.new_array(gateway.jvm.Object, 4)
    arguments[0] = session._jsparkSession.extensions()
    arguments[1], arguments[2], arguments[3] = OWNER, LOAD, MARK
    compiled_method(gateway, files(__package__) / "OwnCachedData.java", "install").invoke(None, arguments)
    context.keeps_loads_apart = True


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
            planned, name = builder.cachedPlan().session(), builder.tableName()
            yield CachedData(
                owner=str(planned.conf().get(OWNER, "")),
                load=str(planned.conf().get(LOAD, "")),
                name=str(name.get()) if name.isDefined() else None,
                entry=entry,
                manager=manager,
                session=planned,
            )
    except Exception as error:  # py4j raises several types for a method that is missing
        log.warning("cached data of Spark unknown", reason=type(error).__name__)


def forget_former_loads(session: Any, *, owner: str | None, load: str) -> None:
    """Remove what earlier loads have cached from memory. `owner`: of a key that shares its Spark."""
    for cached in list(cached_data(session)):
        if cached.name is not None and cached.name.startswith(VIEW_PREFIX):
            continue
        if cached.load != load and (owner is None or cached.owner == owner):
            cached.remove()


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
