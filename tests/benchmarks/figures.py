"""What a benchmark hands back: figures beside their floors, compared round by round. Pure; no clock, no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles


class Comparison(StrEnum):
    RATIO = "ratio"
    """Ours divided by the floor."""
    DIFFERENCE = "difference"
    """Ours less the floor."""
    ABSOLUTE = "absolute"
    """Ours alone; the floor shows what the machine can do."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What the comparison should come to: at most `limit`, or at least."""

    limit: float
    comparison: Comparison = Comparison.RATIO
    at_least: bool = False

    def is_met_by(self, compared: float) -> bool:
        return compared >= self.limit if self.at_least else compared <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{' ×' if self.comparison is Comparison.RATIO else ''}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report. `compared` is the median over the rounds, `spread` the lowest and the highest.
    `of_floor`: the median of ours divided by the floor; None without a floor."""

    name: str
    unit: str
    ours: float
    floor: float
    compared: float
    spread: tuple[float, float]
    goal: Goal
    of_floor: float | None = None

    @property
    def met(self) -> bool:
        return self.goal.is_met_by(self.compared)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "floor": self.floor,
            str(self.goal.comparison): self.compared,
            "spread": self.spread,
            "of_floor": self.of_floor,
            "goal": str(self.goal),
            "met": self.met,
        }


@dataclass(frozen=True, slots=True)
class Round:
    """The same thing measured twice, one right after the other, so that a noisy machine disturbs both alike."""

    floor: float
    ours: float

    def compared(self, comparison: Comparison) -> float:
        match comparison:
            case Comparison.RATIO:
                return self.ours / self.floor
            case Comparison.DIFFERENCE:
                return self.ours - self.floor
            case Comparison.ABSOLUTE:
                return self.ours


def figure(name: str, unit: str, rounds: Sequence[Round], goal: Goal) -> Figure:
    compared = [one.compared(goal.comparison) for one in rounds]
    return Figure(
        name=name,
        unit=unit,
        ours=median(one.ours for one in rounds),
        floor=median(one.floor for one in rounds),
        compared=median(compared),
        spread=(min(compared), max(compared)),
        goal=goal,
        of_floor=median(one.ours / one.floor for one in rounds) if all(one.floor for one in rounds) else None,
    )


def compared_percentiles(
    name: str, unit: str, rounds: Sequence[tuple[Sequence[float], Sequence[float]]], goals: Mapping[int, Goal]
) -> list[Figure]:
    """A figure for each percentile of the goals; a round has all values of the floor, and ours."""
    return [
        figure(
            f"{name}, p{percent}", unit, [Round(*(percentile(side, percent) for side in one)) for one in rounds], goal
        )
        for percent, goal in goals.items()
    ]


def percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def table(figures: Sequence[Figure]) -> str:
    """For people: one line a figure."""
    lines = [("", "ours", "floor", "", "of floor", "compared", "lowest to highest", "goal", "")]
    for one in figures:
        unit = " ×" if one.goal.comparison is Comparison.RATIO else ""
        spread = f"{one.spread[0]:.2f} to {one.spread[1]:.2f}"
        compared = f"{one.compared:.2f}{unit}"
        verdict = "met" if one.met else "MISSED"
        of_floor = "–" if one.of_floor is None else f"{one.of_floor:.2f} ×"
        sides = (_short(one.ours), _short(one.floor), one.unit, of_floor)
        lines.append((one.name, *sides, compared, spread, str(one.goal), verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
