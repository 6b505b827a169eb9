"""Retries as values: what a manifest may contain, how it travels, and what a worker decides by it."""

import json
from collections.abc import Mapping

import pytest
from structlog.testing import capture_logs

from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.ingress.routes.retries import MAX_DIFFERENT_DELAYS, describe_retry
from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.names import Key, PoolNames
from osrdyne.protocol.retries import ATTEMPTS_HEADER, TERMS_HEADER, RetryTerms, read_attempts, read_class, read_terms
from osrdyne.protocol.statuses import Status
from osrdyne_worker import Call, Context
from osrdyne_worker.requests.retries import Retries, Retry, plan_retry, with_attempts

TEXT = "FROM /messages/* INTO $upstream"
GOOD = {"codes": [503, "5XX"], "max_attempts": 3, "delays": ["1s", 2.5, "PT1M"]}
TERMS = RetryTerms(("503", "5xx"), 3, (1000, 2500, 60_000))
FAILED = Response(Status.ERROR)
NOW = 1_000_000


def manifest(retry: object) -> str:
    return json.dumps({"routes": {"r": {"route": TEXT, "retry": retry}}})


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidDocumentError) as caught:
        load_manifest(text)
    return [str(problem).partition(":")[0] for problem in caught.value.problems]


def request(
    headers: Mapping[str, object] | None = None, *, terms: RetryTerms | None = TERMS, deadline_ms: int | None = None
) -> Request:
    own = {} if terms is None else {TERMS_HEADER: terms.to_header()}
    return Request("k", b"", headers={**own, **(headers or {})}, deadline_ms=deadline_ms)


class TestManifest:
    def test_retry_is_read_and_kept(self):
        loaded = load_manifest(manifest(GOOD))
        again = load_manifest(json.dumps(loaded.document()))
        assert loaded.routes[0].retry == again.routes[0].retry == TERMS
        assert loaded.retry_delays == {1000, 2500, 60_000}

    @pytest.mark.parametrize(
        ("retry", "places"),
        [
            ({}, [".codes", ".max_attempts", ".delays"]),
            (3, [""]),
            (GOOD | {"codes": []}, [".codes"]),
            (GOOD | {"codes": "5xx"}, [".codes"]),
            (GOOD | {"codes": [500, 200, True, "6xx", "50x", None]}, [f".codes[{place}]" for place in range(1, 6)]),
            (GOOD | {"max_attempts": 0}, [".max_attempts"]),
            (GOOD | {"max_attempts": 101}, [".max_attempts"]),
            (GOOD | {"max_attempts": True}, [".max_attempts"]),
            (GOOD | {"delays": []}, [".delays"]),
            (GOOD | {"delays": [1] * 11}, [".delays"]),
            (GOOD | {"delays": [0, "soon", "2d", None, 1]}, [f".delays[{place}]" for place in range(4)]),
            ({"codes": [1], "max_attempts": "x", "delays": 3}, [".codes[0]", ".max_attempts", ".delays"]),
            (GOOD | {"tries": 3}, [".tries"]),
        ],
        ids=str,
    )
    def test_every_error_is_reported_with_its_place(self, retry, places):
        assert problems(manifest(retry)) == [f"routes.r.retry{place}" for place in places]

    def test_description_counts_the_requests_that_wait(self):
        described = describe_retry(TERMS, retrying={1000: 0, 2000: 7, 2500: 12})
        assert described.startswith(describe_retry(TERMS))
        assert "0 for 1 s, 12 for 2.5 s" in described and "7" not in described

    def test_too_many_different_delays_are_refused(self):
        numbers = range(1, MAX_DIFFERENT_DELAYS + 2)
        routes = {f"r{number}": {"route": TEXT, "retry": GOOD | {"delays": [number]}} for number in numbers}
        assert problems(json.dumps({"routes": routes})) == ["routes"]

    @pytest.mark.parametrize(("ttl", "attempt"), [(0, ""), (1, "2"), (3, "3"), (63, "4"), (64, "")])
    @pytest.mark.parametrize("of_route", [True, False], ids=["of the route", "of the manifest"])
    def test_delay_beyond_the_time_to_live_is_warned_about(self, ttl, attempt, *, of_route):
        route = {"route": TEXT, "retry": GOOD | {"max_attempts": 9}}
        given = {"timeToLiveSecs": ttl}
        document = {"routes": {"r": route | given if of_route else route}}
        warnings = load_manifest(
            json.dumps(document if of_route else document | {"storeAndForwardConfiguration": given})
        ).warnings
        assert [warning.path for warning in warnings] == ["routes.r.retry.delays"] * bool(attempt)
        assert f"before attempt {attempt}" in "".join(map(str, warnings)) or not attempt


