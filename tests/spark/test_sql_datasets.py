"""The data of a key on a real Spark: formats, odd keys, filters, and data that is missing or broken."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import one_table, refusal, rows

from osrdyne.errors import ConfigurationError
from osrdyne_worker import Call, RequestError
from osrdyne_worker.pipelines import sql as pipeline
from osrdyne_worker.pipelines.views.datasets import parse_config


def code_of(call: Call) -> tuple[int | None, str]:
    """The code and the error of the answer to any query."""
    error = refusal(call, "select 1")
    return error.code, error.error_code


@pytest.fixture(scope="module")
def tenants(spark, tmp_path_factory):
    """Rows of several tenants: `tenant` as text, `number` as bigint."""
    path = str(tmp_path_factory.mktemp("tenants") / "all.parquet")
    names = ["a", "b", "o'neil", '"; drop view t; --', "é 漢 🚄", "1"]
    frame = spark.createDataFrame([(name, place) for place, name in enumerate(names)], "tenant string, number bigint")
    frame.coalesce(1).write.parquet(path)
    return path


@pytest.mark.parametrize("fmt", ["csv", "json", "orc", "parquet"])
def test_format_of_the_configuration_is_read(spark, make_call, tmp_path, fmt):
    path = str(tmp_path / "data")
    spark.createDataFrame([(1, "x")], "id bigint, name string").write.format(fmt).option("header", True).save(path)
    options = {"header": True, "inferSchema": True} if fmt == "csv" else {}
    call = make_call(one_table("k", path=path, format=fmt, options=options), "k")
    assert rows(call, "select name from t") == [["x"]]


def test_odd_key_finds_its_own_directory(make_call, tmp_path):
    parts = ["0.01", "é漢🚄", "a b", "50%", "A%41", "#1", "a,b", "x='y'", '"q"', "a;b", "&<>", "+2B", "infra=42,t=24"]
    config = one_table("k/{part}", path=f"{tmp_path}/{{part}}/t.csv", format="csv", columns="n int")
    for number, part in enumerate(parts):
        (tmp_path / part).mkdir()
        (tmp_path / part / "t.csv").write_text(f"{number}\n", encoding="utf-8")
    for number, part in enumerate(parts):
        assert rows(make_call(config, f"k/{part}"), "select n from t") == [[number]], part


def test_filter_shows_the_rows_of_the_key_only(make_call, tenants):
    config = one_table("{tenant}", path=tenants, filters={"Tenant": "{tenant}"})
    found = {"a": [0], "o'neil": [2], '"; drop view t; --': [3], "é 漢 🚄": [4], "' OR '1'='1": [], "A": []}
    for key, numbers in found.items():
        assert rows(make_call(config, key), "select number from t") == [[number] for number in numbers], key


def test_filter_is_compared_in_the_type_of_the_column(make_call, tenants):
    """Two keys never see the same rows: a text that is not that of a value is an invalid key."""
    config = one_table("n={n}", path=tenants, filters={"number": "{n}"})
    assert rows(make_call(config, "n=1"), "select tenant from t") == [["b"]]
    for text in ("many", "01", "+1", "1.0", " 1"):
        assert code_of(make_call(config, f"n={text}")) == (400, "invalid_key"), text


@pytest.mark.parametrize("how", ["inferred", "declared", "remembered", "only the file's columns are declared"])
@pytest.mark.parametrize("directories", [("7", "07"), ("7", "7.0", "2024-01-01", "a b")], ids=["numbers", "texts"])
def test_filter_on_directories_compares_their_text(make_call, tmp_path, how, directories):
    for number, name in enumerate(directories):
        (tmp_path / f"tenant={name}").mkdir()
        pq.write_table(pa.table({"v": [number]}), tmp_path / f"tenant={name}" / "p.parquet")
    columns = {"declared": "v bigint, tenant string", "only the file's columns are declared": "v bigint"}.get(how)
    table = one_table("t/{tenant}", path=str(tmp_path), filters={"tenant": "{tenant}"}, columns=columns)
    if how == "remembered":
        make_call(one_table("all", path=str(tmp_path)), "all")
    for number, name in enumerate(directories):
        assert rows(make_call(table, f"t/{name}"), "select v from t") == [[number]], name
    assert rows(make_call(table, "t/0007"), "select v from t") == []


def csv_of_tenants(directory: Path, **table: Any) -> dict[str, Any]:
    return one_table("{tenant}", path=str(directory), format="csv", filters={"tenant": "{tenant}"}, **table)


@pytest.mark.parametrize("columns", [None, "tenant int, v int"])
def test_filter_on_numbers_of_csv_files_compares_their_text(make_call, tmp_path, columns):
    (tmp_path / "t.csv").write_text("tenant,v\n7,1\n07,2\n", encoding="utf-8")
    options = {"header": True} | ({} if columns else {"inferSchema": True})
    table = csv_of_tenants(tmp_path, options=options, columns=columns)
    for name, value in (("7", 1), ("07", 2)):
        assert rows(make_call(table, name), "select v from t") == [[value]]


@pytest.mark.parametrize("columns", ["tenant string, buyer string", None])
def test_csv_file_with_another_order_of_columns_is_refused(make_call, tmp_path, columns):
    """By position, the row of the second file would be one of acme."""
    (tmp_path / "a.csv").write_text("tenant,buyer\nacme,bolt\nbolt,acme\n", encoding="utf-8")
    table = csv_of_tenants(tmp_path, options={"header": True}, columns=columns)
    assert rows(make_call(table, "acme"), "select * from t") == [["acme", "bolt"]]
    (tmp_path / "b.csv").write_text("buyer,tenant\nacme,bolt\n", encoding="utf-8")
    call = make_call(table, "acme")
    for query in ("select * from t", "select buyer from t", "select count(*) from t"):
        error = refusal(call, query)
        assert error.code == 500
        assert error.error_code == "dataset_unreadable"
        assert "b.csv" in error.message
        assert "header" in error.message


def test_csv_columns_by_position_are_refused_with_filters():
    options = {"header": True, "enforceSchema": True}
    with pytest.raises(ConfigurationError, match="enforceSchema"):
        parse_config(one_table("{t}", path="/p", format="csv", options=options, filters={"tenant": "{t}"}))


def test_cached_view_is_answered_from_memory(spark, make_call, tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("1\n", encoding="utf-8")
    call = make_call(one_table("k", path=str(file), format="csv", columns="n int", cache=True), "k")
    assert call.context.state.caching.wait(300)
    file.unlink()
    assert rows(call, "select n from t") == [[1]]


def test_key_of_no_dataset_is_answered_with_the_patterns(make_call, tpch_config):
    call = make_call(tpch_config, "nonsense")
    error = refusal(call, "select 1")
    assert (error.code, error.error_code) == (404, "unknown_dataset")
    assert "tpch/sf={scale}" in error.message
    for handler in (pipeline.schema, pipeline.cache_status, pipeline.versions):
        with pytest.raises(RequestError, match="nonsense"):
            handler(call)


def test_path_that_does_not_exist_is_answered_with_view_and_path(make_call, tpch_config):
    error = refusal(make_call(tpch_config, "tpch/sf=77"), "select 1")
    assert (error.code, error.error_code) == (404, "dataset_not_found")
    assert "customer" in error.message
    assert "sf=77/customer.parquet" in error.message


def test_data_that_appears_later_is_found_when_it_is_searched_again(make_call, tmp_path):
    config = one_table("k", path=str(tmp_path / "t.csv"), format="csv", columns="n int")
    often, seldom = (make_call({**config, "retry_missing_interval": seconds}, "k") for seconds in (0, 1000))
    assert code_of(often) == (404, "dataset_not_found")
    (tmp_path / "t.csv").write_text("5\n", encoding="utf-8")
    assert rows(often, "select n from t") == [[5]]
    assert code_of(seldom) == (404, "dataset_not_found")


@pytest.mark.parametrize("content", ["", "this is not parquet, whatever its name says", None])
def test_data_that_is_not_parquet_is_answered_unreadable(make_call, tmp_path, content):
    if content is not None:
        (tmp_path / "t.parquet").write_text(content, encoding="utf-8")
    error = refusal(make_call(one_table("k", path=str(tmp_path / ("t.parquet" if content else ""))), "k"), "select 1")
    assert (error.code, error.error_code) == (500, "dataset_unreadable")
    assert "\n" not in error.message


def test_key_leads_out_of_no_directory(make_call, tmp_path, tenants):
    base = tmp_path / "base"
    base.mkdir()
    (base / "out").symlink_to(tenants)
    link = make_call({**one_table("{name}", path="{name}"), "base_directory": str(base)}, "out")
    parents = make_call(one_table("k={part:.*}", path=f"{tmp_path}/{{part}}"), "k=../../etc")
    assert [code_of(link), code_of(parents)] == [(403, "invalid_key"), (400, "invalid_key")]


def test_wrong_column_or_option_fails_the_start(make_call, tmp_path, tenants):
    with pytest.raises(ConfigurationError, match="nope"):
        make_call(one_table("k", path=tenants, filters={"nope": "1"}), "k")
    (tmp_path / "t.csv").write_text("5\n", encoding="utf-8")
    with pytest.raises(ConfigurationError):
        make_call(one_table("k", path=str(tmp_path), format="csv", columns="this is no schema"), "k")


@pytest.mark.proves("spark/data-source-file-system")
def test_data_source_without_its_jar_names_the_setting_that_adds_it(make_call):
    with pytest.raises(ConfigurationError, match=r"spark\.jars\.packages to io\.delta:delta-spark_"):
        make_call(one_table("k", path="/nowhere", format="delta"), "k")


def test_remembered_schema_opens_the_same_view_without_reading_a_file(make_call, spark, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data"
    query = "select id, cast(id as decimal(9, 2)) as price, array(id) as list, id % 2 as half from range(4)"
    spark.sql(query).write.partitionBy("half").parquet(str(data))
    config = one_table("k", path=str(data))

    def opened():
        call = make_call(config, "k")
        return pipeline.schema(call)["views"], rows(call, "select * from t order by id")

    first, again = opened(), opened()
    assert first == again
    (file,) = (tmp_path / "cache" / "osrdyne" / "schemas").iterdir()
    document = json.loads(file.read_text())
    document["schema"]["fields"][0]["type"] = "string"
    file.write_text(json.dumps(document))
    with pytest.raises(RequestError):  # the remembered schema is used: the files hold no strings
        opened()
