"""Which requests name the same export, without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context
from osrdyne_worker.pipelines.queries.export import ExportRequest, _export_name


def name(export_id: str | None = "monthly", query: str = "select 1", **request: Any) -> str:
    fields = {"correlation_id": "c", "reply_to": "r", **request}
    call = Call(Context(Key("k")), Request("k", b"", **fields))
    return _export_name(call, ExportRequest(query=query, id=export_id))


@pytest.mark.parametrize("export_id", ["monthly", None])
def test_request_that_needs_later_data_is_another_export(export_id: str | None) -> None:
    """Otherwise it would be answered from the earlier data."""
    versions: list[dict[str, object]] = [{}, {"x-data-version": 7}, {"x-data-version": 8}]
    assert len({name(export_id, headers=headers) for headers in versions}) == 3
    assert name(export_id, headers={"x-data-version": 8}) == name(export_id, headers={"x-data-version": b"8"})


def test_id_names_the_export_for_all_callers() -> None:
    assert name(correlation_id="1", reply_to="a") == name(correlation_id="2", reply_to="b")
    assert name(None, correlation_id="1") != name(None, correlation_id="2")
    assert name() != name(query="select 2")
    assert len({name(None, correlation_id=None, reply_to=None) for _ in range(3)}) == 3
