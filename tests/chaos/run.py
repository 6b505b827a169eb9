"""`make chaos SEED=1 MINUTES=30`: attack a pool, and judge what became of every request.

    python -m tests.chaos.run --seed 1 --minutes 30 [--family kill --family cut] [--image rabbitmq:4-management]

Exit code 0 when no request was lost, no caller left waiting and nothing left over; else 1, and the logs are kept.
Timing is not part of a seed: the same one gives the same faults at the same times, and another interleaving.
"""

import argparse
import asyncio
import json
import logging
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.acceptance.daemon_process import until
from tests.chaos.attacker import Attacker
from tests.chaos.beside import beside
from tests.chaos.callers import Callers
from tests.chaos.checker import Verdict, judge
from tests.chaos.late_copies import LateCopies
from tests.chaos.pool import POOL, PoolUnderAttack, pool_under_attack
from tests.chaos.rules import Rules, draw_rules
from tests.chaos.saboteur import lose_requests
from tests.chaos.schedule import INTERVAL, Family, Fault, count_families, make_schedule
from tests.chaos.watcher import Watcher
from tests.log_tails import log_tails

ANSWERS_TIMEOUT = 300.0
"""Seconds for the last answers: as long as a request may wait in two queues, and as long again for a slow machine."""
IDLE_TIMEOUT = 240.0
EVENTS = ("leading", "worker started", "group ends", "request queue deleted", "queue swept")
EVENTS_OF_POOLED = ("process started", "process killed", "process is replaced", "process refused a worker")
"""Log events of the daemons that show how much went on."""


@dataclass
class Run:
    """One schedule on one pool, with its history in a file of JSON lines. A pool without rules is a direct one."""

    seed: int
    faults: Sequence[Fault]
    directory: Path
    image: str | None = None
    rules: Rules | None = None
    pooled: bool = False
    sabotaged: bool = False
    began_at: float = field(default_factory=time.monotonic)

    async def execute(self) -> tuple[Verdict, Sequence[Fault]]:
        rules = self.rules
        if rules is not None:
            self._say(str(rules))
        async with pool_under_attack(self.directory, image=self.image, rules=rules, pooled=self.pooled) as pool:
            callers = Callers(pool.through("clients"), POOL, seed=self.seed, retry=rules and rules.retry)
            attacker, watcher = Attacker(pool, callers, note=self._note), Watcher(pool)
            try:
                async with watcher.watching(), callers.collecting():
                    async with callers.calling(), beside(*self._further_faults(pool)):
                        await attacker.run(self.faults)
                    self._say("the last fault is over")
                    with suppress(AssertionError):  # the verdict reports them
                        await until(lambda: not callers.waiting(), "all are answered", timeout=ANSWERS_TIMEOUT)
                    self._say(f"{len(callers.waiting())} requests wait for an answer")
                    aftermath = await watcher.until_idle(timeout=IDLE_TIMEOUT)
                    self._say("end")
                events = (*EVENTS, *EVENTS_OF_POOLED) if self.pooled else EVENTS
                print(", ".join(f"{event}: {pool.count_events(event)}" for event in events))
            finally:
                self._write_history(callers)
        verdict = judge(callers.sent, callers.answers, aftermath, done=attacker.done, rules=rules, pooled=self.pooled)
        return verdict, [one.fault for one in attacker.done]

    def _further_faults(self, pool: PoolUnderAttack) -> Iterator[Coroutine[object, object, None]]:
        if self.sabotaged:
            yield lose_requests(pool.broker)
        if self.pooled:  # such workers are started and ended by control messages, which may come twice and late
            yield LateCopies(pool.broker, POOL, seed=self.seed).run()

    def _note(self, fault: Fault, victim: str) -> None:
        self._say(f"{fault.family:10} {fault.action:8} {victim} for {fault.seconds:g} s")
        self._append({"fault": asdict(fault), "victim": victim, "at": time.time()})

    def _say(self, text: str) -> None:
        at = time.monotonic() - self.began_at
        print(f"{time.strftime('%H:%M:%S')} {at:7.1f} s  {text}", flush=True)

    def _write_history(self, callers: Callers) -> None:
        for one in callers.sent:
            self._append({"sent": asdict(one)})
        for answer in callers.answers:
            self._append({"answered": asdict(answer)})

    def _append(self, entry: object) -> None:
        with (self.directory / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def report(verdict: Verdict, faults: Sequence[Fault], *, seed: int) -> str:
    families = ", ".join(f"{family} {count}" for family, count in count_families(faults).items())
    statuses = ", ".join(f"{status} {count}" for status, count in sorted(verdict.statuses.items()))
    lines = [
        f"seed: {seed}",
        f"requests: {verdict.requests} confirmed, {verdict.unconfirmed} not confirmed",
        f"faults: {families}",
        f"answers: {statuses}",
        f"duplicates: {verdict.duplicates}",
        f"tried again: {verdict.tried_again} requests, {verdict.further_attempts} times",
        f"lost: {len(verdict.lost)} {' '.join(verdict.lost[:10])}".rstrip(),
        f"unanswered: {len(verdict.unanswered)} {' '.join(verdict.unanswered[:10])}".rstrip(),
        *(f"problem: {problem}" for problem in verdict.problems),
    ]
    return "\n".join(lines)


def main() -> int:
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)  # every lost connection would be logged here
    parser = argparse.ArgumentParser(description="Attack a pool and judge what became of every request.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--interval", type=float, default=INTERVAL, help="seconds between two faults, on average")
    parser.add_argument("--family", action="append", type=Family, help="only these; by default all")
    parser.add_argument("--image", help="a container image of RabbitMQ instead of the one installed here")
    parser.add_argument("--kind", choices=("direct", "managed"), default="direct", help="of the pool")
    parser.add_argument("--pooled", action="store_true", help="workers of several keys share a process")
    parser.add_argument("--sabotage", action="store_true", help="lose requests on purpose: the run must fail")
    arguments = parser.parse_args()
    seed, families = arguments.seed, arguments.family or Family
    faults = make_schedule(seed, arguments.minutes * 60, families, interval=arguments.interval)
    rules = draw_rules(seed) if arguments.kind == "managed" else None
    directory = Path(tempfile.mkdtemp(prefix="osrdyne-chaos-"))
    passed = False
    try:
        run = Run(seed, faults, directory, arguments.image, rules, arguments.pooled, arguments.sabotage)
        verdict, done = asyncio.run(run.execute())
        print(report(verdict, done, seed=seed))
        passed = verdict.passed
    finally:
        if passed:
            shutil.rmtree(directory)
        else:
            for name, tail in log_tails(directory):
                print(f"---- end of {name}\n{tail}")
            print(f"The logs are in {directory}; the same again: python -m tests.chaos.run {shlex.join(sys.argv[1:])}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
