"""The streams of the log of telemetry as data: declarations, and conflicts of existing streams with the settings. Pure.

The number of partitions and the retention are fixed when a log is declared: with another number, a key would be in two
partitions, and readers store their position by partition. So the leader uses the existing log and reports the
difference, and telemetry is written meanwhile. Source: docs/reference/telemetry/log.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from osrdyne.broker.management.models import QueueTotals
from osrdyne.broker.topology.declarations import Queue, Topology
from osrdyne.config.models import TelemetrySettings
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.telemetry import PARTITIONS_ARGUMENT

Arguments = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The desired streams of a log. `partitions`: how many are written; 0 if the pool has no log, or if a queue that is
    not a stream has the name of one. `streams`: existing ones with their arguments, missing ones with those of the
    settings. `conflicts`: sentences for the operator, each with its remedy."""

    partitions: int = 0
    streams: tuple[Queue, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def topology(self) -> Topology:
        return Topology(self.streams)


def stream_arguments(settings: TelemetrySettings, *, partitions: int) -> dict[str, object]:
    """The arguments of each stream of a log with this number of partitions."""
    return {
        "x-queue-type": "stream",
        "x-max-age": f"{round(settings.max_age)}s",
        "x-max-length-bytes": settings.partition_bytes,
        "x-stream-max-segment-size-bytes": settings.segment_bytes,
        # RabbitMQ keeps unknown arguments and does not compare them (broker: key-argument).
        PARTITIONS_ARGUMENT: partitions,
    }


def streams_of(names: PoolNames, listed: Iterable[QueueTotals]) -> dict[int, Arguments]:
    """The arguments of the queues with the name of a stream, of any type, by partition."""
    partitions = ((names.partition_of_log_stream(queue.name), queue) for queue in listed)
    return {partition: queue.arguments for partition, queue in partitions if partition is not None}


def plan_log(names: PoolNames, settings: TelemetrySettings, found: Mapping[int, Arguments]) -> LogPlan:
    """Plan the log from the settings and the arguments of existing queues by partition."""
    if settings.name is None:
        return LogPlan()
    foreign = [names.log_stream(one) for one in sorted(found) if found[one].get("x-queue-type") != "stream"]
    if foreign:
        return LogPlan(
            conflicts=tuple(
                f"The queue {queue} is not a stream, so nothing is written to the log: drain and delete it, or use "
                "another pool.id."
                for queue in foreign
            )
        )
    partitions = _written_partitions(found, default=settings.partitions)
    wanted = stream_arguments(settings, partitions=partitions)
    numbers = range(partitions)
    return LogPlan(
        partitions,
        tuple(Queue(names.log_stream(one), found.get(one, wanted)) for one in numbers),
        (*_conflicts_of_partitions(names, settings, partitions, found), *_conflicts_of_arguments(names, wanted, found)),
    )


def _written_partitions(found: Mapping[int, Arguments], *, default: int) -> int:
    """The number of partitions in the arguments of most existing streams: one may have been deleted, or declared by
    another program."""
    named = Counter(
        number
        for arguments in found.values()
        if isinstance(number := arguments.get(PARTITIONS_ARGUMENT), int) and number > 0
    )
    return max(named, key=lambda number: (named[number], number), default=default)


def _conflicts_of_partitions(
    names: PoolNames, settings: TelemetrySettings, partitions: int, found: Mapping[int, Arguments]
) -> list[str]:
    streams = f"{names.log_stream(0)} to {names.log_stream(partitions - 1)}"
    if partitions != settings.partitions:
        return [
            f"telemetry.partitions is {settings.partitions}, but the log has {partitions}, which it keeps: set "
            f"telemetry.partitions to {partitions}. To change it, stop the daemon when all readers have reached the "
            f"end of the log, delete the queues {streams}, and start it again."
        ]
    surplus = [names.log_stream(one) for one in sorted(found) if one >= partitions]
    return [
        f"The stream {stream} is not a partition of the log ({streams}), so nothing is written to it: delete it when "
        "all readers have read it."
        for stream in surplus
    ]


def _conflicts_of_arguments(names: PoolNames, wanted: Arguments, found: Mapping[int, Arguments]) -> list[str]:
    conflicts = []
    for partition in sorted(found):
        actual = found[partition]
        differences = [
            f"{name} {actual.get(name, 'unset')} instead of {wanted.get(name, 'unset')}"
            for name in sorted(wanted.keys() | actual.keys())
            if actual.get(name) != wanted.get(name)
        ]
        if differences:
            stream = names.log_stream(partition)
            conflicts.append(
                f"The stream {stream} has {', '.join(differences)}, and keeps it: set telemetry.max_age and "
                "telemetry.max_bytes back. To change them, stop the daemon when all readers have reached the end of "
                f"{stream}, delete that queue, and start it again."
            )
    return conflicts
