"""The document of quotas, checked as a whole: limits of the pool, rules with limits of their own, and rates of workers.

`load_quotas` reads the text of a user, and `QuotaManifest.document` gives the form that is stored, which loads to the
same limits. One error refuses the whole document, and every error is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from osrdyne.ingress.documents.patterns import Pattern, compile_pattern
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.ingress.documents.reader import DocumentReader, Members, read_document, read_json
from osrdyne.ingress.quotas.tiers import EVENT_BLOCK_BYTES, HUB_TIERS, STORE_TIERS
from osrdyne.protocol.rates import EventRate

_E = TypeVar("_E", bound=StrEnum)
_T = TypeVar("_T")

MAX_RULES = 100
MAX_NAME = 64
_LARGEST = 10**12  # Blocks a day.
_LARGEST_RATE = 1_000_000  # Messages a second, and messages of a burst.
MAX_UNITS = 10  # By default, of the workers of a group together.
_RATES = {"name", "keys", "preset", "units", "max_units", "events_per_minute", "event_bytes"}
_LIMITS = {"preset", "units", "messages_per_day", "block_bytes", "send_rate", "burst"}


class Share(StrEnum):
    """Who shares the quota of the pool fairly: keys, principals, or none of them."""

    NONE = "none"
    KEY = "key"
    PRINCIPAL = "principal"


class Per(StrEnum):
    """What the limits of a rule apply to: all its requests together, or each key or principal."""

    RULE = "rule"
    KEY = "key"
    PRINCIPAL = "principal"


@dataclass(frozen=True, slots=True)
class Limits:
    """A daily quota in blocks of `block_bytes`, and a send rate in messages a second with a burst; None: no limit.

    `given`: the members of the document that made them.
    """

    blocks_a_day: int | None
    block_bytes: int
    send_rate: float | None
    burst: int
    given: tuple[tuple[str, Any], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rule:
    """Limits of the requests whose whole key and principal match; a pattern that is None matches all."""

    name: str
    limits: Limits
    per: Per
    keys: Pattern | None
    principals: Pattern | None

    def matches(self, key: str, principal: str) -> bool:
        return (self.keys is None or self.keys.match(key) is not None) and (
            self.principals is None or self.principals.match(principal) is not None
        )

    def document(self) -> dict[str, Any]:
        patterns = {"keys": self.keys, "principals": self.principals}
        given = {name: pattern.text for name, pattern in patterns.items() if pattern is not None}
        return {"name": self.name, **given, "per": self.per.value, **dict(self.limits.given)}


@dataclass(frozen=True, slots=True)
class Rate:
    """How many events a minute workers serve, of the keys that match; a pattern that is None matches all.

    `events_per_minute`: of one unit. A worker has `units` of them, and all workers of a group `max_units` at most.
    `given`: the members of the document that made it.
    """

    name: str
    keys: Pattern | None
    events_per_minute: float
    event_bytes: int
    units: int
    max_units: int
    given: tuple[tuple[str, Any], ...] = field(repr=False)

    def matches(self, key: str) -> bool:
        return self.keys is None or self.keys.match(key) is not None

    def of_worker(self, workers: int) -> EventRate:
        """The rate of each worker of a group with this number of workers."""
        units = min(self.units, self.max_units / max(1, workers))
        return EventRate(self.events_per_minute * units, self.event_bytes)

    def document(self) -> dict[str, Any]:
        return {"name": self.name, **({} if self.keys is None else {"keys": self.keys.text}), **dict(self.given)}


@dataclass(frozen=True)
class QuotaManifest:
    """The limits of a pool. `pool`: None: no limits of the pool as a whole. The first rule that matches a request
    applies, and the first rate that matches a key."""

    pool: Limits | None = None
    share: Share = Share.NONE
    rules: tuple[Rule, ...] = ()
    warnings: tuple[Problem, ...] = ()
    rates: tuple[Rate, ...] = ()

    @property
    def size(self) -> int:
        return len(self.rules) + len(self.rates)

    def document(self) -> dict[str, Any]:
        share = {} if self.share is Share.NONE else {"share": self.share.value}
        pool = {} if self.pool is None else {"pool": {**dict(self.pool.given), **share}}
        lists = {"rules": [one.document() for one in self.rules], "rates": [one.document() for one in self.rates]}
        return pool | {word: listed for word, listed in lists.items() if listed}


def load_quotas(text: str) -> QuotaManifest:
    """Parse a document of JSON or YAML. Raises `InvalidDocumentError` with every error of the text."""
    return _Reader().read(read_document(text))


def load_quotas_json(text: str) -> QuotaManifest:
    """As `load_quotas`, but of JSON only. Raises `InvalidDocumentError`."""
    return _Reader().read(read_json(text))


class _Reader(DocumentReader):
    """Reads one document."""

    def read(self, value: Any) -> QuotaManifest:
        members = self.members(value, "", {"pool", "rules", "rates"})
        pool, share = None, Share.NONE
        if (given := members.get("pool")) is not None:
            own = self.members(given, "pool", _LIMITS | {"share"})
            share = self._choice(Share, own.pop("share", None), "pool.share", Share.NONE)
            pool = self._limits(own, "pool")
            if share is not Share.NONE and pool is not None and pool.blocks_a_day is None:
                self.refuse("pool.share", "only a daily quota is shared: give preset or messages_per_day")
        rules = self._rules(members.get("rules", []))
        rates = self._rates(members.get("rates", []))
        self.raise_problems()
        return QuotaManifest(pool, share, rules, tuple(self.warnings), rates)

    def _list(self, listed: Any, word: str) -> list[Any]:
        if not isinstance(listed, list):
            self.refuse(word, f"a list of {word} is expected")
            return []
        if len(listed) > MAX_RULES:
            self.refuse(word, f"there are {len(listed)} {word}; at most {MAX_RULES} are possible")
            return []
        return listed

    def _names_differ(self, names: list[str], word: str) -> None:
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            self.refuse(word, f"the name {name!r} is given twice")

    def _name(self, value: Any, path: str) -> str | None:
        if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable():
            return value
        self.refuse(f"{path}.name", f"a name of 1 to {MAX_NAME} printable characters is expected")
        return None

    def _rates(self, value: Any) -> tuple[Rate, ...]:
        listed = self._list(value, "rates")
        rates = [
            rate for place, item in enumerate(listed) if (rate := self._rate_of(item, f"rates.{place}")) is not None
        ]
        self._names_differ([rate.name for rate in rates], "rates")
        for place, rate in enumerate(rates[:-1]):
            if rate.keys is None:
                self.warn(f"rates.{place}", "it matches every key, so the rates after it have no effect")
                break
        return tuple(rates)

    def _warn_of_refusals(self, rate: Rate, path: str) -> None:
        """Warn of a rate below one event a minute: a worker refuses a request with more events than that."""
        if rate.of_worker(1).events_per_minute < 1:
            self.warn(path, "a worker serves less than one event a minute, so it refuses every request: raise it")

    def _rate_of(self, value: Any, path: str) -> Rate | None:
        before = len(self.problems)
        members = self.members(value, path, _RATES)
        if not isinstance(value, Members):
            return None
        name, keys = (
            self._name(members.pop("name", None), path),
            self._pattern(members.pop("keys", None), f"{path}.keys"),
        )
        preset = self._preset(STORE_TIERS, members.get("preset"), f"{path}.preset")
        most = MAX_UNITS if preset is None else preset.max_units
        largest = 10_000 if preset is None else preset.max_units
        max_units = self.whole(members.get("max_units"), f"{path}.max_units", smallest=1, largest=largest) or most
        units = self.whole(members.get("units"), f"{path}.units", smallest=1, largest=max_units) or 1
        events = self._rate(members.get("events_per_minute"), f"{path}.events_per_minute", "events a minute")
        size = self.whole(members.get("event_bytes"), f"{path}.event_bytes", smallest=1, largest=2**30)
        if preset is not None:
            for word in ("events_per_minute", "event_bytes"):
                if members.get(word) is not None:
                    self.refuse(f"{path}.{word}", "the preset has it: give one of both")
            events, size = float(preset.events_a_minute), EVENT_BLOCK_BYTES
        if events is None and len(self.problems) == before:
            self.refuse(path, "preset or events_per_minute is needed")
        if len(self.problems) > before or name is None or events is None:
            return None
        given = tuple((word, value) for word, value in members.items() if value is not None)
        rate = Rate(name, keys, events, size or EVENT_BLOCK_BYTES, units, max_units, given)
        self._warn_of_refusals(rate, f"{path}.events_per_minute")
        return rate

    def _preset(self, tiers: Mapping[str, _T], name: Any, path: str) -> _T | None:
        if name is None:
            return None
        found = tiers.get(name) if isinstance(name, str) else None
        if found is None:
            self.refuse(path, f"one of {', '.join(tiers)} is expected")
        return found

    def _rules(self, value: Any) -> tuple[Rule, ...]:
        listed = self._list(value, "rules")
        rules = [rule for place, item in enumerate(listed) if (rule := self._rule(item, f"rules.{place}")) is not None]
        self._names_differ([rule.name for rule in rules], "rules")
        for place, rule in enumerate(rules[:-1]):
            if rule.keys is None and rule.principals is None:
                self.warn(f"rules.{place}", "it matches every request, so the rules after it have no effect")
                break
        return tuple(rules)

    def _rule(self, value: Any, path: str) -> Rule | None:
        members = self.members(value, path, _LIMITS | {"name", "keys", "principals", "per"})
        if not isinstance(value, Members):
            return None
        name = self._name(members.pop("name", None), path)
        if name is None:
            return None
        per = self._choice(Per, members.pop("per", None), f"{path}.per", Per.RULE)
        keys, principals = (self._pattern(members.pop(word, None), f"{path}.{word}") for word in ("keys", "principals"))
        limits = self._limits(members, path)
        return None if limits is None else Rule(name, limits, per, keys, principals)

    def _pattern(self, value: Any, path: str) -> Pattern | None:
        if value is None:
            return None
        if not isinstance(value, str):
            self.refuse(path, "a regular expression is expected")
            return None
        try:
            return compile_pattern(value, path)
        except InvalidDocumentError as error:
            self.problems += error.problems
            return None

    def _choice(self, kind: type[_E], value: Any, path: str, default: _E) -> _E:
        if value is None:
            return default
        if value not in list(kind):
            self.refuse(path, f"one of {', '.join(kind)} is expected")
            return default
        return kind(value)

    def _limits(self, members: dict[str, Any], path: str) -> Limits | None:
        before = len(self.problems)
        preset = self._preset(HUB_TIERS, members.get("preset"), f"{path}.preset")
        most = 10_000 if preset is None else preset.max_units
        units = self.whole(members.get("units"), f"{path}.units", smallest=1, largest=most) or 1
        quota = self.whole(members.get("messages_per_day"), f"{path}.messages_per_day", largest=_LARGEST)
        block = self.whole(members.get("block_bytes"), f"{path}.block_bytes", smallest=1, largest=2**30)
        burst = self.whole(members.get("burst"), f"{path}.burst", smallest=1, largest=_LARGEST_RATE)
        rate = self._rate(members.get("send_rate"), f"{path}.send_rate", "messages a second")
        if preset is not None:
            for word in ("messages_per_day", "block_bytes"):
                if members.get(word) is not None:
                    self.refuse(f"{path}.{word}", "the preset has it: give one of both")
            quota, block = preset.blocks_a_day, preset.block_bytes
            rate = float(preset.rate(units)) if rate is None else rate
        if quota is None and rate is None and len(self.problems) == before:
            self.refuse(path, "preset, messages_per_day or send_rate is needed")
        if burst is not None and rate is None:
            self.refuse(f"{path}.burst", "it needs a send_rate")
        if len(self.problems) > before:
            return None
        given = tuple((word, value) for word, value in members.items() if value is not None)
        blocks_a_day = None if quota is None else quota * units
        default_burst = max(1, math.ceil(rate or 1))
        return Limits(blocks_a_day, block or 4096, rate, burst or default_burst, given)

    def _rate(self, value: Any, path: str, unit: str) -> float | None:
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0.001 <= value <= _LARGEST_RATE:
            return float(value)
        self.refuse(path, f"{unit}, from 0.001 to {_LARGEST_RATE}, are expected")
        return None


def describe(limits: Limits) -> str:
    """The limits in a few words."""
    texts: list[str] = []
    if limits.blocks_a_day is not None:
        texts.append(f"{limits.blocks_a_day:,} a day, in blocks of {limits.block_bytes} bytes")
    if limits.send_rate is not None:
        texts.append(f"{limits.send_rate:g} a second, {limits.burst} at once")
    return "; ".join(texts)


def describe_rate(rate: Rate) -> str:
    """A rate in a few words."""
    each = f"{rate.events_per_minute * rate.units:g} events a minute and worker, in blocks of {rate.event_bytes} bytes"
    return f"{each}; {rate.events_per_minute * rate.max_units:g} a group at most"
