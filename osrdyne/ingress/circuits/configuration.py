"""The circuit breaker configuration: the document of Gateleen's queue circuit breaker, checked as a whole.

`load_circuits` reads the text of a user, and `CircuitConfiguration.document` gives the form that is stored, which loads
to the same configuration. One error refuses the whole document, and every error is reported with its path.
Source: docs/design/circuits.md; Gateleen, QueueCircuitBreakerConfigurationResource.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from osrdyne.ingress.documents.problems import Problem
from osrdyne.ingress.documents.reader import DocumentReader, Members, read_document, read_json

# Of each side of a circuit: about 270 bytes of memory a sample, and 40 bytes in the stored state.
LARGEST_SAMPLE_COUNT = 20_000
SHORTEST_AGE_MS, LONGEST_AGE_MS = 1_000, 30 * 86_400_000
SHORTEST_INTERVAL_MS, LONGEST_INTERVAL_MS = 100, 86_400_000

_CHECK, _UPDATE = "circuitCheckEnabled", "statisticsUpdateEnabled"
_THRESHOLD, _AGE = "errorThresholdPercentage", "entriesMaxAgeMS"
_MIN, _MAX = "minQueueSampleCount", "maxQueueSampleCount"
_HALF_OPEN, _UNLOCK, _PROBE = "openToHalfOpen", "unlockQueues", "unlockSampleQueues"
_ON_OPEN, _SCOPE = "onOpen", "circuitScope"
_NAMES = {_CHECK, _UPDATE, _THRESHOLD, _AGE, _MIN, _MAX, _HALF_OPEN, _UNLOCK, _PROBE, _ON_OPEN, _SCOPE}

Choice = TypeVar("Choice", bound=StrEnum)


class OnOpen(StrEnum):
    """The treatment of new requests of an open circuit."""

    HOLD = "hold"
    REJECT = "reject"


class CircuitScope(StrEnum):
    """Whether all groups of a route share a circuit, or each group of a route has one."""

    ROUTE = "route"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of the breaker that can be turned off, and its interval in milliseconds."""

    enabled: bool
    interval_ms: int


