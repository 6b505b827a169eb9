"""One sentence for the end of a term, however many parts of the daemon noticed it."""

from __future__ import annotations

from osrdyne.daemon.daemon import main_reason
from osrdyne.errors import BrokerUnavailableError, LeadershipLostError


def test_lost_token_says_more_than_the_consumers_that_ended_with_it() -> None:
    lost = LeadershipLostError("The channel of the leader token was closed: shutdown.")
    assert main_reason([BrokerUnavailableError("a consumer"), lost, BrokerUnavailableError("another")]) is lost


def test_first_of_equal_reasons_is_reported() -> None:
    first = BrokerUnavailableError("no connection")
    assert main_reason([first, BrokerUnavailableError("another")]) is first


def test_unexpected_error_is_not_a_sentence() -> None:
    assert main_reason([ZeroDivisionError()]) is None
