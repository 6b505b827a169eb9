"""A `PoolInspector` in memory: what the API's tests and demonstrations look at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from osrdyne.errors import OsrdyneError, PoolConflictError
from osrdyne.pool.view import (
    ComponentView,
    GroupState,
    GroupView,
    LeadershipView,
    PoisonView,
    QueueView,
    WorkerState,
    WorkerView,
)
from osrdyne.protocol.control import Generation
from osrdyne.protocol.names import Key, PoolNames


@dataclass
class FakeInspector:
    """Groups by key; `failure`, when set, is what the asynchronous methods raise."""

    pool: str = "fake"
    leading: bool = True
    failure: OsrdyneError | None = None
    component_views: list[ComponentView] = field(default_factory=lambda: [ComponentView("broker", True, "connected")])
    group_views: dict[Key, GroupView] = field(default_factory=dict)
    log_lines: dict[Key, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    poison_views: list[PoisonView] = field(default_factory=list)

    def leadership(self) -> LeadershipView:
        detail = "leads the pool" if self.leading else "stands by: another daemon leads"
        return LeadershipView(self.leading, 7 if self.leading else None, 1000.0 if self.leading else None, detail)

    def components(self) -> list[ComponentView]:
        return list(self.component_views)

    def groups(self) -> list[GroupView]:
        return [self.group_views[key] for key in sorted(self.group_views)] if self.leading else []

    def group(self, key: Key) -> GroupView | None:
        return self.group_views.get(key) if self.leading else None

    async def start_group(self, key: Key) -> None:
        self._fail()
        self.group_views.setdefault(key, group_view(key, pool=self.pool))

    async def stop_group(self, key: Key) -> None:
        self._fail()
        view = self.group_views.get(key)
        if view is not None and view.pinned:
            raise PoolConflictError("The group is pinned; unpin it first.")
        if view is not None:
            self.group_views[key] = replace(view, state=GroupState.STOPPING)

    async def pin(self, key: Key) -> None:
        await self.start_group(key)
        self.group_views[key] = replace(self.group_views[key], pinned=True)

    async def unpin(self, key: Key) -> None:
        self._fail()
        if key in self.group_views:
            self.group_views[key] = replace(self.group_views[key], pinned=False)

    async def logs(self, key: Key, *, lines: int) -> dict[str, tuple[str, ...]]:
        self._fail()
        return {worker: text[-lines:] for worker, text in self.log_lines.get(key, {}).items()}

    async def poison(self, *, limit: int) -> list[PoisonView]:
        self._fail()
        return self.poison_views[:limit]

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


def group_view(key: Key, *workers: WorkerView, pool: str = "fake") -> GroupView:
    """An active group with the given workers."""
    return GroupView(
        key=key,
        state=GroupState.ACTIVE,
        generation=Generation(7, 3),
        queue=QueueView(PoolNames(pool).request_queue(key), exists=True, bound=True),
        workers=workers,
        pinned=False,
        last_activity_at=1010.0,
        next_transition="unbound",
        next_transition_at=1610.0,
        reason="active: a request arrived",
    )


def worker_view(key: Key, worker_id: str = "w1", state: WorkerState = WorkerState.READY) -> WorkerView:
    """A worker of a group."""
    return WorkerView(worker_id=worker_id, key=key, external_id=f"pid-{worker_id}", state=state, started_at=1001.0)
