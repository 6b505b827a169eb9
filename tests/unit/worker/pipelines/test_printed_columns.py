"""Columns of views as the configuration takes them."""

from __future__ import annotations

import pytest
import yaml

from osrdyne_worker.pipelines.infer import as_yaml, ddl
from osrdyne_worker.pipelines.views.loading import View


@pytest.mark.parametrize(
    ("name", "shown"), [("id", "id"), ("order date", "`order date`"), ("a`b", "`a``b`"), ("größe", "`größe`")]
)
def test_columns_are_ddl_with_odd_names_in_backticks(name: str, shown: str) -> None:
    view = View("v", "csv", ((name, "bigint", True), ("s", "struct<a:int,b:string>", True)), cached=False)
    assert ddl(view) == f"{shown} bigint, s struct<a:int,b:string>"


def test_output_is_yaml_for_the_configuration() -> None:
    columns = {"a": 'id bigint, `b: "c"` string', "b": "x int"}
    tables = yaml.safe_load("\n".join(as_yaml(columns)))
    assert tables == [{"view": view, "columns": text} for view, text in columns.items()]
