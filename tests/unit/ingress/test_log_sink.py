"""Routes whose sink is the log of telemetry: their text, what they make of a request, and how that is explained."""

import json

import pytest

from osrdyne.ingress.acceptance import Limiter, TtlLimits, accept
from osrdyne.ingress.documents.problems import InvalidDocumentError
from osrdyne.ingress.explain import Explanation, explain
from osrdyne.ingress.requests import Arrival, sample_arrival
from osrdyne.ingress.routes.manifest import load_manifest
from osrdyne.ingress.routes.table import RouteTable
from osrdyne.ingress.splitter.rules import Split, split_arrival
from osrdyne.ingress.telemetry import Log
from osrdyne.protocol.names import PoolNames

LOG = 'FROM /messages/* INTO BrokeredEndpoint("/streams/plant/inputs/log")'
HOT = "FROM /messages/* INTO $upstream"
LIMITS = TtlLimits(600.0, 86400.0)
NOW = 1_700_000_000


def table(**routes: object) -> RouteTable:
    return RouteTable(load_manifest(json.dumps({"routes": routes})))


def arrival(key: str = "a") -> Arrival:
    return sample_arrival(key, "/x", headers={}, body=None, app_id=None, timeout=None, now=NOW)


def explained(of_pool: Log, **routes: object) -> Explanation:
    return explain(arrival(), table(**routes), splitter=None, names=PoolNames("p"), limits=LIMITS, log=of_pool)


def test_sink_of_a_stream_is_the_log_of_its_name():
    for text in (LOG, LOG.replace("streams", "Streams").replace("/log", "/LOG")):
        [route] = table(log=text).manifest.routes
        assert (route.statement.endpoint.log, route.statement.endpoint.key) == ("plant", None)
    for sink in ("/streams/plant/inputs/other", "/streams/pl ant/inputs/log", "/streams//inputs/log"):
        with pytest.raises(InvalidDocumentError, match=r"telemetry\.name"):
            table(log=f'FROM /messages/* INTO BrokeredEndpoint("{sink}")')


def test_log_keeps_the_key_of_the_client_and_waits_for_as_long_as_pool_and_route_allow():
    split = split_arrival(arrival("device"), Split("device-2", rule="r"))
    hot, log = accept(split, table(hot=HOT, log=LOG), limits=LIMITS)
    assert (hot.key, hot.log, hot.keeps_reply) == ("device-2", None, True)
    assert (log.key, log.log, log.keeps_reply) == ("device", "plant", False)
    assert (hot.deadline.limiter, log.deadline.limiter) == (Limiter.POOL, Limiter.POOL_MAXIMUM)
    assert (hot.deadline.at_ms, log.deadline.at_ms) == ((NOW + 600) * 1000, (NOW + 86400) * 1000)
    high = {"route": LOG, "priority": 1, "timeToLiveSecs": 60}
    [log] = accept(arrival(), table(low=LOG, high=high), limits=LIMITS)  # two routes to the log make one message
    assert (log.route, log.deadline.at_ms, log.deadline.limiter) == ("high", (NOW + 60) * 1000, Limiter.ROUTE)


def test_explanation_names_partition_and_stream():
    explanation = explained(Log("plant", 4), hot=HOT, log=LOG)
    assert [(one.queue, one.exchange, one.log, one.partition) for one in explanation.deliveries] == [
        ("p-req-a", "p-work-xchg", None, None),
        ("p-log-3", "", "plant", 3),
    ]
    [alone] = [step.text for step in explained(Log("plant", 4), log=LOG).steps if step.name == "log"]
    assert "p-log-3" in alone and "202" in alone


@pytest.mark.parametrize("log", [Log(), Log("other", 4), Log("plant", 0)], ids=["none", "another", "not a stream"])
def test_explanation_names_the_refusal_of_the_log(log):
    assert explained(log, log=LOG).refused == "rejected"
    copies = explained(log, hot=HOT, log=LOG)
    assert (copies.refused, len(copies.deliveries)) == (None, 1)
