"""Check the rows of a long table in one test: a report and a set-up for each would cost more than the checks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def failures(cases: Sequence[Case], check: Callable[[Case], object]) -> dict[str, str]:
    """Call `check` with each case; for each that fails the reason, so that a report has all of them.

    Raises ValueError if there are no cases: such a test could not fail.
    """
    if not cases:
        raise ValueError("the table has no cases")
    found = {}
    for case in cases:
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:  # `pytest.raises` fails with the second
            found[repr(case)] = f"{type(error).__name__}: {error}"
    return found
