"""The body of the answer to an inquiry about a key that starts."""

from __future__ import annotations

import json

import pytest

from osrdyne.protocol.progress import StartProgress, not_starting


def test_answer_reads_back_as_it_was_written() -> None:
    start = StartProgress(3, 12.25, "max_concurrent_starts")
    assert json.loads(start.to_json()) == {
        "state": "starting", "position": 3, "eta_s": 12.2, "waiting_for": "max_concurrent_starts",
    }  # fmt: skip
    assert StartProgress.from_json(start.to_json()) == StartProgress(3, 12.2, "max_concurrent_starts")
    unknown = StartProgress(0)
    assert StartProgress.from_json(unknown.to_json()) == unknown


@pytest.mark.parametrize(
    "body",
    [
        not_starting(), b"", b"\xff", b"[1]", b"null", b"[" * 100_000, b'{"state": "starting"}',
        b'{"state": "starting", "position": true}', b'{"state": "starting", "position": -1}',
        b'{"state": "starting", "position": "1"}',
    ],
)  # fmt: skip
def test_other_body_is_no_start(body: bytes) -> None:
    assert StartProgress.from_json(body) is None
