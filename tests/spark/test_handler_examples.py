"""The example worker on Spark, with its handlers called as the runtime calls them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.names import Key
from osrdyne_worker import Call, Context
from osrdyne_worker.requests.dispatch import Dispatcher
from osrdyne_worker.spark.session import SparkSessions
from workers.examples import scoring


class Example:
    def __init__(self, spark: Any, dispatcher: Dispatcher) -> None:
        context = Context(Key("2"), session=spark.newSession())
        self.context = replace(context, state=scoring.load(context))
        self.dispatcher = dispatcher

    def call(self, path: str, body: object) -> Call:
        return Call(self.context, Request("2", json.dumps(body).encode(), path=path))

    def ask(self, path: str, body: object = None) -> Any:
        response = asyncio.run(self.dispatcher.run(self.call(path, body or {}), group_id="example"))
        assert response.status == "ok", response.body
        return json.loads(response.body)

    def ask_together(self, path: str, bodies: list[object]) -> list[Response | None]:
        calls = [self.call(path, body) for body in bodies]
        return asyncio.run(self.dispatcher.run_batch(calls, group_id="example"))


@pytest.fixture(scope="module")
def example(sessions: SparkSessions, spark: Any) -> Iterator[Example]:
    scoring.app.sessions = sessions  # the Spark of the tests
    with ThreadPoolExecutor(3) as threads:
        yield Example(spark, Dispatcher(scoring.app, threads=threads, side_threads=threads))


def test_segment_is_a_frame_of_spark_through_a_view_of_the_request(example: Example) -> None:
    document = example.ask("/segment", {"minimum_age": 78})
    assert [column["type"] for column in document["columns"]] == ["bigint", "bigint", "double"]
    assert [row[:2] for row in document["rows"]] == [[78, 33], [79, 33]]
    assert not example.context.session.catalog.tableExists("segment")


def test_scores_of_the_model_agree_in_spark_and_pandas(example: Example) -> None:
    scores = dict(example.ask("/scores")["rows"])
    assert len(scores) == 1000
    assert scores[7] == pytest.approx(2 * 27 - 7 + 5)
    everything = dict(example.ask("/all")["rows"])
    assert len(everything) == 2000
    assert {key: everything[key] for key in scores} == pytest.approx(scores)
    best = example.ask("/best")["rows"]
    assert [score for _, score in best] == pytest.approx(sorted(everything.values(), reverse=True)[:10])


def test_customers_looked_up_in_one_query_are_those_looked_up_one_by_one(example: Example) -> None:
    bodies: list[object] = [{"id": number} for number in (5, 1999, 2000, 5)] + [{"id": "x"}]
    together = example.ask_together("/customer", bodies)
    alone = [example.ask_together("/customer", [body])[0] for body in bodies]
    assert together == alone
    assert [response.code for response in together if response is not None] == [200, 200, 404, 200, 400]
