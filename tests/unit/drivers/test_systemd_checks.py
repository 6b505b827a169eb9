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
    ("changes", "remedy", "fatal"),
    [
        ({"LoadState": "not-found"}, "deploy/systemd", True),
        ({"EnvironmentFiles": ""}, "EnvironmentFile=/run/osrdyne/%i.env", True),
        ({"StandardInput": "null"}, "StandardInput=file:/run/osrdyne/%i.uri", True),
        ({"Restart": "always"}, "Restart=no", True),
        ({"TimeoutStopUSec": "59s"}, "TimeoutStopSec=60", False),
    ],
    ids=["missing", "files", "input", "restart", "grace"],
)
def test_unit_that_does_not_fit_is_reported_with_its_remedy(changes, remedy, fatal):
    finding = judge(**changes)
    assert (finding.ok, finding.fatal) == (False, fatal)
    assert remedy in (finding.remedy or "")


SPANS = {"5min": 300.0, "1min 30s": 90.0, "1.5s": 1.5, "200ms": 0.2, "1h 2min": 3720.0, "infinity": math.inf}


@pytest.mark.parametrize(("text", "expected"), SPANS.items(), ids=SPANS.keys())
def test_time_span_as_systemctl_shows_it(text, expected):
    assert seconds(text) == pytest.approx(expected)
    assert [seconds(other) for other in ("", "0", "soon", f"{text} x")] == [None] * 4
