"""Records of changes as text, their selection, and what the table of endpoints says about them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.auth.audit import (
    MAX_TARGET,
    AuditQuery,
    AuditRecord,
    Outcome,
    author_of,
    outcome_of,
    page_of,
    parse_cursor,
    parse_record,
    target_of,
)
from osrdyne.auth.endpoints import ENDPOINTS, find_endpoint
from osrdyne.auth.grants import Grant

BEGUN = AuditRecord(request_id="0" * 32, at_ms=1_000_000, principal="alice", method="token", action="groups.stop")
texts = st.none() | st.text(max_size=20)
records = st.builds(
    AuditRecord,
    request_id=st.text(alphabet="0123456789abcdef", min_size=32, max_size=32),
    at_ms=st.integers(0, 10),
    principal=st.sampled_from(["alice", "bob", "ä\udc80"]),
    method=st.just("token"),
    action=st.sampled_from(["routes.put", "routes.rollback", "groups.stop"]),
    target=texts,
    author=texts,
    status=st.none() | st.integers(200, 599),
    outcome=st.sampled_from(Outcome),
)


@given(records)
def test_record_is_read_as_it_was_written(record):
    assert parse_record(record.to_text().encode()) == record
    of_a_later_version = {**json.loads(record.to_text()), "more": 1}
    assert parse_record(json.dumps(of_a_later_version).encode()) == record


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b"null", b'{"request_id": 5}',
        json.dumps({"request_id": "a", "at_ms": "now", "principal": "a", "method": "", "action": ""}).encode(),
        json.dumps({"request_id": None, "at_ms": 1, "principal": "a", "method": "", "action": ""}).encode(),
        json.dumps({"at_ms": 1, "principal": "a", "method": "token", "action": "a", "outcome": "done"}).encode(),
    ],
)  # fmt: skip
def test_other_texts_are_no_records(text):
    assert parse_record(text) is None


@given(st.lists(records, max_size=12, unique_by=lambda record: record.request_id), st.integers(1, 4))
def test_pages_have_every_record_once_and_the_newest_first(found, limit):
    shown: list[AuditRecord] = []
    query = AuditQuery(limit=limit)
    while True:
        page = page_of(found, query)
        assert page.total == len(found)
        shown += page.records
        if page.following is None:
            break
        query = replace(query, before=parse_cursor(page.following))
    assert shown == sorted(found, key=lambda record: record.place, reverse=True)
    done = replace(BEGUN, outcome=Outcome.DONE, status=200)  # it replaces the record of the beginning in each order
    assert page_of([BEGUN, done], AuditQuery()).records == page_of([done, BEGUN], AuditQuery()).records == (done,)


def test_target_has_what_is_changed_and_nothing_else_of_the_query_and_is_bounded():
    assert target_of(["a%2Fb"], "author=alice&token=secret", ()) == "a/b"
    assert target_of([], "key=a+b%20c&key=%ff&id=1", ["key"]) == "a b c, \\xff"
    assert target_of([], "id=e1&%69d=e2&version=3", ["id"]) == "id e1, id e2"  # the endpoint reads both
    assert target_of([], "author=alice&id=1", ()) is None
    ids = [f"{number:032x}" for number in range(100)]
    shown = target_of([], "key=padding&id=" + "&id=".join(ids), ["id"]) or ""
    assert [one for one in ids if one not in shown] == []
    assert (target_of([], f"id={'x' * 50_000}&id=e1", ["id"]) or "").endswith(", id e1")
    assert len(target_of([], "&".join(["id=" + "x" * 500] * 200), ["id"]) or "") == MAX_TARGET
    authors = [author_of(query) for query in ("author=a&author=b", "%61uthor=a+b", "other=a")]
    assert authors == ["b", "a b", None]


def test_actions_are_named_after_the_endpoint_and_the_outcome_follows_the_status():
    actions = {
        "POST /v1/groups/a/stop": "groups.stop", "POST /v1/group/stop": "groups.stop", "PUT /v1/routes": "routes.put",
        "DELETE /v1/circuits/config": "circuits.config.delete", "POST /v1/queues": "queues.create",
        "PUT /v1/queue": "queues.put",
    }  # fmt: skip
    assert {endpoint: find_endpoint(*endpoint.split())[0].action for endpoint in actions} == actions
    outcomes = [outcome_of(status) for status in (200, 202, 404, 421, 500, 503)]
    assert outcomes == [Outcome.DONE] * 2 + [Outcome.REFUSED] * 2 + [Outcome.FAILED] * 2


def test_every_endpoint_that_is_not_a_question_is_a_change():
    """A new endpoint with another method than GET is audited, unless it needs no more than `view`."""
    questions = {one.path for one in ENDPOINTS if one.method != "GET" and not one.is_change}
    assert questions == {"/v1/explain", "/v1/capacity"}
    assert {one.grant for one in ENDPOINTS if one.is_change} == {Grant.OPERATE, Grant.ADMIN}
