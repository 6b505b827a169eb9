"""The desired state of a worker group, as pure functions of (record, event, time).

```
absent --require--> ACTIVE --unbind_delay without activity--> UNBOUND --stop_delay more, proven empty--> absent
                      ^----------------- require or activity -----------'
```

Source: the OSRD reference "Pool state tracker", lifecycle: pin-until-forwarded, always-unbind,
idle-needs-a-fresh-total.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class GroupStatus(StrEnum):
    """The state of a group. The tracker desires ACTIVE or UNBOUND, and forgets a group that is to end; while workers or
    a queue of such a group are left, it is STOPPING."""

    ACTIVE = "active"
    UNBOUND = "unbound"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds: `unbind` without activity until ACTIVE becomes UNBOUND, then `stop` until the group may be ended."""

    unbind: float
    stop: float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group. Times are seconds of the monotonic clock.

    `active_until`: no transition before then. `stop_at`: set while UNBOUND, the time from which the group may be ended.
    """

    status: GroupStatus
    last_activity: float
    active_until: float
    stop_at: float = 0.0

    @property
    def due_at(self) -> float:
        """The time of the next transition."""
        return self.active_until if self.status is GroupStatus.ACTIVE else self.stop_at


def require(record: GroupRecord | None, *, now: float, delays: Delays, extra_lifetime: float = 0.0) -> GroupRecord:
    """Handle a request or activity: the group is ACTIVE for `unbind` + `extra_lifetime` from now, never shorter than
    before."""
    before = record.active_until if record is not None and record.status is GroupStatus.ACTIVE else now
    until = active_until(now, before, delays, extra_lifetime)
    return GroupRecord(GroupStatus.ACTIVE, last_activity=now, active_until=until)


def active_until(now: float, before: float, delays: Delays, extra_lifetime: float = 0.0) -> float:
    """Until when a group that is required `now` stays ACTIVE; the earlier promise `before` is kept if it is later."""
    return max(now + delays.unbind + extra_lifetime, before)


def adopt(status: GroupStatus, *, now: float, delays: Delays) -> GroupRecord:
    """The record of a group that was found in RabbitMQ at the start of a term; its delays start now (lifecycle:
    listed-bindings-are-unknown)."""
    record = GroupRecord(GroupStatus.ACTIVE, last_activity=now, active_until=now + delays.unbind)
    return record if status is GroupStatus.ACTIVE else unbind(record, now=now, delays=delays)


def keep_active(record: GroupRecord, *, now: float, delays: Delays) -> GroupRecord:
    """Keep a group ACTIVE that waits for a place: it has no worker yet, and so no activity."""
    return replace(record, active_until=now + delays.unbind)


def unbind(record: GroupRecord, *, now: float, delays: Delays) -> GroupRecord:
    """Make the group UNBOUND, by time or because an operator stops it."""
    return GroupRecord(GroupStatus.UNBOUND, record.last_activity, record.active_until, stop_at=now + delays.stop)


def is_due(record: GroupRecord, *, now: float) -> bool:
    return now >= record.due_at
