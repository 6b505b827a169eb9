"""The check of a table of cases."""

from __future__ import annotations

import pytest
from case_tables import failures


def test_every_case_that_fails_is_reported() -> None:
    def check(case: int) -> None:
        assert case
        if case == 1:
            with pytest.raises(ValueError):
                pass

    assert list(failures([0, 1, 2], check)) == ["0", "1"]
    with pytest.raises(ValueError):
        failures([], check)
