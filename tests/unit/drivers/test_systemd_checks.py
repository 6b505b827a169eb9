"""What doctor thinks of a template unit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from osrdyne.drivers.systemd.checks import judge_unit, seconds

FINE = {
    "LoadState": "loaded",
    "EnvironmentFiles": "/run/osrdyne/x.env (ignore_errors=no)",
    "StandardInput": "file",
    "Restart": "no",
    "TimeoutStopUSec": "5min",
}


def judge(stop_grace=60.0, **changes):
    return judge_unit(FINE | changes, template="w@.service", directory=Path("/run/osrdyne"), stop_grace=stop_grace)


@pytest.mark.parametrize("grace", [None, 60.0, 300.0])
def test_unit_as_it_is_shipped_is_fine(grace):
    assert judge(grace).ok


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        pytest.param({"LoadState": "not-found"}, "w@.service is not-found.", "deploy/systemd", id="missing"),
        pytest.param({"EnvironmentFiles": ""}, "reads no file", "EnvironmentFile=/run/osrdyne/%i.env", id="files"),
        pytest.param({"StandardInput": "null"}, "standard input", "StandardInput=file:/run/osrdyne/%i.uri", id="input"),
        pytest.param({"Restart": "always"}, "restarts by itself", "Restart=no", id="restart"),
        pytest.param({"TimeoutStopUSec": "59s"}, "worker.stop_grace is 60 s", "TimeoutStopSec=60 or more", id="grace"),
    ],
)
def test_unit_that_does_not_fit_is_reported_with_its_remedy(changes, message, remedy):
    finding = judge(**changes)
    assert not finding.ok
    assert message in finding.message
    assert remedy in (finding.remedy or "")


def test_shorter_limit_of_the_unit_is_not_a_reason_to_refuse():
    assert not judge(TimeoutStopUSec="1s").fatal


SPANS = {"5min": 300.0, "1min 30s": 90.0, "1.5s": 1.5, "200ms": 0.2, "1h 2min": 3720.0, "infinity": math.inf}


@pytest.mark.parametrize(("text", "expected"), SPANS.items(), ids=SPANS.keys())
def test_time_span_as_systemctl_shows_it(text, expected):
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "0", "soon", "5 min x"])
def test_what_is_not_a_time_span_is_not_compared(text):
    assert seconds(text) is None
