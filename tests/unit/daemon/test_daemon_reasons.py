"""One sentence for the end of a term, however many parts of the daemon noticed it."""

from osrdyne.daemon.daemon import main_reason
from osrdyne.errors import BrokerUnavailableError, LeadershipLostError


def test_lost_token_says_more_than_the_consumers_that_ended_with_it():
    lost, consumer = LeadershipLostError("shutdown"), BrokerUnavailableError("a consumer")
    another = BrokerUnavailableError("another")
    assert main_reason([consumer, lost, another]) is lost
    assert main_reason([consumer, another]) is consumer
    assert main_reason([ZeroDivisionError()]) is None
