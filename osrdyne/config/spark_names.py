"""Names of Spark settings that are probably misspelt. Spark takes any name, and ignores those that it does not know.

`spark_names.txt` has the settings of Spark itself, as its version 4.3 registers them. Extensions have others, so only a
name that is close to one of these is reported. Used by `osrdyne check-config`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

from osrdyne.config.models import Settings

CLOSE = 0.9
"""Least likeness of a misspelt name to the name that was meant."""
# The rest of these names is free, or belongs to a program that has its own list.
_FREE = ("spark.hadoop.", "spark.kubernetes.", "spark.yarn.", "spark.executorEnv.", "spark.sql.catalog.")


def spark_warnings(settings: Settings) -> Iterator[str]:
    """A warning for each misspelt setting in `worker.spark_conf` and in the profiles."""
    yield from _warnings(settings.worker.spark_conf, "worker.spark_conf")
    for number, profile in enumerate(settings.worker.profiles):
        yield from _warnings(profile.spark_conf, f"worker.profiles.{number}.spark_conf")


def _warnings(conf: Mapping[str, str], place: str) -> Iterator[str]:
    for name in conf:
        if not name.startswith("spark."):
            yield f"{place}.{name}: Spark ignores it, because the name does not begin with `spark.`"
        elif (meant := meant_name(name)) is not None:
            yield f"{place}.{name}: Spark has no such setting; did you mean {meant}?"


def meant_name(name: str) -> str | None:
    """The setting of Spark that was probably meant by a name that it does not know; otherwise None."""
    if name in spark_names() or name.startswith(_FREE):
        return None
    near = difflib.get_close_matches(name, spark_names(), n=1, cutoff=CLOSE)
    return near[0] if near else None


@cache
def spark_names() -> frozenset[str]:
    """The names of the settings of Spark."""
    return frozenset(files("osrdyne.config").joinpath("spark_names.txt").read_text(encoding="utf-8").split())
