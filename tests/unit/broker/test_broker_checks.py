"""What `doctor` makes of the facts about a RabbitMQ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from osrdyne.broker.doctor import checks
from osrdyne.broker.management.models import NodeStatus, Permissions, Whoami, read_totals
from osrdyne.broker.queues.retry_queues import retry_queue_arguments
from osrdyne.broker.topology.version import BrokerVersion
from osrdyne.config.models import RequestSettings, Settings, WorkerSettings
from osrdyne.findings import Finding
from osrdyne.protocol.names import PoolNames

NODE = NodeStatus("rabbit@a", True, False, False, 100, 1000, 10_000, 50, 40, 1000)


def version(text: str) -> BrokerVersion:
    return BrokerVersion.parse(text)


def permissions(pattern: str, **changed: str) -> Finding:
    granted = replace(Permissions(pattern, pattern, pattern), **changed)
    return checks.check_permissions(granted, pool="p", user="u ser", vhost="/")


@pytest.mark.parametrize(("text", "ok"), [("3.9.29", False), ("3.10.8", True), ("4.3.6", True), ("", False)])
def test_old_versions_are_refused(text: str, ok: bool) -> None:
    finding = checks.check_version(version(text))
    assert (finding.ok, finding.remedy is None) == (ok, ok)


def test_an_untested_version_is_named_as_such() -> None:
    assert "newer than any" in checks.check_version(version("5.0.0")).message


def test_every_range_of_versions_is_distinguished() -> None:
    differences = [
        " ".join(checks.differences(version(text))) for text in ("3.10.8", "3.13.7", "4.0.5", "4.2.0", "4.3.6")
    ]
    assert differences[2] == differences[3]
    assert len(set(differences)) == 4


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
def test_longer_work_than_the_consumer_timeout_is_refused(
    text: str, processing: float, configured: float | None, ok: bool
) -> None:
    settings = Settings(
        worker=WorkerSettings(processing_timeout=processing), requests=RequestSettings(consumer_timeout=configured)
    )
    assert checks.check_consumer_timeout(settings, version(text)).ok is ok


def test_the_remedy_for_long_work_on_an_old_rabbitmq_names_both_settings() -> None:
    settings = Settings(worker=WorkerSettings(processing_timeout=7200))
    remedy = checks.check_consumer_timeout(settings, version("3.10.8")).remedy or ""
    assert "consumer_timeout = 7500000 in rabbitmq.conf" in remedy
    assert "requests.consumer_timeout: 7500s" in remedy


@pytest.mark.parametrize(
    ("tags", "ok", "fatal"),
    [
        ({"administrator"}, True, True),
        ({"policymaker", "monitoring"}, True, True),
        ({"policymaker"}, False, False),
        ({"monitoring"}, False, True),
        (set(), False, True),
    ],
    ids=["administrator", "policymaker and monitoring", "policymaker", "monitoring", "none"],
)
def test_tags_decide_what_the_user_may(tags: set[str], ok: bool, fatal: bool) -> None:
    [finding] = checks.check_tags(Whoami("u", frozenset(tags)))
    assert (finding.ok, finding.fatal) == (ok, fatal)


@pytest.mark.parametrize("pattern", [".*", "", "^p-", "^(p|q)-.*|^amq\\.default$", "(*ERLANG"])
def test_permissions_are_matched_as_rabbitmq_does(pattern: str) -> None:
    covers = {".*": True, "^(p|q)-.*|^amq\\.default$": True, "(*ERLANG": True}
    assert permissions(pattern).ok is covers.get(pattern, False)


def test_the_first_missing_permission_is_named() -> None:
    finding = permissions(".*", read="^p-(orphan|dl)")
    assert "may not read p-" in finding.message
    assert "'u ser'" in (finding.remedy or "")


def test_the_remedy_for_permissions_grants_what_is_needed() -> None:
    finding = checks.check_permissions(None, pool="p", user="u", vhost="v")
    assert finding.remedy == "Grant them: rabbitmqctl set_permissions -p v u '^p-' '^(p-.*|amq\\.default)$' '^p-'"
    assert permissions("^p-", write=r"^(p-.*|amq\.default)$").ok


def test_replies_need_the_default_exchange() -> None:
    assert "write amq.default" in permissions("^p-").message


@pytest.mark.parametrize(("offset", "ok"), [(None, True), (0.4, True), (-5.9, True), (6.1, False), (-3600, False)])
def test_clocks_may_differ_a_little(offset: float | None, ok: bool) -> None:
    finding = checks.check_clock(offset, allowed=5.0)
    assert finding.ok is ok
    assert ok or not finding.fatal


@pytest.mark.parametrize(
    ("node", "subject", "fatal"),
    [
        (replace(NODE, memory_alarm=True), "alarms", True),
        (replace(NODE, disk_alarm=True), "alarms", True),
        (replace(NODE, running=False), "nodes", False),
        (replace(NODE, files_used=900), "file descriptors", False),
    ],
    ids=["memory", "disk", "down", "files"],
)
def test_what_is_wrong_with_a_node_is_found(node: NodeStatus, subject: str, fatal: bool) -> None:
    [finding] = checks.check_nodes([NODE, node])
    assert (finding.ok, finding.subject, finding.fatal) == (False, subject, fatal)


@pytest.mark.parametrize("node", [NODE, replace(NODE, files_used=None, files_limit=None)], ids=["healthy", "silent"])
def test_a_healthy_or_silent_node_is_fine(node: NodeStatus) -> None:
    [finding] = checks.check_nodes([node])
    assert finding.ok


def test_disabled_optional_feature_flags_are_fine() -> None:
    assert checks.check_feature_flags(["user_limits"]).ok
    assert not checks.check_feature_flags(["stream_queue"]).ok


@pytest.mark.parametrize(("policy", "ok"), [("p-req", True), (None, True), ("everything", False)])
def test_a_policy_that_displaces_ours_is_found(policy: str | None, ok: bool) -> None:
    queue = read_totals({"name": "p-req-a", "policy": policy}, asked_at=0.0)
    assert queue is not None
    assert checks.check_policy([queue], pool="p").ok is ok


@pytest.mark.proves("managed/queue-delay-exists-arguments")
def test_queue_with_the_name_of_a_wait_queue_is_found() -> None:
    ours, theirs = retry_queue_arguments(PoolNames("p"), 1000), {"x-queue-type": "quorum"}
    named = {"p-retry-1000": ours, "p-retry-2000": theirs, "p-retry-x": theirs, "p-retry-02000": theirs}
    queues = [read_totals({"name": name, "arguments": one}, asked_at=0.0) for name, one in named.items()]
    [finding] = checks.check_retry_queues(filter(None, queues), pool="p")
    assert (finding.ok, finding.fatal, "p-retry-2000" in finding.message) == (False, False, True)
    assert "p-retry-1000" not in finding.message


@pytest.mark.parametrize(
    ("text", "concurrency", "remedy"),
    [
        ("4.3.0", 5, None),
        ("4.3.0", 6, "raise requests.consumer_timeout to 2160 s"),
        ("3.10.8", 6, "raise consumer_timeout of rabbitmq.conf and requests.consumer_timeout to 2160 s"),
    ],
)
def test_wait_for_the_rate_that_may_exceed_the_consumer_timeout_has_a_remedy(
    text: str, concurrency: int, remedy: str | None
) -> None:
    settings = Settings(worker=WorkerSettings(concurrency=concurrency))
    finding = checks.check_consumer_timeout(settings, version(text))
    assert finding.ok
    assert ("If the quotas have rates" in finding.message) is (remedy is not None)
    assert remedy is None or remedy in finding.message
