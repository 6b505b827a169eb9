"""Check the models of the lifecycle: `make model`, or `python tests/model/run.py [NAME …]`.

Each run of `variants.toml` is compiled by spin and gcc and searched exhaustively; what comes out is compared with what
is expected there. `--story NAME` prints the shortest sequence of events that leads to a broken variant's error.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

HERE = Path(__file__).parent
MODEL = "lifecycle.pml"
"""The model of a row that names none."""
VARIANTS = HERE / "variants.toml"
DEPTH = "-m3000000"
HASH = "-w24"


class Outcome(StrEnum):
    LOST = "lost"
    NO_OUTCOME = "no-outcome"
    WRONG_END = "wrong-end"
    BUSY_STOPPED = "busy-stopped"
    LIMIT_REACHED = "limit-reached"
    NO_ROOM = "no-room"
    DOUBLE = "double"
    UNLISTED = "unlisted"
    DELETED_UNDER = "deleted-under"
    END_LOST = "end-lost"
    END_TWICE = "end-twice"
    UNFINISHED = "unfinished"
    CYCLE = "cycle"
    SAFE = "safe"


FAULTS = dict(enumerate(Outcome, start=1))
"""By the numbers that `FAIL` of the models reports: the order of the outcomes is theirs."""


class Search(StrEnum):
    """What pan searches; the values are switches of its compilation."""

    ERRORS = "-DSAFETY"
    CYCLES = "-DNP"
    SHORTEST = "-DBFS"


@dataclass(frozen=True, slots=True)
class Run:
    """One row of `variants.toml`."""

    name: str
    flags: tuple[str, ...]
    expect: Outcome
    shows: str
    model: str = MODEL
    search: Search = Search.ERRORS
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a search found. `states`: stored until the first error, or all of them."""

    outcome: Outcome
    states: int
    seconds: float


class ModelError(Exception):
    """spin, gcc or pan could not do its work."""


def read_runs(path: Path = VARIANTS) -> list[Run]:
    """The declared runs, in order."""
    rows = tomllib.loads(path.read_text("utf-8"))["run"]
    return [
        Run(
            **row
            | {
                "flags": tuple(row["flags"].split()),
                "expect": Outcome(row["expect"]),
                "search": Search.CYCLES if row.get("search") == "cycles" else Search.ERRORS,
            }
        )
        for row in rows
    ]


def call(command: list[str], *, cwd: Path) -> str:
    """Run a tool to its end; its output."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ModelError(f"{command[0]} is not installed; `make model` installs it.") from error
    if done.returncode != 0:
        raise ModelError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def built(run: Run, *, search: Search) -> Iterator[Path]:
    """A folder with `pan`, the program that searches the states of this variant."""
    with tempfile.TemporaryDirectory(prefix="osrdyne-model-") as name:
        folder = Path(name)
        (folder / run.model).write_bytes((HERE / run.model).read_bytes())
        call(["spin", "-a", *run.flags, run.model], cwd=folder)
        switches = ["-DSAFETY", "-DBFS"] if search is Search.SHORTEST else [search.value]
        compiler = ["gcc", "-O1", "-w", *switches, "-DNOREDUCE", "-DCOLLAPSE", "-DVECTORSZ=1024", "-o", "pan", "pan.c"]
        call(compiler, cwd=folder)
        yield folder


def check(run: Run) -> Verdict:
    """Search all interleavings of one variant."""
    started = time.monotonic()
    with built(run, search=run.search) as folder:
        loops = ["-l"] if run.search is Search.CYCLES else []
        report = call(["./pan", *loops, DEPTH, HASH], cwd=folder)
    return Verdict(read_outcome(report), read_states(report), time.monotonic() - started)


def read_outcome(report: str) -> Outcome:
    """The outcome in pan's report; None for an incomplete search."""
    failed = re.search(r"assertion violated \(?fault!=(\d+)", report)
    if failed is not None:
        return FAULTS[int(failed[1])]
    if "non-progress cycle" in report and "errors: 0" not in report:
        return Outcome.CYCLE
    if "errors: 0" not in report or "max search depth too small" in report or "Search not completed" in report:
        return Outcome.UNFINISHED
    return Outcome.SAFE


def read_states(report: str) -> int:
    stored = re.search(r"^\s*(\d+) states, stored", report, re.MULTILINE)
    return int(stored[1]) if stored is not None else 0


def tell_story(run: Run) -> str:
    """The shortest sequence of events that leads to the error of a broken variant."""
    with built(run, search=Search.SHORTEST) as folder:
        call(["./pan", DEPTH, HASH], cwd=folder)
        if not (folder / f"{run.model}.trail").exists():
            raise ModelError(f"{run.name} has no error, so there is no story.")
        replay = call(["spin", "-t", "-T", *run.flags, run.model], cwd=folder)
    events, _, _ = replay.partition("spin: ")  # then come the assertion that failed and all variables
    return "\n".join(line.strip() for line in events.splitlines())


def check_all(runs: list[Run], *, jobs: int) -> int:
    """Check the runs and print each; how many differ from what is expected."""
    differ = 0
    width = max(len(run.name) for run in runs)
    with ThreadPoolExecutor(jobs) as pool:
        for run, verdict in zip(runs, pool.map(check, runs), strict=True):
            agrees = verdict.outcome is run.expect
            differ += not agrees
            note = run.shows if agrees else f"EXPECTED {run.expect}: {run.shows}"
            figures = f"{verdict.states:>10,} states  {verdict.seconds:5.1f} s"
            print(f"{run.name:{width}}  {verdict.outcome:13}  {figures}  {note}", flush=True)
    return differ


def select(runs: list[Run], names: list[str], *, everything: bool) -> list[Run]:
    """The named runs, or all but the slow ones, or all."""
    unknown = set(names) - {run.name for run in runs}
    if unknown:
        raise ModelError(f"No such run in {VARIANTS.name}: {', '.join(sorted(unknown))}.")
    return [run for run in runs if (run.name in names if names else everything or not run.slow)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the models of the lifecycle with spin.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these runs of variants.toml")
    parser.add_argument("--all", action="store_true", help="also the runs that take more than a minute")
    parser.add_argument("--jobs", type=int, default=2, help="searches side by side (default: %(default)s)")
    parser.add_argument("--story", metavar="NAME", help="print the shortest way to the error of one broken variant")
    options = parser.parse_args()
    runs = read_runs()
    try:
        if options.story is not None:
            print(tell_story(select(runs, [options.story], everything=True)[0]))
            return 0
        chosen = select(runs, options.names, everything=options.all)
        started = time.monotonic()
        differ = check_all(chosen, jobs=options.jobs)
    except ModelError as error:
        print(f"model: {error}", file=sys.stderr)
        return 2
    print(f"{len(chosen)} runs, {differ} differ from what is expected, {time.monotonic() - started:.0f} s")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
