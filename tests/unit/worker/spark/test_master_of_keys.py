"""Which masters divide their cores among the keys of a pooled process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osrdyne.protocol.spark_master import parse_spark_master
from osrdyne_worker.spark.key_scheduling import master_of_keys


@pytest.mark.parametrize(
    ("master", "of_keys"),
    [
        ("local", "local[1, keys]"),
        ("local[4]", "local[4, keys]"),
        ("local[*]", "local[*, keys]"),
        ("local[2,3]", "local[2,3, keys]"),
        ("local-cluster[1,2,512]", None),
        ("spark://host:7077", None),
    ],
)
def test_cores_of_a_local_master_only_are_divided_among_keys(master: str, of_keys: str | None) -> None:
    parsed = parse_spark_master(master)
    assert master_of_keys(parsed) == (parsed if of_keys is None else replace(parsed, text=of_keys))