class TestHeaders:
    def test_terms_survive_the_wire(self):
        assert read_terms({TERMS_HEADER: TERMS.to_header()}) == TERMS
        assert read_terms({TERMS_HEADER: bytearray(TERMS.to_header(), "utf-8")}) == TERMS

    @pytest.mark.parametrize(
        "value",
        [
            *(None, 3, "2", True, -1, 2.0, "", "[]", "{}", "null", "[" * 100_000),
            '{"codes":1,"max_attempts":1,"delays_ms":[1]}',
            '{"codes":["5xx"],"max_attempts":"3","delays_ms":[1]}',
            '{"codes":["5xx"],"max_attempts":3,"delays_ms":[]}',
            '{"codes":["5xx"],"max_attempts":3,"delays_ms":["1"]}',
            '{"codes":["5xx"],"max_attempts":3,"delays_ms":[-1]}',
        ],
        ids=lambda value: str(value)[:50],
    )
    def test_anything_else_is_not_read_as_terms_or_attempts(self, value):
        assert read_terms({TERMS_HEADER: value}) is None
        assert read_attempts({ATTEMPTS_HEADER: value}) == (3 if value == 3 else 0)

    @pytest.mark.parametrize(("text", "priority"), [("3", 3), ("default", None), ("10", None), (None, None)])
    def test_class_is_read(self, text, priority):
        assert read_class({"x-osrdyne-class": text}) == priority


class TestDecision:
    def test_delays_follow_each_other_and_the_last_repeats(self):
        terms = RetryTerms(("5xx",), 5, (1000, 3000))
        plans = [plan_retry(request({ATTEMPTS_HEADER: made}, terms=terms), FAILED, now_ms=NOW) for made in range(5)]
        assert plans == [Retry(1000, 1), Retry(3000, 2), Retry(3000, 3), Retry(3000, 4), None]

    def test_code_of_the_outcome_decides(self):
        failed = [Response(Status.ERROR), Response(Status.ERROR, code=503), Response(Status.OK, code=500)]
        again = [*failed, Response(Status.EXPIRED)]
        others = [Response(Status.ERROR, code=400), Response(Status.OK), Response(Status.CANCELLED)]
        attempt = request(terms=RetryTerms(("5xx", "499"), 2, (1000,)))
        assert [one for one in again + others if plan_retry(attempt, one, now_ms=NOW) is not None] == again

    def test_without_terms_or_retries_of_the_pool_or_time_the_outcome_is_the_answer(self):
        assert plan_retry(request(terms=None), FAILED, now_ms=NOW) is None
        assert Retries(None).plan(request(), FAILED, now_ms=NOW) is None
        plans = [plan_retry(request(deadline_ms=NOW + left), FAILED, now_ms=NOW) for left in (999, 1000)]
        assert [plan is not None for plan in plans] == [False, True]

    def test_caller_may_forbid_it_by_code_or_class(self):
        code, of_class = "x-queue-retry-500", "x-queue-retry-5xx"
        forbidding: list[dict[str, object]] = [
            {code: "0"}, {of_class: "0"}, {"X-Queue-Retry-5XX": " 0 "}, {code: 0}, {code: bytearray(b"0")},
            {code: "0", of_class: "1"},
        ]  # fmt: skip
        others: list[dict[str, object]] = [
            {code: "1", of_class: "0"}, {"x-queue-retry-400": "0", "x-queue-retry-4xx": "0"}, {code: "never"},
            {code: False}, {code: None},
        ]  # fmt: skip
        found = [one for one in forbidding + others if plan_retry(request(one), FAILED, now_ms=NOW) is None]
        assert found == forbidding

    def test_value_without_a_meaning_is_warned_of_once(self):
        retries = Retries("p-retry-xchg")
        with capture_logs() as logs:
            for _ in range(3):
                assert retries.plan(request({"x-queue-retry-5xx": "2"}), FAILED, now_ms=NOW) is not None
        assert [entry["header"] for entry in logs] == ["x-queue-retry-5xx"]

    def test_handler_and_caller_learn_the_attempt_where_there_was_more_than_one(self):
        attempts = [Call(Context(Key("k")), request(headers)).attempt for headers in ({}, {ATTEMPTS_HEADER: 2})]
        assert attempts == [1, 3]
        assert with_attempts(request({ATTEMPTS_HEADER: 2}), FAILED).headers == {ATTEMPTS_HEADER: 3}
        assert with_attempts(request(), FAILED).headers == {}


def test_wait_queues_are_distinguished_from_all_others():
    names = PoolNames("p")
    assert names.delay_of_retry_queue(names.retry_queue(1500)) == 1500
    others = ("p-retry-", "p-retry-01", "p-retry-x", "p-req-5", "5", "q-retry-5", names.retry_exchange)
    assert [name for name in others if names.delay_of_retry_queue(name) is not None] == []
