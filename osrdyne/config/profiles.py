"""Profiles, which change settings by key: `worker.profiles` of the configuration, and the document of `osrdyne
profiles`.

A profile changes some settings for the keys that match its pattern. A key has the first profile that matches, else the
settings of the pool. Source: docs/reference/workers/profiles.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from osrdyne.config.types import Duration, MasterUri, Model, Size, SparkConf
from osrdyne.expressions import compile_linear as compile_linear
from osrdyne.protocol.key_patterns import KeyPattern
from osrdyne.protocol.spark_master import EXECUTOR_IMAGE, FORMS, parse_spark_master

if TYPE_CHECKING:
    from osrdyne.config.models import Settings

Footprint = Literal["standard", "small"]
PlacementName = Literal["dedicated", "pooled"]
Eviction = Literal["first", "normal", "last"]
EVICTION_ORDER: tuple[Eviction, ...] = ("first", "normal", "last")

LEAST_HEAP = 450 * 2**20
"""Bytes of heap below which Spark does not start."""
MAX_PROFILES = 200
MAX_PATTERN = 1_000
"""Characters of a pattern."""


class Profile(Model):
    """The settings of the keys that match a pattern. A setting that is not given is that of the pool."""

    match: str = Field(max_length=MAX_PATTERN, description="Pattern of the key, such as `tpch/sf={scale}`.")
    spark_master: MasterUri | None = Field(None, repr=False, description=f"As `worker.spark_master`: {FORMS}.")
    spark_conf: SparkConf = Field(
        default_factory=dict, repr=False, description="Spark settings on top of those of `worker.spark_conf`."
    )
    memory: Size | None = Field(None, ge=LEAST_HEAP, description="As `worker.memory`.")
    cores: int | None = Field(None, ge=1, description="As `worker.cores`.")
    concurrency: int | None = Field(None, ge=1, le=64, description="As `worker.concurrency`.")
    footprint: Footprint | None = Field(None, description="As `worker.footprint`.")
    placement: PlacementName | None = Field(None, description="As `worker.placement`.")
    spares: int | None = Field(
        None, ge=0, le=100, description="As `worker.pooled.spares`, for the processes of this profile."
    )
    unbind_delay: Duration | None = Field(None, description="As `lifecycle.unbind_delay`.")
    stop_delay: Duration | None = Field(None, description="As `lifecycle.stop_delay`.")
    eviction: Eviction | None = Field(
        None,
        description="When an idle group of this profile is evicted if memory or places for groups run short: `first`, "
        "`normal` (the default) or `last`. Groups with the same value are evicted in the order of their last use.",
    )

    @field_validator("match")
    @classmethod
    def _valid_pattern(cls, text: str) -> str:
        KeyPattern(text, compile=compile_linear)
        return text

    @field_validator("spark_master")
    @classmethod
    def _known_master(cls, text: str | None) -> str | None:
        if text is not None:
            parse_spark_master(text)
        return text

    @cached_property
    def pattern(self) -> KeyPattern:
        return KeyPattern(self.match, compile=compile_linear)

    def matches(self, key: str) -> bool:
        try:
            return self.pattern.match(key) is not None
        except UnicodeEncodeError:  # a key with half of a surrogate pair matches no pattern
            return False

    def given(self) -> dict[str, Any]:
        """The settings that the profile changes, by name."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "match"}
        return {name: value for name, value in values.items() if value not in (None, {})}

    def document(self) -> dict[str, Any]:
        """The profile as JSON values, from which it can be loaded again."""
        return {"match": self.match, **self.given()}


def profile_of(profiles: Sequence[Profile], key: str) -> Profile | None:
    """The first profile that matches the key."""
    return next((profile for profile in profiles if profile.matches(key)), None)


def describe_profile(profile: Profile | None) -> str:
    """A sentence about the profile of a key, for pools with profiles."""
    if profile is None:
        return "No profile matches: the workers have the settings of the pool."
    return f"The profile {profile.match!r} sets {', '.join(profile.given()) or 'nothing'}."


def profile_problems(settings: Settings, profiles: Sequence[Profile]) -> list[tuple[str, str]]:
    """Why these profiles cannot be used with these settings: for each problem its path, such as `0.cores`, and a
    sentence
    with the remedy."""
    if len(profiles) > MAX_PROFILES:
        return [("", f"there are {len(profiles)} profiles; at most {MAX_PROFILES} are possible")]
    earlier = Counter[str]()
    problems = []
    for number, profile in enumerate(profiles):
        if earlier[profile.match]:
            problems.append((f"{number}.match", f"an earlier profile has the pattern {profile.match!r}: remove one"))
        earlier[profile.match] += 1
        problems += [(f"{number}.{name}", message) for name, message in _problems_of(profile, settings)]
    return problems + [("", message) for message in _problems_of_processes(settings, profiles)]


def _problems_of_processes(settings: Settings, profiles: Sequence[Profile]) -> Iterator[str]:
    """Why the processes of pooled workers of all profiles do not fit into `max_processes`."""
    spares: list[tuple[dict[str, object], int]] = []
    for effective in [settings, *map(settings.with_profile, profiles)]:
        if effective.worker.placement == "pooled":
            config, number = effective.worker_config(), effective.worker.pooled.spares
            # Profiles with the same settings of workers share processes.
            shared = next((at for at, (known, _) in enumerate(spares) if known == config), None)
            if shared is None:
                spares.append((config, number))
            else:
                spares[shared] = (config, max(number, spares[shared][1]))
    needed = sum(max(number, 1) for _, number in spares)
    if len(spares) > 1 and needed > settings.worker.pooled.max_processes:
        yield (
            f"pooled workers of {len(spares)} different settings need up to {needed} processes (the spares of each, at "
            f"least one), and worker.pooled.max_processes is {settings.worker.pooled.max_processes}: raise it, or "
            "lower spares"
        )


def _problems_of(profile: Profile, settings: Settings) -> Iterator[tuple[str, str]]:
    effective = settings.with_profile(profile)
    lifecycle, worker = effective.lifecycle, effective.worker
    if lifecycle.stop_delay < lifecycle.settle_delay:
        yield (
            "stop_delay",
            f"stop_delay ({lifecycle.stop_delay:g} s) must be at least lifecycle.settle_delay "
            f"({lifecycle.settle_delay:g} s): raise it",
        )
    master = parse_spark_master(worker.spark_master)
    if profile.cores is not None and not master.is_shared:
        yield "cores", "only workers on a cluster have cores: write spark_master: local[2] for 2 cores of the host"
    if profile.memory is not None and master.is_connect:
        yield "memory", "a worker of Spark Connect has no Java process: remove it"
    if profile.spares is not None and worker.placement == "dedicated":
        yield "spares", "dedicated workers have no spare processes: add placement: pooled, or remove it"
    if effective.lacks_executor_image and not settings.lacks_executor_image:
        yield "spark_master", f"it needs the image of the executors: set {EXECUTOR_IMAGE} in spark_conf"
