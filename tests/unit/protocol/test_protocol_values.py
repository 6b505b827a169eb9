"""Requests, responses, deadlines, activity and control as they are read from the wire: hostile input never raises."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.protocol.activity import (
    EVENT_HEADER,
    WORKER_ID_HEADER,
    ActivityReport,
    Event,
    reloads_of,
    report_from_wire,
)
from osrdyne.protocol.control import Command, ControlMessage, Generation, control_from_wire
from osrdyne.protocol.deadlines import deadline_ms, is_past, parse_expiration_ms, remaining_expiration
from osrdyne.protocol.messages import DETAIL_HEADER, DETAIL_LIMIT, Request, Response, request_from_wire
from osrdyne.protocol.progress import JobProgress, StartProgress, not_starting
from osrdyne.protocol.statuses import CODES, Status, decode_text

NAMES = st.sampled_from(
    ["x-rpc-path", "x-status", "x-code", "x-deadline", "x-retry-after", "x-worker-id", "x-status-detail", "x-event",
     "x-no-activate", "x-non-terminating-response", "x-delivery-count", "accept", "x-death"]
)  # fmt: skip
SCALARS = (  # what a header table can hold
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats() | st.decimals() | st.text()
    | st.binary() | st.binary().map(bytearray) | st.datetimes(timezones=st.just(UTC))
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
HEADERS = st.dictionaries(NAMES | st.text(), VALUES, max_size=6)
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
MOMENT_MS = int(MOMENT.timestamp() * 1000)


class TestHostileMessages:
    @given(HEADERS, SCALARS, st.none() | st.datetimes(timezones=st.just(UTC)), st.text())
    def test_request_with_any_headers_is_read(self, headers, expiration, timestamp, key):
        request = request_from_wire(
            key=key, body=b"", headers=headers, correlation_id=None, reply_to="", content_type=None,
            content_encoding=None, expiration=expiration, timestamp=timestamp, redelivered=False, now_ms=MOMENT_MS,
        )  # fmt: skip
        assert request.reply_to is None
        assert isinstance(request.path, str)
        assert isinstance(request.accept, str | None)
        assert isinstance(request.delivery_count, int)
        assert request.no_activate in {True, False}

    @pytest.mark.proves("hostile/client-forges-its-death")
    @pytest.mark.parametrize(
        ("redelivered", "counted", "failed", "count"),
        [(False, 99, None, 0), (True, 2, None, 2), (True, 1, -5, 1), (True, -1, 3, 3), (False, None, 3, 3)],
    )
    def test_count_is_that_of_rabbitmq_and_a_negative_one_hides_nothing(self, redelivered, counted, failed, count):
        headers = {"x-delivery-count": counted, "x-osrdyne-failed-deliveries": failed}
        assert Request("k", b"", headers=headers, redelivered=redelivered).delivery_count == count

    @given(HEADERS)
    def test_response_with_any_headers_is_read(self, headers):
        response = Response.from_wire(headers=headers, body=b"", content_type=None)
        assert isinstance(response.status, str)
        assert response.code is None or type(response.code) is int

    @given(HEADERS, st.binary(), st.text())
    def test_report_with_any_content_is_read_or_none(self, headers, body, key):
        report = report_from_wire(routing_key=key, headers=headers, body=body)
        assert report is None or report.key == key

    @given(st.binary())
    def test_any_bytes_are_a_control_message_or_none(self, body):
        message = control_from_wire(body)  # hypothesis tries constants of the source, among them messages
        assert message is None or control_from_wire(message.wire_body()) == message

    @pytest.mark.parametrize("body", [b"[" * 100_000, b"1" * 10_000, b"\xff\xfe", b'{"command": ["pause"]}'])
    def test_body_that_breaks_parsers_is_none(self, body):
        assert control_from_wire(body) is None
        headers = {EVENT_HEADER: "busy", WORKER_ID_HEADER: "w"}
        report = report_from_wire(routing_key="k", headers=headers, body=body)
        assert report is not None
        assert report.event is Event.BUSY


class TestResponse:
    @given(
        st.sampled_from(list(Status)), st.none() | st.integers(100, 599), st.none() | st.text(),
        st.none() | st.floats(0, 1e6), st.booleans(),
    )  # fmt: skip
    def test_what_was_sent_is_what_is_read(self, status, code, detail, retry_after, progress):
        sent = Response(status, code=code, detail=detail, retry_after=retry_after, progress=progress, worker_id="w")
        read = Response.from_wire(headers=sent.wire_headers(), body=b"", content_type=None)
        assert (read.status, read.detail, read.retry_after, read.progress) == (status, detail, retry_after, progress)
        assert read.code == (CODES[status] if code is None else code)

    @given(st.sampled_from(list(Status)), st.booleans())
    def test_reference_statuses_are_ok_or_core_error_and_lose_nothing(self, status, forged):
        """They are byte arrays, because the reference client reads nothing else."""
        sent = Response(status, headers={"x-osrdyne-status": "forged"} if forged else {})
        headers = sent.wire_headers(reference_statuses=True)
        assert headers["x-status"] == bytearray(b"ok" if status == Status.OK else b"core_error")
        for wire in (headers, sent.wire_headers()):
            assert type(wire["x-status"]) is bytearray
            assert Response.from_wire(headers=wire, body=b"", content_type=None).status == status

    def test_status_of_another_version_is_kept_and_text_is_read_from_bytes(self):
        for status in ("core_error", "of-a-later-version"):
            headers = {"x-status": bytearray(status, "utf-8")}
            assert Response.from_wire(headers=headers, body=b"", content_type=None).status == status
        assert Response.from_wire(headers={}, body=b"", content_type=None).status == "ok"
        assert "x-code" not in Response("of-a-later-version").wire_headers()
        texts = [decode_text(value) for value in ("a", b"a", bytearray(b"\xff"), 1, None)]
        assert texts == ["a", "a", "\ufffd", None, None]


class TestDeadline:
    def of(self, *, expiration: object = None, timestamp: datetime | None = None, header: object = None) -> int | None:
        headers = {"x-deadline": header}
        return deadline_ms(headers=headers, expiration=expiration, timestamp=timestamp, first_seen_ms=MOMENT_MS + 50)

    @pytest.mark.parametrize(
        ("expiration", "timestamp", "header", "deadline"),
        [
            (None, MOMENT, None, None),
            ("100", MOMENT, 200, 100),
            (300, MOMENT, 200, 200),
            ("100", None, None, 150),
            ("100", None, 900, 900),
            ("9" * 255, MOMENT, None, None),
        ],
        ids=["none", "expiration", "header", "from first sight", "header known", "beyond all time"],
    )
    def test_earlier_of_header_and_expiration_counts(self, expiration, timestamp, header, deadline):
        given = None if header is None else MOMENT_MS + header
        found = self.of(expiration=expiration, timestamp=timestamp, header=given)
        assert found == (None if deadline is None else MOMENT_MS + deadline)

    def test_what_makes_no_sense_counts_as_absent(self):
        headers = (True, -1, 10**18, float("nan"), float("inf"), "5", None, [1], b"5")
        assert [value for value in headers if self.of(header=value) is not None] == []
        expirations = ("", "-1", "1.5", "²", "٣", " 1", "1e3", True, -1, 2.0, None, b"1")
        assert [value for value in expirations if parse_expiration_ms(value) is not None] == []

    @pytest.mark.parametrize(
        ("clock", "expiration", "timestamp", "forwarded", "deadline"),
        [
            (0, None, None, False, 8_000),
            (0, "3000", MOMENT, False, 3_050),
            (-4_000, "3000", MOMENT - timedelta(seconds=4), False, 3_050),
            (-9_000, "3000", MOMENT - timedelta(seconds=9), False, -1_000),
            (9_000, "3000", MOMENT + timedelta(seconds=9), False, 3_050),
            (0, "3000", None, False, 8_000),
            (0, "3000", MOMENT - timedelta(days=1), True, 3_050),
        ],
        ids=["no lifetime", "agree", "behind", "too far behind", "ahead", "limit of the queue", "forwarded"],
    )
    def test_skew_extends_no_lifetime(self, clock, expiration, timestamp, forwarded, deadline):
        """A caller with a time-out of 3 s, whose clock differs."""
        found = deadline_ms(
            headers={"x-deadline": MOMENT_MS + clock + 3_000},
            expiration=expiration,
            timestamp=timestamp,
            first_seen_ms=MOMENT_MS + 50,
            forwarded=forwarded,
            skew_ms=5_000,
        )
        assert found == MOMENT_MS + deadline

    def test_rest_of_the_deadline_goes_to_the_next_hop_until_it_has_passed(self):
        passed = [is_past(deadline, now_ms=1_000) for deadline in (999, 1_000, None)]
        assert passed == [True, False, False]
        left = [remaining_expiration(deadline, now_ms=1_000) for deadline in (None, 1_500, 1_000, 1)]
        assert left == [None, "500", "0", "0"]


class TestActivity:
    @given(st.sampled_from(list(Event)), st.dictionaries(st.text(), st.integers() | st.text(), max_size=3))
    def test_what_was_sent_is_what_is_read(self, event, details):
        sent = ActivityReport("key", event, "w1", details, {"x-path": "/sql"})
        read = report_from_wire(routing_key="key", headers=sent.wire_headers(), body=sent.wire_body())
        assert read == sent

    def test_report_of_the_reference_worker_is_read(self):
        headers = {EVENT_HEADER: b"request-received", WORKER_ID_HEADER: b"w1"}
        assert report_from_wire(routing_key="key", headers=headers, body=b"") == ActivityReport(
            "key", Event.REQUEST_RECEIVED, "w1"
        )


class TestControl:
    @given(st.sampled_from(list(Command)), st.integers(0), st.integers(0))
    def test_what_was_sent_is_what_is_read(self, command, term, counter):
        sent = ControlMessage(command, Generation(term, counter), {"correlation_id": "c", "queues": ["q"]})
        assert control_from_wire(sent.wire_body()) == sent

    def test_message_without_a_generation_is_none(self):
        for generation in (None, [], [1], [1, 2, 3], ["1", 2], {"term": 1}, 7):
            assert control_from_wire(json.dumps({"command": "pause", "generation": generation}).encode()) is None


def test_detail_on_the_wire_is_short_and_utf8():
    detail = Response(detail="\ud800" + "x" * 200_000).wire_headers()[DETAIL_HEADER]
    assert isinstance(detail, str)
    assert (len(detail.encode()), detail[0], detail[-1]) == (DETAIL_LIMIT + 2, "?", "…")


def test_invalid_outcomes_of_reloads_are_left_out():
    good = {"a": None, "b": "no data"}
    odd = {"a": None, "b": 7, "x" * 65: None}
    many = {str(number): None for number in range(5)}
    found = [reloads_of(ActivityReport("k", Event.READY, "w", {"reloads": one})) for one in (good, odd, many, [], None)]
    assert found == [good, {"a": None}, {}, {}, {}]


def test_start_reads_back_as_it_was_written():
    start = StartProgress(3, 12.25, "max_concurrent_starts")
    assert json.loads(start.to_json()) == {
        "state": "starting", "position": 3, "eta_s": 12.2, "waiting_for": "max_concurrent_starts",
    }  # fmt: skip
    assert StartProgress.from_json(start.to_json()) == StartProgress(3, 12.2, "max_concurrent_starts")
    unknown = StartProgress(0)
    assert StartProgress.from_json(unknown.to_json()) == unknown
    others = [not_starting(), b"", b"\xff", b"[1]", b"null", b"[" * 100_000, b'{"state": "starting"}']
    others += [b'{"state": "starting", "position": %s}' % position for position in (b"true", b"-1", b'"1"')]
    assert [body for body in others if StartProgress.from_json(body) is not None] == []


def test_progress_of_jobs_survives_the_wire_and_invalid_numbers_are_zero():
    jobs = JobProgress(1, 1, 2, 3, 8, 1000)
    assert JobProgress.from_json(jobs.to_json()) == jobs
    for body in (b"", b"[1]", b"{", b'{"jobs": "1", "rows": true, "tasks_done": 1.5, "more": 1}', b"[" * 100_000):
        assert JobProgress.from_json(body) == JobProgress()
