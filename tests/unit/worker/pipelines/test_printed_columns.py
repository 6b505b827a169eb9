"""Columns of views as the configuration takes them."""

from __future__ import annotations

import pytest

from osrdyne_worker.pipelines.infer import ddl
from osrdyne_worker.pipelines.views.loading import View


@pytest.mark.parametrize(
    ("name", "shown"), [("id", "id"), ("order date", "`order date`"), ("a`b", "`a``b`"), ("größe", "`größe`")]
)
def test_columns_are_ddl_with_odd_names_in_backticks(name: str, shown: str) -> None:
    view = View("v", "csv", ((name, "bigint", True), ("s", "struct<a:int,b:string>", True)), cached=False)
    assert ddl(view) == f"{shown} bigint, s struct<a:int,b:string>"
