"""Versions of RabbitMQ, and what `doctor` makes of the facts about one."""

from dataclasses import replace

import pytest

from osrdyne.amqp.version import BrokerVersion
from osrdyne.broker.doctor import checks
from osrdyne.broker.management.models import NodeStatus, Permissions, Whoami, read_history, read_totals
from osrdyne.broker.queues.retry_queues import retry_queue_arguments
from osrdyne.config.models import RequestSettings, Settings, WorkerSettings
from osrdyne.protocol.names import PoolNames

NODE = NodeStatus("rabbit@a", True, False, False, 100, 1000, 10_000, 50, 40, 1000)


def version(text: str) -> BrokerVersion:
    return BrokerVersion.parse(text)


@pytest.mark.parametrize(
    ("text", "processing", "configured", "ok"),
    [
        ("3.10.8", 1800, None, True),
        ("3.10.8", 1801, None, False),
        ("3.11.28", 7200, 3600, False),
        ("3.11.28", 7200, 7500, True),
        ("3.12.0", 7200, None, True),
        ("4.3.6", 7200, 3600, False),
    ],
)
def test_longer_work_than_the_consumer_timeout_is_refused(text, processing, configured, ok):
    settings = Settings(
        worker=WorkerSettings(processing_timeout=processing), requests=RequestSettings(consumer_timeout=configured)
    )
    finding = checks.check_consumer_timeout(settings, version(text))
    assert finding.ok is ok
    assert ok or "consumer_timeout" in (finding.remedy or "")


@pytest.mark.parametrize(("text", "concurrency"), [("4.3.0", 5), ("4.3.0", 6), ("3.10.8", 6)])
def test_wait_for_the_rate_that_may_exceed_the_consumer_timeout_has_a_remedy(text, concurrency):
    finding = checks.check_consumer_timeout(Settings(worker=WorkerSettings(concurrency=concurrency)), version(text))
    assert finding.ok
    assert ("requests.consumer_timeout to 2160 s" in finding.message) is (concurrency > 5)
    assert ("of rabbitmq.conf" in finding.message) is (text == "3.10.8")


def test_tags_decide_what_the_user_may():
    found = []
    for tags in ("administrator", "policymaker monitoring", "policymaker", "monitoring", ""):
        [finding] = checks.check_tags(Whoami("u", frozenset(tags.split())))
        found.append((finding.ok, finding.fatal))
    assert found == [(True, True), (True, True), (False, False), (False, True), (False, True)]


@pytest.mark.parametrize(
    ("configure", "write", "read", "missing"),
    [
        (".*", ".*", ".*", None),
        ("(*ERLANG", "(*ERLANG", "(*ERLANG", None),
        ("^p-", r"^(p-.*|amq\.default)$", "^p-", None),
        ("^p-", "^p-", "^p-", "write amq.default"),
        (".*", ".*", "^p-(orphan|dl)", "read p-"),
        ("", "", "", "configure p-"),
    ],
    ids=["all", "not understood here", "what is needed", "no replies", "some queues", "none"],
)
def test_permissions_are_matched_as_rabbitmq_does_and_the_first_missing_one_is_named(configure, write, read, missing):
    finding = checks.check_permissions(Permissions(configure, write, read), pool="p", user="u ser", vhost="v")
    remedy = "set_permissions -p v 'u ser' '^p-' '^(p-.*|amq\\.default)$' '^p-'"
    assert finding.ok is (missing is None)
    assert not checks.check_permissions(None, pool="p", user="u", vhost="v").ok
    assert missing is None or (missing in finding.message and remedy in (finding.remedy or ""))


def test_clocks_may_differ_a_little():
    found = [checks.check_clock(offset, allowed=5.0) for offset in (None, 0.4, -5.9, 6.1, -3600)]
    assert [finding.ok for finding in found] == [True, True, True, False, False]
    assert not found[-1].fatal


