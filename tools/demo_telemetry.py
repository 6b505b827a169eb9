"""The demo of telemetry: simulated devices, a log, and tables that Spark stores it in, on a private RabbitMQ.

Run by `make demo-telemetry`. It prints and checks each step, draws a graph of the lag over time, ends by itself and
leaves nothing running. Exit code 0: all checks passed. One second stands for one minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from demo_graph import draw
from demo_plant import DEVICES, SITES, SPEED, Plant, Sample, running_plant
from demo_story import chapter, check, console, run_demo, tell, timed

from osrdyne.telemetry.simulator import MessageKind
from osrdyne.telemetry.simulator_run import RunSummary

TABLES: dict[str, dict[str, Any]] = {"cold": {}, "warm": {"preset": "store-s2", "units": 6}}
LIMIT = 720
"""The rate of one unit of S1, in events a minute. Six units of S2, for the speed of the demo, have 60 times as many."""
ALARMS = Fraction(6)
"""Alarms a minute."""
MESSAGES_A_DAY = 400_000
"""The daily quota of one unit of S1."""
QUOTA_PART = 100
"""The quota of the last example is smaller by this factor, and so is the time until it is used up."""
REFUSED = 200
"""Messages that are sent after the quota is used up."""
EVENTS = 30
"""Events in a message of the spike."""
OVERSHOOT = EVENTS
"""Events by which the warm table may exceed its rate: a message is stored as a whole."""
MIDNIGHT_MARGIN = 120.0
"""Seconds before 00:00 UTC in which the example with a quota does not begin."""


@dataclass
class Story:
    """`spike`: minutes of the first example, `minutes`: of the others. `chapters`: when they began, for the graph."""

    plant: Plant
    spike: int
    minutes: int
    chapters: list[tuple[float, str]] = field(default_factory=list)

    def chapter(self, title: str, short: str) -> None:
        number = len(self.chapters) + 1
        chapter(f"{number}. {title}")
        self.chapters.append((self.plant.minute, f"{number}. {short}"))

    async def devices_send_too_much(self) -> None:
        self.chapter(f"Six times the rate of the warm table for {self.spike} minutes", "6 × 720")
        found = await self._plan(6 * LIMIT, duration=f"{self.spike}m")
        drained, worst = found["queue"]["drained"] / 60, found["queue"]["worst_events"]
        tell(f"the plan: up to {worst:,.0f} events wait, and the last of them is stored after {drained:.0f} minutes")
        before = self.plant.take_sample()
        summary = await self.plant.send(
            self.spike, 6 * LIMIT // EVENTS, events=Fraction(EVENTS), alarms_a_minute=ALARMS
        )
        _show(summary)
        lags = self.plant.take_sample()
        tell(f"events not stored now: [green]{lags.lag('warm'):,} warm[/green], {lags.lag('cold'):,} cold")
        await self._show_lag()
        await self.plant.until_stored("cold")
        lag = self.plant.take_sample().lag("warm")
        tell(f"the cold table has everything; {lag:,} events wait for the warm one, first in first out")
        await self._query()
        await self._show_last_values()
        await self.plant.until_stored("warm")
        after = self.plant.take_sample()
        tell(f"the warm table has everything after [green]{after.minute - before.minute:.0f} minutes[/green]")

    async def devices_send_a_little_too_much(self) -> None:
        self.chapter("200 messages a minute with four events each: 80 events a minute too many", "200 × 4")
        found = await self._plan(200, events=4)
        tell(f"the plan: the lag grows by {found['queue']['growth_a_minute']:.0f} events a minute, without end")
        before = self.plant.take_sample()
        _show(await self.plant.send(self.minutes, 200, events=Fraction(4)))
        after = self.plant.take_sample()
        minutes = after.minute - before.minute
        received, stored, lag = (
            (last - first) / minutes
            for first, last in (
                (before.received, after.received),
                (before.stored["warm"], after.stored["warm"]),
                (before.lag("warm"), after.lag("warm")),
            )
        )
        tell(
            f"a minute: {received:.0f} events received, {stored:.0f} stored, the lag grows by [green]{lag:.0f}[/green]"
        )
        await self._show_lag()
        await self.plant.until_stored("warm")

    async def devices_send_what_fits(self) -> None:
        self.chapter("277 messages a minute with 2.5 events each: 997,200 events a day, which fit", "277 × 2.5")
        await self._plan(277, events=2.5)
        faults = {"invalid": 0.02, "oversized": 0.01, "duplicates": 0.02, "late": 0.05, "out_of_order": 0.02}
        first = len(self.plant.samples)
        summary = await self.plant.send(self.minutes, 277, events=Fraction(5, 2), alarms_a_minute=ALARMS, **faults)
        _show(summary)
        kinds = summary.kinds
        tell(f"of these: {', '.join(f'{kinds[kind].sent} {kind}' for kind in sorted(kinds))}")
        check(summary.confirmed == summary.sent, "every message is confirmed")
        worst = max((one.lag("warm") for one in self.plant.samples[first:]), default=0)
        tell(f"the lag of the warm table was {worst:,} events at most, {worst / LIMIT:.1f} minutes of its rate")

    async def quota_is_used_up(self) -> None:
        self.chapter("720 messages a minute with one event each: the daily quota is used up", "720 × 1")
        found = await self._plan(720)
        (blocks,) = (one for one in found["meters"] if one["meter"] == "blocks a day")
        tell(f"the plan: 400,000 messages are used up after {blocks['gives_out'] / 3600:.2f} h")
        quota = MESSAGES_A_DAY // QUOTA_PART
        tell(
            f"here a day has {quota:,} messages, {QUOTA_PART} times fewer, which are used up {QUOTA_PART} times earlier"
        )
        await _far_from_midnight()
        await self.plant.request("PUT", "/v1/quota", {"pool": {"messages_per_day": quota}}, author="demo")
        summary = await self.plant.send(Fraction(quota + REFUSED, 720), 720)
        await self.plant.request("DELETE", "/v1/quota", {}, author="demo")
        _show(summary)
        check(summary.confirmed == quota, f"{quota} messages are accepted, and no more")
        check(summary.refused == {"quota-exceeded": REFUSED}, f"each of the {REFUSED} others is answered")
        first = self.plant.first_refused
        assert first is not None
        minutes = first.at_us / 60_000_000
        hours = minutes * QUOTA_PART / 60
        check(round(hours, 2) == 9.26, f"the quota is used up after 9.26 h, not {hours:.2f}")
        tell(f"the first refused message was sent after {minutes:.2f} minutes, × {QUOTA_PART} = {hours:.2f} h")

    async def all_is_stored(self) -> None:
        self.chapter("Every event is stored once, in each table", "")
        for name in self.plant.tables:
            await self.plant.until_stored(name)
            rows, invalid = await asyncio.to_thread(self.plant.counts, name)
            tell(f"{name}: {rows:,} rows and {invalid:,} invalid events; the log has {self.plant.received:,} events")
            check(rows + invalid == self.plant.received, f"the table {name} has every event once")
        check(_within_rate(self.plant.samples), f"the warm table never takes more than {LIMIT} events a minute")

    async def _plan(self, messages: int, *, events: float = 1, duration: str | None = None) -> Any:
        load = {"rate": messages, "events": events} | ({} if duration is None else {"duration": duration})
        question = {"load": [load], "hub": "iot-hub-s1", "store": "store-s1"}
        found = await self.plant.request("POST", "/v1/capacity", question)
        parts = (f"{100 * one['utilisation']:.1f} % of {one['meter']}" for one in found["meters"])
        tell(f"osrdyne capacity, one unit of S1 each: {', '.join(parts)}")
        return found

    async def _query(self) -> None:
        """Both tables in one query, while one of them is behind."""
        rows = await self.plant.query(
            "select name, count(*), date_format(max(enqueued), 'HH:mm:ss') from "
            "(select 'cold' as name, enqueued from cold union all select 'warm', enqueued from warm) "
            "group by name order by name"
        )
        for name, count, latest in rows:
            tell(f"SQL over both tables: {name} has {int(count):,} events of site-1, the latest from {latest} UTC")

    async def _show_last_values(self) -> None:
        """The last values of a site, which are as new as the cold table, whatever the warm one still has to store."""
        ((newest,),) = await self.plant.query(
            "select date_format(max(ts), 'yyyy-MM-dd HH:mm:ss.SSS') from cold where series <> 'start'"
        )
        found: list[Any] = []

        async def are_fresh() -> bool:
            answer = await self.plant.request("GET", "/v1/last", key="site-1", limit="1000")
            found[:] = sorted((one for one in answer["values"] if one["series"] != "start"), key=lambda one: one["ts"])
            return bool(found) and _milliseconds(found[-1]["ts"]) >= _milliseconds(f"{newest}+00:00")

        await self.plant.until(are_fresh, "the last values of site-1 are as new as the cold table")
        waiting = (await asyncio.to_thread(self.plant.take_sample)).lag("warm")
        latest = found[-1]
        tell(
            f"GET /v1/last: {len(found)} series of site-1; the newest is [green]{latest['series']} of {latest['ts']}"
            f"[/green], as in the cold table, while {waiting:,} events wait for the warm one"
        )

    async def _show_lag(self) -> None:
        """The lag as `osrdyne telemetry lag` shows it, in real seconds."""
        found = await self.plant.request("GET", "/v1/telemetry")
        for reader in found["readers"]:
            seconds = reader["seconds"] or 0.0
            tell(f"osrdyne telemetry lag: {reader['reader']} {reader['messages']:,} messages, {seconds:.0f} s")


def _show(summary: RunSummary) -> None:
    refused = "".join(f", {count:,} refused: {status}" for status, count in summary.refused.items())
    tell(
        f"{DEVICES} devices at {SITES} sites sent {summary.sent:,} messages with {summary.events:,} events in "
        f"{summary.seconds:.1f} s: {summary.confirmed:,} confirmed{refused}"
    )
    alarms = summary.kinds.get(MessageKind.ALARM)
    if alarms is not None:
        p50, p95 = (1000 * (alarms.times.percentile(share) or 0.0) for share in (0.5, 0.95))
        tell(f"{alarms.confirmed} alarms, answered by the worker of their site: p50 {p50:.1f} ms, p95 {p95:.1f} ms")
        check(alarms.confirmed == alarms.sent, "every alarm is answered")


def _within_rate(samples: list[Sample]) -> bool:
    """Whether the warm table has stored no more than its rate allows since the beginning."""
    return all(one.stored["warm"] <= LIMIT * one.minute + OVERSHOOT for one in samples)


def _milliseconds(text: str) -> int:
    """A time in ISO 8601, in whole milliseconds since the epoch."""
    return int(1000 * datetime.fromisoformat(text).timestamp())


async def _far_from_midnight() -> None:
    """The daily quota is reset at 00:00 UTC, also in the middle of a demo."""
    now = datetime.now(UTC)
    left = 86_400 - (now - now.replace(hour=0, minute=0, second=0, microsecond=0)).total_seconds()
    if left < MIDNIGHT_MARGIN:
        tell(f"waiting until 00:00 UTC, when daily quotas are reset: {left:.0f} s")
        await asyncio.sleep(left)


async def tell_story(*, graph: Path, spike: int, minutes: int) -> None:
    console.print("[bold]osrdyne[/bold]: devices write to a log, and readers that never wait for each other store it.")
    chapter("0. Start")
    tell(f"One second stands for one minute: all rates, that of the warm table included, are {SPEED} times higher.")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="osrdyne-plant-") as directory:
        async with running_plant(Path(directory), TABLES, scheduled=["cold"]) as plant, asyncio.TaskGroup() as group:
            tell(f"RabbitMQ and the daemons of three pools are up: {time.perf_counter() - began:.1f} s")
            async with timed("up: a worker for the alarms of each site, Spark workers for each table and for queries"):
                await plant.start_workers()
            story = Story(plant, spike, minutes)
            tasks = [group.create_task(one) for one in (plant.keep_sampling(), plant.keep_ingesting("warm"))]
            parts: tuple[Callable[[], Awaitable[None]], ...] = (
                story.devices_send_too_much,
                story.devices_send_a_little_too_much,
                story.devices_send_what_fits,
                story.quota_is_used_up,
                story.all_is_stored,
            )
            for part in parts:
                await part()
            for task in tasks:
                task.cancel()
    await asyncio.to_thread(draw, plant.samples, story.chapters, graph, limit=LIMIT)
    chapter(f"Everything is stopped. The lag over time: {graph}")
    tell("docs/how-to/simulate-devices.md     osrdyne telemetry simulate, with your own pool")
    tell("docs/how-to/store-telemetry.md      tables, and docs/reference/telemetry/throttle.md")


def main() -> int:
    parser = argparse.ArgumentParser(description="Show telemetry from simulated devices to tables on Spark.")
    parser.add_argument("--graph", type=Path, default=Path("build/demo-telemetry.png"), help="file of the graph")
    parser.add_argument(
        "--spike", type=int, default=10, help="minutes of the first example; it takes six times as long"
    )
    parser.add_argument("--minutes", type=int, default=15, help="minutes of the second and third example")
    given = parser.parse_args()
    return run_demo(tell_story(graph=given.graph, spike=given.spike, minutes=given.minutes))


if __name__ == "__main__":
    sys.exit(main())
