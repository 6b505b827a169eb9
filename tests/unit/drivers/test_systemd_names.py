"""Names, texts and ends of units, and what doctor thinks of a template unit."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from osrdyne.drivers.base import Exit
from osrdyne.drivers.systemd.checks import judge_unit, seconds
from osrdyne.drivers.systemd.names import UnitEnd, UnitNames, environment_text, is_accepted, object_path
from osrdyne.drivers.systemd.options import SystemdOptions
from osrdyne.drivers.systemd.units import refusal
from osrdyne.errors import DriverUnavailableError, StartFailedError
from osrdyne.protocol.names import Key
from osrdyne.testing.keys import ODD_KEYS

NAMES = UnitNames("osrdyne-worker", "blue", "localhost:5672//")
ANY_KEY = st.text(max_size=255).filter(lambda text: len(text.encode()) <= 255).map(Key)


def test_unit_name_of_odd_key_is_one_that_systemd_and_a_glob_take_as_it_is():
    for key in ODD_KEYS.values():
        unit = NAMES.unit(NAMES.instance(key, 3))
        assert re.fullmatch(r"osrdyne-worker@blue-[0-9a-f]{8}-3-[A-Za-z0-9:_]*\.service", unit)
        assert len(unit) <= 190


@given(ANY_KEY, ANY_KEY)
def test_different_keys_have_different_instances(one, other):
    assert (NAMES.instance(one, 0) == NAMES.instance(other, 0)) is (one == other)


@given(ANY_KEY, st.integers(0, 99))
def test_instance_name_leads_back_to_its_key_unless_shortened(key, slot):
    assert NAMES.parse(NAMES.instance(key, slot)) in {(key, slot), None}
    assert len(key.encode()) > 30 or NAMES.parse(NAMES.instance(key, slot)) is not None


def test_instance_of_another_stack_is_not_ours():
    other = UnitNames("osrdyne-worker", "blue", "elsewhere:5672//")
    assert NAMES.parse(other.instance(Key("a"), 0)) is None


def test_values_and_paths_are_escaped_as_systemd_does():
    path = "/org/freedesktop/systemd1/unit/osrdyne_2dworker_40a_3a3D_2eservice"
    assert object_path("osrdyne-worker@a:3D.service") == path
    assert environment_text({"A": 'a "b" $c `d` \\e\nf'}) == 'A="a \\"b\\" \\$c \\`d\\` \\\\e\nf"\n'
    values = ("漢\n\t", "a\0", "\ufffe", "\U0010ffff", "\ufdd0")
    assert [is_accepted(value) for value in values] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (UnitEnd(1, 7, "exit-code"), Exit(code=7)),
        (UnitEnd(1, 0, "success"), Exit(code=0)),
        (UnitEnd(2, 15, "signal"), Exit(signal="SIGTERM")),
        (UnitEnd(2, 9, "oom-kill"), Exit(signal="SIGKILL", reason="out of memory")),
        (UnitEnd(2, 9, "signal"), Exit(signal="SIGKILL", reason="killed from outside")),
        (UnitEnd(3, 11, "core-dump"), Exit(signal="SIGSEGV", reason="core dumped")),
        (UnitEnd(2, 9, "timeout"), Exit(signal="SIGKILL", reason="TimeoutStopSec")),
        (UnitEnd(1, 203, "exit-code"), Exit(reason="203/EXEC")),
        (UnitEnd(0, 0, "resources"), Exit(reason="resources")),
    ],
    ids=lambda value: value.result if isinstance(value, UnitEnd) else "",
)
def test_end_of_a_unit_in_the_words_of_all_drivers(end, expected):
    found = end.to_exit()
    assert (found.code, found.signal) == (expected.code, expected.signal)
    assert (expected.reason is None) == (found.reason is None)
    assert (expected.reason or "") in (found.reason or "")


def test_refusal_of_systemd_names_the_remedy():
    unit = "osrdyne-worker@x.service"
    remedies = {"deploy/systemd": f"Unit {unit} not found.", "daemon-reload": f"Unit {unit} is masked."}
    remedies["polkit"] = "Interactive authentication required."
    for remedy, said in remedies.items():
        raised = refusal(said, unit)
        assert (type(raised), remedy in str(raised)) == (StartFailedError, True)
    assert type(refusal("Transport endpoint is not connected", unit)) is DriverUnavailableError


@pytest.mark.parametrize("options", [{"template": "a@"}, {"environment": {"A-B": "1"}}, {"manager": "root"}])
def test_option_that_systemd_cannot_take_is_refused(options):
    with pytest.raises(ValidationError):
        SystemdOptions.model_validate(options)


FINE = {
    "LoadState": "loaded",
    "EnvironmentFiles": "/run/osrdyne/x.env (ignore_errors=no)",
    "StandardInput": "file",
    "Restart": "no",
    "TimeoutStopUSec": "5min",
}


def judge(stop_grace=60.0, **changes):
    return judge_unit(FINE | changes, template="w@.service", directory=Path("/run/osrdyne"), stop_grace=stop_grace)


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
def test_unit_that_does_not_fit_is_reported_with_its_remedy_and_the_shipped_one_is_fine(changes, remedy, fatal):
    finding = judge(**changes)
    assert (finding.ok, finding.fatal) == (False, fatal)
    assert remedy in (finding.remedy or "")
    assert [judge(grace).ok for grace in (None, 60.0, 300.0)] == [True] * 3


def test_time_span_as_systemctl_shows_it():
    spans = {"5min": 300.0, "1min 30s": 90.0, "1.5s": 1.5, "200ms": 0.2, "1h 2min": 3720.0, "infinity": math.inf}
    assert {text: seconds(text) for text in spans} == pytest.approx(spans)
    assert [seconds(other) for other in ("", "0", "soon", "1.5s x")] == [None] * 4
