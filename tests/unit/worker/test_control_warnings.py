"""A worker without a control exchange, as under the reference's daemon: one warning in its life."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from osrdyne.errors import BrokerError, BrokerNotFoundError, BrokerUnavailableError
from osrdyne_worker.runtime.control import ControlWarnings


def warnings_of(errors: list[tuple[BrokerError, bool]]) -> list[str]:
    trouble = ControlWarnings()
    with capture_logs() as logs:
        for error, first in errors:
            trouble.note(error, exchange="p-ctl-xchg", first=first)
    return [entry["event"] for entry in logs if entry["log_level"] == "warning"]


MISSING = BrokerNotFoundError("Could not bind: no exchange 'p-ctl-xchg'")
REFUSED = BrokerUnavailableError("the queue is locked")
NO_EXCHANGE = "control exchange missing"
NOT_YET = "control queue unavailable"


@pytest.mark.parametrize(
    ("errors", "warned"),
    [
        pytest.param([(MISSING, True), (MISSING, False)] * 5, [NO_EXCHANGE], id="missing-on-every-connection"),
        pytest.param([(REFUSED, True), (REFUSED, False)] * 2, [NOT_YET] * 2, id="locked-on-every-connection"),
        pytest.param([(REFUSED, True), (MISSING, False)], [NOT_YET, NO_EXCHANGE], id="both"),
        pytest.param([(MISSING, True), (REFUSED, True)], [NO_EXCHANGE, NOT_YET], id="another-trouble-later"),
    ],
)
def test_missing_control_exchange_is_one_warning_in_the_life_of_a_worker(errors, warned):
    assert warnings_of(errors) == warned
