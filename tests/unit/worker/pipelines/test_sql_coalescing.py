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


def test_identical_queries_share_a_run_where_the_pool_or_the_route_says_so() -> None:
    assert said(PLAIN) is True
    assert said(PLAIN, replace(FIXED, config=parse_config({}))) is None, "as the route says"


def test_data_that_is_read_as_it_is_when_the_query_runs_is_never_shared() -> None:
    assert said(PLAIN, replace(FIXED, is_fixed=False)) is False


@pytest.mark.parametrize(
    "body",
    [
        {"query": "select RAND() as x"},
        {"query": "select randn(), 1"},
        {"query": "select uuid()"},
        {"query": "select now()"},
        {"query": "select current_timestamp"},
        {"query": "select date 'TODAY'"},
        {"query": "select localtimestamp()"},
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
