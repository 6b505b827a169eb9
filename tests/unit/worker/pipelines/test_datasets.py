"""Which data belongs to a key: patterns, paths, filters, columns and the configuration's own errors."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.errors import ConfigurationError
from osrdyne_worker.pipelines.infer import ddl
from osrdyne_worker.pipelines.views.datasets import (
    InvalidKeyPartError,
    KeyPattern,
    KeyRange,
    ResolvedTable,
    UnknownDatasetError,
    parse_config,
    resolve,
)
from osrdyne_worker.pipelines.views.loading import View

TELEMETRY = {"view": "warm", "format": "telemetry", "path": "/data/warm"}


def config(key: str = "tpch/sf={scale}", **table: Any) -> dict[str, Any]:
    return {"datasets": [{"key": key, "tables": [{"view": "t", "path": "/data/sf={scale}/t.parquet", **table}]}]}


def only_table(values: dict[str, Any], key: str) -> ResolvedTable:
    return resolve(parse_config(values), key).tables[0]


@pytest.mark.parametrize(
    ("pattern", "key", "parts"),
    [
        ("tpch/sf={scale}", "tpch/sf=0.01", {"scale": "0.01"}),
        ("tpch/sf={scale}", "tpch/sf=", None),
        ("tpch/sf={scale}", "tpch/sf=a/b", None),
        ("tpch/sf={scale}", "tpch/sf=..", None),
        ("infra={infra},timetable={timetable}", "infra=42,timetable=24", {"infra": "42", "timetable": "24"}),
        ("a={a},b={b}", "a=1,b=2,b=3", {"a": "1", "b": "2,b=3"}),
        (r"log/{day:\d{4}-\d\d}", "log/2024-01", {"day": "2024-01"}),
        (r"n={n:\d+}", "n=12\n", None),
        ("{{x}}.{a}", "{x}.1", {"a": "1"}),
        ("{any}", "漢 🚄 é % # * . : \" '", {"any": "漢 🚄 é % # * . : \" '"}),
    ],
)
def test_pattern_matches_a_whole_key_or_not(pattern, key, parts):
    assert KeyPattern(pattern).match(key) == parts


@given(st.text(min_size=1).filter(lambda text: "/" not in text and text not in (".", "..")))
def test_pattern_gives_back_any_part_unchanged(part):
    assert KeyPattern("k={part}").match(f"k={part}") == {"part": part}


@pytest.mark.parametrize("pattern", ["{a", "a}", "{}", "{1a}", "{a}{a}", "{a:(}", "{a:(x)}", "{a b}"])
def test_pattern_that_cannot_be_read_is_refused(pattern):
    with pytest.raises(ValueError):
        KeyPattern(pattern)


def test_first_dataset_that_matches_counts_and_parts_of_the_key_fill_path_and_filters():
    first = config("x={scale}", filters={"tenant": "t-{scale}"})
    datasets = [*first["datasets"], *config("x=1", path="/two")["datasets"]]
    table = only_table({"datasets": datasets}, "x=1")
    assert (table.path, table.directory) == ("/data/sf=1/t.parquet", "/data")
    assert table.filters == (("tenant", "t-1"),)
    with pytest.raises(UnknownDatasetError, match=r"'other'.*'x=\{scale\}'"):
        resolve(parse_config({"datasets": datasets}), "other")
    with pytest.raises(UnknownDatasetError):
        resolve(parse_config({}), "any")


SYNTAX = ["a*", "a?", "[a]", "{a", "a\\b", "a\x00b", "a\nb", "s3:", "~root", "a^b"]
DIRECTORIES = ["..", ".", ".hidden", "_SUCCESS", " ", "a/../../etc"]


@pytest.mark.parametrize(
    ("path", "part"),
    [*(("/data/sf={scale}/t", part) for part in SYNTAX), *(("/data/{scale}/t", part) for part in DIRECTORIES)],
    ids=ascii,
)
def test_part_that_would_be_syntax_in_a_path_is_refused(path, part):
    with pytest.raises(InvalidKeyPartError):
        only_table(config("k={scale:(?s:.*)}", path=path), f"k={part}")


@pytest.mark.parametrize("part", ["0.01", "é漢🚄", "a b", "50%", "#1", "a,b", "x='y'", "A%41"])
def test_part_with_harmless_text_is_fine_in_a_path_and_any_text_in_a_filter(part):
    assert only_table(config(), f"tpch/sf={part}").path == f"/data/sf={part}/t.parquet"
    hostile = f"{part}' OR 1=1; drop view x -- ../*"
    table = only_table(config("k={scale:.*}", path="/data/t", filters={"a": "{scale}"}), f"k={hostile}")
    assert table.filters == (("a", hostile),)


@pytest.mark.parametrize("part", ["a", "%", "a%", "_", "' or '1'='1", "a\\", "é漢🚄", "a/%", "{site}"])
@pytest.mark.proves("telemetry-tables/name-site-characters-meaning")
def test_part_is_no_wildcard_in_keys_of_telemetry(part):
    values = {"datasets": [{"key": "telemetry/{site:.+}", "tables": [{**TELEMETRY, "keys": "{site}/%"}]}]}
    assert only_table(values, f"telemetry/{part}").keys == KeyRange(f"{part}/", is_prefix=True)
    values["datasets"][0]["tables"] = [{**TELEMETRY, "keys": "{site}"}]
    assert only_table(values, f"telemetry/{part}").keys == KeyRange(part, is_prefix=False)


@pytest.mark.parametrize(
    ("path", "base", "expected", "directory"),
    [
        ("tpch/{scale}", "/data", "/data/tpch/1", "/data"),
        ("/data/x/{scale}", "/data", "/data/x/1", "/data"),
        ("s3a://bucket/{scale}/t", "/data", "s3a://bucket/1/t", None),
        ("file:///data/{scale}", None, "file:///data/1", "///data"),
    ],
)
def test_local_path_has_a_directory_not_to_leave(path, base, expected, directory):
    table = only_table({**config("k={scale}", path=path), "base_directory": base}, "k=1")
    assert (table.path, table.directory) == (expected, directory)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"row_limits": 3}, "row_limit?"),
        (config(pathh="/x"), "worker.config.datasets.0.tables.0.pathh"),
        (config(view="a.b"), "view"),
        ({"base_directory": "data"}, "absolute"),
        (config(pool="plant"), "last-values"),
        (config("k={a}"), "{scale}"),
        (config("{a"), "not closed"),
        ({"export": {"folder": "/x"}}, "worker.config.export.folder"),
        (config(unreadable_columns="drop", columns="id int"), "unreadable_columns"),
        ({"datasets": [{"key": "k", "tables": []}]}, "worker.config.datasets.0.tables"),
        (config(path="relative/{scale}"), "base_directory"),
        (config(options={"mergeSchemas": True}), "options.mergeSchemas"),
        (config(format="csv", options={"haeder": True}), "header?"),
        (config(unreadable_columns="drop", format="csv"), "unreadable_columns"),
        (config(unreadable_columns="drop", path="s3a://b/{scale}"), "unreadable_columns"),
        ({**config(path="/other/{scale}"), "base_directory": "/data"}, "base_directory '/data'"),
        ({**config(path="/data/{scale}/../../x"), "base_directory": "/data"}, "base_directory '/data'"),
        ({**config(path="file:///database/{scale}"), "base_directory": "/data"}, "base_directory '/data'"),
        (config(format="table", path="db.{scale}"), "fixed name"),
        (config(format="telemetry", path="/data/warm"), "keys"),
        (config(format="telemetry", path="/data/warm", keys="%/{scale}"), "%"),
        (config(format="telemetry", path="/data/warm", keys="{site}/%"), "{site}"),
        (config(format="telemetry", path="/data/warm", keys="%", cache=True), "cache"),
        (config(format="telemetry", path="s3a://data/warm", keys="%"), "local file system"),
        (config(keys="{scale}/%"), "telemetry and last-values"),
        (config(format="last-values", path="/data/v.db", keys="%"), "pool"),
        ({"datasets": [{"key": "k", "watch": True, "tables": [{**TELEMETRY, "keys": "%"}]}]}, "watch"),
        ({"datasets": [{"key": "k", "watch": True, "tables": [{"view": "t", "path": "/data/*.parquet"}]}]}, "watch"),
        ({"row_limit": 10, "max_row_limit": 5}, "max_row_limit"),
        ({"datasets": [{"key": "k", "tables": [{"view": v, "path": "/x"} for v in "aA"]}]}, "twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_configuration_is_refused_with_its_place(values, named):
    with pytest.raises(ConfigurationError) as caught:
        parse_config(values)
    assert named in caught.value.message


def test_path_below_the_base_directory_and_options_of_readers_are_accepted(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "base").symlink_to(tmp_path / "real")
    for path in ("{scale}", f"{tmp_path}/base/{{scale}}", f"{tmp_path}/real/{{scale}}", "s3a://other/{scale}"):
        parse_config({**config("k={scale}", path=path), "base_directory": f"{tmp_path}/base"})
    parse_config(config(format="csv", options={"HEADER": True, "pathglobfilter": "*.csv"}))
    parse_config(config(options={"parquet.bloom.filter.enabled": True, "basePath": "/data"}))
    for path in ("file:/data/{k}", "s3a://bucket/{k}"):
        watched = {"datasets": [{"key": "{k}", "watch": True, "tables": [{"view": "t", "path": path}]}]}
        assert resolve(parse_config(watched), "a").watch


def test_columns_are_ddl_with_odd_names_in_backticks():
    columns = (("id", "bigint"), ("order date", "bigint"), ("a`b", "bigint"), ("größe", "struct<a:int,b:string>"))
    view = View("v", "csv", tuple((name, kind, True) for name, kind in columns), cached=False)
    assert ddl(view) == "id bigint, `order date` bigint, `a``b` bigint, `größe` struct<a:int,b:string>"