@dataclass(frozen=True, slots=True)
class CircuitConfiguration:
    """All settings of the circuit breaker of a pool; times in milliseconds. `document` maps them to their names.

    `error_threshold`: percentage of failed requests from which a circuit opens. `max_age_ms`: the age from which a
    sample does not count. `min_samples`: a circuit with fewer samples stays closed. `max_samples`: of the successful
    requests and of the failed ones, the latest that are kept. `open_to_half_open`: after this time, an open circuit is
    half open. `unlock`: the time between two groups that are resumed; all at once if it is off. `probe`: the time in
    which a probe needs an outcome; no probes if it is off.
    """

    checks: bool = False
    updates_statistics: bool = False
    error_threshold: int = 90
    max_age_ms: int = 86_400_000
    min_samples: int = 100
    max_samples: int = 5_000
    open_to_half_open: TimedStep = TimedStep(enabled=False, interval_ms=120_000)
    unlock: TimedStep = TimedStep(enabled=False, interval_ms=10_000)
    probe: TimedStep = TimedStep(enabled=False, interval_ms=120_000)
    on_open: OnOpen = OnOpen.HOLD
    scope: CircuitScope = CircuitScope.ROUTE

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """For the author: settings under which circuits never open or never recover by themselves."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[Problem]:
        if not self.checks:
            return
        by_hand = "an open circuit stays open until it is closed by hand"
        if not self.updates_statistics:
            yield Problem("no outcome is counted while this is off, so no circuit opens: turn it on", path=_UPDATE)
        if not self.open_to_half_open.enabled:
            yield Problem(f"{by_hand}: turn it on", path=f"{_HALF_OPEN}.enabled")
        elif not self.probe.enabled:
            yield Problem(f"no probe is sent, so {by_hand}: turn it on", path=f"{_PROBE}.enabled")

    @property
    def size(self) -> int:
        """The number of settings that differ from their defaults."""
        mine, defaults = self.document(), CircuitConfiguration().document()
        return sum(mine[name] != defaults[name] for name in defaults)

    def document(self) -> dict[str, Any]:
        """The configuration as JSON values, every key with its value."""
        return {
            _CHECK: self.checks,
            _UPDATE: self.updates_statistics,
            _THRESHOLD: self.error_threshold,
            _AGE: self.max_age_ms,
            _MIN: self.min_samples,
            _MAX: self.max_samples,
            _HALF_OPEN: _step_document(self.open_to_half_open),
            _UNLOCK: _step_document(self.unlock),
            _PROBE: _step_document(self.probe),
            _ON_OPEN: self.on_open.value,
            _SCOPE: self.scope.value,
        }


DEFAULTS = CircuitConfiguration()


def load_circuits(text: str) -> CircuitConfiguration:
    """Parse a document of JSON or YAML. Raises `InvalidDocumentError` with every error of the text."""
    return _Reader().read(read_document(text))


def load_circuits_json(text: str) -> CircuitConfiguration:
    """As `load_circuits`, but of JSON only. Raises `InvalidDocumentError`."""
    return _Reader().read(read_json(text))


class _Reader(DocumentReader):
    """Reads one configuration. A missing key has its default; null is refused, because it could mean off or default."""

    def read(self, value: Any) -> CircuitConfiguration:
        self._given = self.members(value, "", _NAMES)
        configuration = CircuitConfiguration(
            checks=self._flag(self._given, _CHECK, _CHECK, default=DEFAULTS.checks),
            updates_statistics=self._flag(self._given, _UPDATE, _UPDATE, default=DEFAULTS.updates_statistics),
            error_threshold=self._number(self._given, _THRESHOLD, _THRESHOLD, DEFAULTS.error_threshold, 1, 100),
            max_age_ms=self._number(self._given, _AGE, _AGE, DEFAULTS.max_age_ms, SHORTEST_AGE_MS, LONGEST_AGE_MS),
            min_samples=self._number(self._given, _MIN, _MIN, DEFAULTS.min_samples, 1, LARGEST_SAMPLE_COUNT),
            max_samples=self._number(self._given, _MAX, _MAX, DEFAULTS.max_samples, 1, LARGEST_SAMPLE_COUNT),
            open_to_half_open=self._step(_HALF_OPEN, DEFAULTS.open_to_half_open),
            unlock=self._step(_UNLOCK, DEFAULTS.unlock),
            probe=self._step(_PROBE, DEFAULTS.probe),
            on_open=self._choice(_ON_OPEN, OnOpen, DEFAULTS.on_open),
            scope=self._choice(_SCOPE, CircuitScope, DEFAULTS.scope),
        )
        if configuration.min_samples > configuration.max_samples:
            # If every request fails, the circuit has `max_samples` samples and no more.
            self.refuse(
                _MIN,
                f"a circuit keeps {_MAX}, {configuration.max_samples}, of its failed requests, so it would never open "
                "if all fail: lower this one or raise that one",
            )
        self.raise_problems()
        return configuration

    def _flag(self, members: dict[str, Any], name: str, path: str, *, default: bool) -> bool:
        value = members.get(name, default)
        if isinstance(value, bool):
            return value
        self.refuse(path, "true or false is expected")
        return default

    def _number(self, members: dict[str, Any], name: str, path: str, default: int, smallest: int, largest: int) -> int:
        value = members.get(name, default)
        if value is None:
            self.refuse(path, f"a whole number from {smallest} to {largest} is expected")
        found = self.whole(value, path, smallest=smallest, largest=largest)
        return default if found is None else found

    def _step(self, name: str, default: TimedStep) -> TimedStep:
        members = self.members(self._given.get(name, Members(())), name, {"enabled", "interval"})
        return TimedStep(
            self._flag(members, "enabled", f"{name}.enabled", default=default.enabled),
            self._number(
                members, "interval", f"{name}.interval", default.interval_ms, SHORTEST_INTERVAL_MS, LONGEST_INTERVAL_MS
            ),
        )

    def _choice(self, name: str, choices: type[Choice], default: Choice) -> Choice:
        value = self._given.get(name, default.value)
        if isinstance(value, str) and value in list(choices):
            return choices(value)
        self.refuse(name, f"{' or '.join(choices)} is expected")
        return default


def _step_document(step: TimedStep) -> dict[str, Any]:
    return {"enabled": step.enabled, "interval": step.interval_ms}
