"""Settings of a managed pool under attack: its routes, one with retries, and whether its queues are cleaned.

Drawn from the seed, but not with the faults: those of a seed are the same in a direct pool. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from osrdyne.ingress.routes.retries import describe_retry, shown_retry
from osrdyne.protocol.retries import RetryTerms, class_name

APP_ID = "callers"
"""What the callers call themselves: only then their requests have a path that routes see."""
FLAKY_PATH = "/flaky"
"""Requests for it fail with 503 as often as their body states."""
OUTPUTS = f"/messages/modules/{APP_ID}/outputs"
ROUTES: Mapping[str, Any] = {
    "echo": {"route": f"FROM {OUTPUTS}/echo INTO $upstream", "priority": 1},
    "crash": {"route": f"FROM {OUTPUTS}/crash INTO $upstream", "priority": 9},
    "rest": "FROM /messages/* INTO $upstream",
}
PRIORITIES = (None, 1, 5)
CODES = (("503",), ("5xx",), ("503", "4xx"))
MAX_ATTEMPTS = 4
DELAYS_MS = (200, 1_000, 4_000, 10_000)
"""All of them together are far less than a request may wait: without a fault each gets as many attempts as it needs."""
CLEANING = {"check_entire_queue_on_cleanup": True, "cleanup_interval": "2s"}


@dataclass(frozen=True, slots=True)
class Rules:
    """`retry`: how requests for `FLAKY_PATH` are tried again; `priority`: their class, None for the default one;
    `cleans`: whether queues are looked through for what has expired."""

    retry: RetryTerms
    priority: int | None
    cleans: bool

    @property
    def longest_delay(self) -> float:
        return max(self.retry.delays_ms) / 1000

    def routes(self) -> dict[str, Any]:
        """The routes of the manifest; the one with retries is before those that it has to beat."""
        flaky = {"route": f"FROM {OUTPUTS}{FLAKY_PATH} INTO $upstream", "retry": shown_retry(self.retry)}
        return {"flaky": flaky if self.priority is None else {**flaky, "priority": self.priority}, **ROUTES}

    def settings(self) -> Mapping[str, Any]:
        """Its part of the section `requests`."""
        return CLEANING if self.cleans else {}

    def __str__(self) -> str:
        priority = class_name(self.priority)
        cleaned = "" if self.cleans else "not "
        return f"{FLAKY_PATH}, class {priority}: {describe_retry(self.retry)} Queues are {cleaned}cleaned."


def draw_rules(seed: int) -> Rules:
    random = Random(f"{seed} rules")
    delays = random.sample(DELAYS_MS, random.randint(1, MAX_ATTEMPTS - 1))
    terms = RetryTerms(random.choice(CODES), random.randint(2, MAX_ATTEMPTS), tuple(delays))
    return Rules(terms, random.choice(PRIORITIES), cleans=random.random() < 0.5)
