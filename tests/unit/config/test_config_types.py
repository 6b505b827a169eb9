"""Durations and sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.config.types import parse_duration, parse_size


def test_durations_and_sizes_are_read():
    durations = {
        "10s": 10, "5m": 300, "5min": 300, "1h30m": 5400, "1h 30m": 5400, "500ms": 0.5, "2d": 172_800, "1.5s": 1.5,
        "2.5": 2.5, " 7 ": 7, 3: 3, 0: 0, 0.25: 0.25, "PT5M": 300, "pt1h30m": 5400, "P1DT1S": 86_401, "PT0.5S": 0.5,
    }  # fmt: skip
    assert {text: parse_duration(text) for text in durations} == pytest.approx(durations)
    sizes = {"16MiB": 16 * 2**20, "60 KiB": 61_440, "1GB": 10**9, "2.5KB": 2500, "1.5KiB": 1536, 7: 7}
    assert {text: parse_size(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    "value",
    ["", " ", "soon", "10 years", "5minutes", "-5s", "s", "1e3s", "P", "PT", "5s5", True, None, [1], -1, float("nan"),
     float("inf"), 10**400, "9" * 400, "9" * 400 + "d", "9" * 20, "9" * 20 + "s", "P" + "9" * 20 + "D"],
)  # fmt: skip
def test_other_values_are_refused_and_the_error_lists_the_accepted_ones(value):
    with pytest.raises(ValueError, match=r"10s|negative"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        *((value, r"[KM]iB|EiB") for value in ("", "big", "16mib", "-1MiB", "1e3", True, None, 1.5, "9" * 400 + "GB")),
        *(("900m", "write 900MiB$"), ("2 G", "write 2GiB$"), ("16mib", "write 16MiB$")),  # as Java writes it
        *(("512Mi", "write 512MiB$"), ("4kb", "write 4KiB$")),  # as Kubernetes does
    ],
)
def test_anything_else_is_refused_as_a_size_with_the_right_form(value, remedy):
    with pytest.raises(ValueError, match=remedy):
        parse_size(value)


@given(st.text() | st.floats() | st.integers() | st.none())
def test_nothing_but_a_value_error_comes_out(value):
    for parse in (parse_duration, parse_size):
        try:
            parsed = parse(value)
        except ValueError:
            continue
        assert isinstance(parsed, int | float)