@pytest.mark.parametrize(
    ("node", "subject", "fatal"),
    [
        (NODE, None, False),
        (replace(NODE, files_used=None, files_limit=None), None, False),
        (replace(NODE, memory_alarm=True), "alarms", True),
        (replace(NODE, disk_alarm=True), "alarms", True),
        (replace(NODE, running=False), "nodes", False),
        (replace(NODE, files_used=900), "file descriptors", False),
    ],
    ids=["healthy", "silent", "memory", "disk", "down", "files"],
)
def test_what_is_wrong_with_a_node_is_found(node, subject, fatal):
    [finding] = checks.check_nodes([NODE, node])
    assert finding.ok is (subject is None)
    assert finding.ok or (finding.subject, finding.fatal) == (subject, fatal)


def test_missing_feature_flag_is_found_unless_it_is_optional():
    assert [checks.check_feature_flags([flag]).ok for flag in ("user_limits", "stream_queue")] == [True, False]


@pytest.mark.parametrize(
    ("lengths", "redelivered", "consumers", "ok"),
    [
        ([32, 32, 32, 32], [0, 32, 64, 96], 0, False),
        ([32, 32, 32, 32], [0, 32, 64, 64], 1, True),
        ([0, 20, 32, 0], [0, 32, 64, 96], 1, True),
        ([0, 20, 60, 60, 90, 130], [0, 0, 0, 0], 1, False),
        ([0, 20, 60, 60, 90, 130], [0, 0, 0, 0], 0, True),
        ([20, 60, 50, 90, 130, 150], [0, 0, 0, 0], 1, True),
        ([0, 0, 900, 900], [0, 0, 900, 900], 1, True),
        ([], [], 1, True),
    ],
    ids=[
        "returns",
        "two changes of leader",
        "empty again",
        "grows",
        "no leader",
        "up and down",
        "begin of statistics",
        "none",
    ],
)
@pytest.mark.proves("hostile/messages-hold-controller-queue")
def test_controller_queue_that_returns_messages_or_grows_is_named(lengths, redelivered, consumers, ok):
    def samples(values):
        return {"samples": [{"sample": one, "timestamp": 0} for one in reversed(values)]} if values else []

    stats = {"redeliver_details": samples(redelivered)}
    item = {"consumers": consumers, "messages_details": samples(lengths), "message_stats": stats}
    quiet = read_history("p-dl", {})
    [finding] = checks.check_controller_queues([quiet, read_history("p-orphan", item)])
    assert finding.ok is ok
    assert ok or ("p-orphan" in finding.message, bool(finding.remedy), finding.fatal) == (True, True, False)


@pytest.mark.proves("managed/queue-delay-exists-arguments")
def test_queue_with_the_name_of_a_wait_queue_is_found():
    ours, theirs = retry_queue_arguments(PoolNames("p"), 1000), {"x-queue-type": "quorum"}
    named = {"p-retry-1000": ours, "p-retry-2000": theirs, "p-retry-x": theirs, "p-retry-02000": theirs}
    queues = [read_totals({"name": name, "arguments": one}, asked_at=0.0) for name, one in named.items()]
    [finding] = checks.check_retry_queues(filter(None, queues), pool="p")
    assert (finding.ok, finding.fatal, "p-retry-2000" in finding.message) == (False, False, True)
    assert "p-retry-1000" not in finding.message


@pytest.mark.parametrize(
    ("text", "expected", "supported", "tested"),
    [
        ("3.9.29", (3, 9, 29), False, False),
        ("3.10.0", (3, 10, 0), True, True),
        ("3.13.7+1.g2b4c", (3, 13, 7), True, True),
        ("4.2", (4, 2, 0), True, True),
        ("4.3.0-rc.1", (4, 3, 0), True, True),
        ("4.4.0", (4, 4, 0), True, False),
        ("next", (0, 0, 0), False, False),
    ],
)
def test_version_is_read_and_judged(text, expected, supported, tested):
    version = BrokerVersion.parse(text)
    assert version == BrokerVersion(*expected)
    assert (version.is_supported, version.is_tested) == (supported, tested)
    finding = checks.check_version(version)
    assert (finding.ok, finding.remedy is None) == (supported, supported)
