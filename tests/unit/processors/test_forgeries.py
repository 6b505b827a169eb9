"""What is not believed: names of the pool's own as reply addresses, messages that came another way."""

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from osrdyne.broker.topology.declarations import Exchange, Queue, pool_topology
from osrdyne.metrics import Metrics
from osrdyne.processors.forgeries import LOG_INTERVAL, Forgeries
from osrdyne.protocol.messages import Request, Response
from osrdyne.protocol.names import PRIORITIES, Key, PoolNames, ReplyAddresses, WorkerId
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.fakes.context import make_context

NAMES = PoolNames("pool")
DIRECT = ("amq.rabbitmq.reply-to", "amq.rabbitmq.reply-to.g1h2AA==.bm93aGVyZQ==")


@given(st.text(max_size=200))
def test_no_answer_goes_to_a_name_of_the_pools_own(text):
    declared = [item.name for item in pool_topology("pool").declarations if isinstance(item, Exchange | Queue)]
    names = [
        *declared, *NAMES.register_queues(1), *NAMES.register_queues(2), NAMES.retry_exchange, NAMES.retried_exchange,
        NAMES.retry_queue(5000), NAMES.control_queue(WorkerId("w")), f"pool-req-{text}", f"pool-ctl-{text}",
    ]  # fmt: skip
    for priority in (None, *PRIORITIES):
        names += [NAMES.work_exchange(priority), NAMES.request_queue(Key("a+b"), priority)]
    assert len(names) > 30
    assert [name for name in names if not NAMES.owns(name)] == []
    assert [name for name in names if ReplyAddresses(NAMES).refuse(name) is None] == []
    assert [name for name in names if ReplyAddresses(NAMES, (name,)).refuse(name) is None] == []


def test_other_queues_may_be_answered_into_unless_they_are_restricted_to_prefixes():
    others = (
        "",
        "replies",
        "pool-replies",
        "pool2-orphan",
        "xpool-orphan",
        "pool",
        "pool-",
        "pool-orphans",
        "pool-dl.1",
    )
    assert [name for name in others if ReplyAddresses(NAMES).refuse(name) is not None] == []
    addresses = ReplyAddresses(NAMES, ("replies.", "answers-"))
    allowed = [name for name in ("replies.1", "answers-1", "replies", "x", "") if addresses.refuse(name) is None]
    assert allowed == ["replies.1", "answers-1"]
    assert ReplyAddresses(NAMES, ()).refuse("replies.1") is not None
    for prefixes in (None, (), ("replies.",)):
        refused = [ReplyAddresses(NAMES, prefixes).refuse(address) for address in (None, *DIRECT)]
        assert refused == [None, None, None]


def test_answer_has_no_header_that_routes_it():
    headers = Response(headers={"CC": ["pool-leader"], "BCC": ["pool-dl"], "x-own": "1"}).wire_headers()
    assert headers.keys() & {"CC", "BCC", "x-own"} == {"x-own"}


async def test_forged_messages_are_all_counted_and_logged_at_a_bounded_rate():
    clock, metrics = VirtualClock(), Metrics()
    forgeries = Forgeries(make_context(pool="pool", clock=clock, metrics=metrics))
    with capture_logs() as logs:
        for _ in range(100):
            forgeries.count("dead-letters", size_bytes=1)
        await clock.advance(LOG_INTERVAL)
        forgeries.count("dead-letters", size_bytes=1)
    assert [entry["messages"] for entry in logs] == [1, 100]
    assert metrics.registry.get_sample_value("osrdyne_forged_messages_total", {"queue": "dead-letters"}) == 101.0


async def test_refused_reply_address_is_logged_once_for_each_key():
    metrics = Metrics()
    forgeries = Forgeries(make_context(pool="pool", metrics=metrics))
    with capture_logs() as logs:
        for key in ("a", "b", "a", "a"):
            assert forgeries.refuses_reply_to(Request(key, b"", reply_to="pool-leader"), component="orphans")
    assert [entry["key"] for entry in logs] == ["a", "b"]
    assert metrics.registry.get_sample_value("osrdyne_forged_reply_to_total", {"component": "orphans"}) == 4.0
