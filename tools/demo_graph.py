"""The graph of the demo of telemetry: lag over time, as a PNG. Used by `demo_telemetry`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from demo_plant import Sample
from matplotlib.figure import Figure

RATE_WINDOW = 3
"""Samples that a rate is the mean of: one ingest stores the events of about two simulated minutes."""


def time_lags(samples: Sequence[Sample], table: str) -> list[float]:
    """The Message Time Lag at each sample, in simulated minutes: how long ago the log had as many events as the table
    has now."""
    received = [one.received for one in samples]
    found = []
    for one in samples:
        if one.lag(table) <= 0:
            found.append(0.0)
            continue
        place = bisect_left(received, one.stored[table] + 1)
        found.append(max(0.0, one.minute - samples[place].minute))
    return found


def rates(samples: Sequence[Sample], counts: Sequence[int]) -> list[float]:
    """Events a simulated minute, as the mean over some samples."""
    found = []
    for number, one in enumerate(samples):
        earlier = max(0, number - RATE_WINDOW)
        minutes = one.minute - samples[earlier].minute
        found.append((counts[number] - counts[earlier]) / minutes if minutes else 0.0)
    return found


def draw(samples: Sequence[Sample], chapters: Sequence[tuple[float, str]], path: Path, *, limit: int | None) -> None:
    """Draw rates, count lag and time lag of each table. `chapters`: their beginnings, in simulated minutes. `limit`:
    events a minute that the warm table takes."""
    minutes = [one.minute for one in samples]
    figure = Figure(figsize=(11, 9), layout="constrained")  # without pyplot no display is needed
    above, middle, below = figure.subplots(3, 1, sharex=True)
    colours = {"warm": "tab:blue", "cold": "tab:green"}
    above.plot(minutes, rates(samples, [one.received for one in samples]), color="tab:orange", label="received")
    for table in samples[-1].stored:
        colour = colours.get(table)
        stored = rates(samples, [one.stored[table] for one in samples])
        above.plot(minutes, stored, color=colour, label=f"stored, {table}")
        middle.plot(minutes, [max(0, one.lag(table)) for one in samples], color=colour, label=table)
        below.plot(minutes, time_lags(samples, table), color=colour, label=table)
    if limit is not None:
        above.axhline(limit, color="grey", linestyle=":", label=f"{limit} a minute")
    above.set_ylabel("events a minute")
    middle.set_ylabel("Message Count Lag, events")
    below.set_ylabel("Message Time Lag, minutes")
    below.set_xlabel("simulated minutes")
    for one in (above, middle, below):
        one.legend(loc="upper left", fontsize="small")
        one.grid(alpha=0.3)
        one.set_ylim(bottom=0)
        for minute, _ in chapters:
            one.axvline(minute, color="grey", linewidth=0.8)
    for minute, title in chapters:
        above.annotate(title, (minute, 1.01), xycoords=("data", "axes fraction"), fontsize="small", rotation=15)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
