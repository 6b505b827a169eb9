"""Which requests of `/sql` share the run of an identical one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from osrdyne.protocol.messages import Request
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context
from osrdyne_worker.pipelines.sql import app
from osrdyne_worker.pipelines.views.datasets import parse_config

coalesces = app.registered_handlers()["/sql"].coalesce
PLAIN = {"query": "select brand, sum(current) as n from t group by brand", "limit": 10}


@dataclass(frozen=True)
class Data:
    config: Any
    is_fixed: bool = True


FIXED = Data(parse_config({"coalesce": True}))


def said(body: object, data: Data = FIXED) -> bool | None:
    assert callable(coalesces)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return coalesces(Call(Context(Key("k"), state=data), Request(key="k", path="/sql", body=content)))


def test_identical_queries_over_fixed_data_share_a_run() -> None:
    assert said(PLAIN) is True
    assert said(PLAIN, replace(FIXED, config=parse_config({}))) is None, "as the route says"
    assert said(PLAIN, replace(FIXED, is_fixed=False)) is False, "the data is read when the query runs"


@pytest.mark.parametrize(
    "body",
    [
        *(
            {"query": f"select {text}"}
            for text in ("RAND() as x", "randn(), 1", "uuid()", "now()", "current_timestamp", "localtimestamp()")
        ),
        {"query": "select date 'TODAY'"},
        {"query": "select * from t tablesample (10 rows)"},
        {"query": "select 1", "page_size": 5},
        {"cursor": "x.5"},
        b'{"query": "select \\u0072and()"}',
        {"query": "select 1 -- " + 70_000 * "x"},
    ],
    ids=str,
)
def test_answer_of_its_own_is_never_shared(body: object) -> None:
    assert said(body) is False
