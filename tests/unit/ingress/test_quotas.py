"""Quotas and send rates in virtual time: to the message, over midnight, jumps of the clock and changes of leader."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.ingress.quotas.document import QuotaManifest, load_quotas
from osrdyne.ingress.quotas.meters import Excess, Level
from osrdyne.ingress.quotas.quotas import Quotas, Sent, quota_check
from osrdyne.ingress.quotas.state import encode_state, parse_state
from osrdyne.ingress.quotas.window import DAY, Moment
from osrdyne.ingress.requests import Arrival
from osrdyne.protocol.messages import Request
from osrdyne.protocol.statuses import Status

MIDNIGHT = 1_700_006_400.0  # 2023-11-15T00:00:00Z


def manifest(**document: Any) -> QuotaManifest:
    return load_quotas(json.dumps(document))


def day_of(world: World) -> int:
    return int((world.wall - MIDNIGHT) // DAY)


class World:
    """Quotas, and clocks that the test moves."""

    def __init__(self, *, at: float = MIDNIGHT, **document: Any) -> None:
        self.monotonic, self.wall = 5_000.0, at
        self.document = manifest(**document)
        self.quotas = Quotas(self.document, self.now)
        self.levels: list[Level] = []

    @property
    def now(self) -> Moment:
        return Moment(self.monotonic, self.wall)

    def pass_time(self, seconds: float, *, jump: float = 0.0) -> None:
        self.monotonic += seconds
        self.wall += seconds + jump

    def send(self, size: int = 1, *, key: str = "k", principal: str = "p") -> Excess | None:
        sent = Sent(key, principal, size)
        excess = self.quotas.decide(sent, self.now)
        if excess is None:
            self.levels += self.quotas.charge(sent, self.now)
        return excess

    def flood(self, most: int = 10_000, **sender: Any) -> int:
        """Send until something is refused; how many messages passed."""
        return next(number for number in range(most + 1) if self.send(**sender) is not None)

    def restart(self, *, after: float = 0.0, jump: float = 0.0) -> None:
        """Another leader on another host, whose monotonic clock shows something else."""
        stored = parse_state(json.loads(json.dumps(encode_state(self.quotas.store(self.now)))))
        self.monotonic = 77.0
        self.wall += after + jump
        self.quotas = Quotas(self.document, self.now)
        self.quotas.restore(stored, self.now)


class TestDailyQuota:
    def test_it_runs_out_at_the_exact_message_and_says_when_it_begins_anew(self):
        world = World(pool={"messages_per_day": 1000})
        world.pass_time(3600.0)
        assert world.flood() == 1000
        excess = world.send()
        assert (excess.status, excess.retry_after) == (Status.QUOTA_EXCEEDED, 23 * 3600.0)

    @given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 3_000)), max_size=40))
    def test_messages_count_in_blocks_and_are_refused_only_when_they_do_not_fit(self, messages):
        world = World(pool={"messages_per_day": 20, "block_bytes": 4096})
        used = Counter()
        for size, seconds in messages:
            world.pass_time(seconds)
            amount, day = max(1, -(-size // 4096)), day_of(world)
            assert (world.send(size) is not None) == (used[day] + amount > 20)
            used[day] += amount if used[day] + amount <= 20 else 0

    def test_levels_are_reached_once_a_day_also_when_the_leader_changes(self):
        world = World(pool={"messages_per_day": 100})
        for _ in range(2):
            for _ in range(80):
                world.send()
            world.restart()
            world.flood()
            world.pass_time(DAY)
        assert [level.percent for level in world.levels] == [70, 85, 95, 70, 85, 95]


class TestRules:
    def test_the_first_rule_that_matches_counts_besides_the_pool_and_its_refusals_use_up_nothing(self):
        rules = [
            {"name": "one", "keys": "s-.*", "messages_per_day": 3},
            {"name": "all", "keys": "s-.*|other", "messages_per_day": 5},
        ]
        world = World(pool={"messages_per_day": 10}, rules=rules)
        assert (world.flood(key="s-1"), world.flood(key="s-2")) == (3, 0)
        assert "the rule one" in world.send(key="s-1").detail
        assert (world.flood(key="other"), world.flood(key="of no rule")) == (5, 2)

    @pytest.mark.parametrize("per", ["key", "principal"])
    def test_each_has_its_own_quota_and_rate(self, per):
        world = World(rules=[{"name": "r", "per": per, "messages_per_day": 7, "send_rate": 1, "burst": 4}])
        other = {"key": "other"} if per == "key" else {"principal": "other"}
        assert (world.flood(), world.flood(**other)) == (4, 4)
        world.pass_time(10.0)
        assert (world.flood(), world.flood(**other)) == (3, 3)


class TestFairShare:
    def test_a_borrower_leaves_the_others_what_is_theirs_for_the_rest_of_the_day(self):
        world = World(pool={"messages_per_day": 100, "share": "principal"})
        for principal in "ab":
            world.send(principal=principal)
        world.pass_time(DAY / 2)
        assert world.flood(principal="a") == 100 - 2 - 25  # half of the 49 that b has left, rounded up
        assert world.flood(principal="b") == 25
        assert world.send(principal="a") is not None

    def test_the_wait_of_a_borrower_is_exact(self):
        world = World(pool={"messages_per_day": 1000, "share": "key"})
        world.send(key="b")
        world.flood(key="a")
        world.pass_time(world.send(key="a").retry_after - 1.0)
        assert world.send(key="a") is not None
        world.pass_time(2.0)
        assert world.send(key="a") is None

    @given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3), st.integers(0, 4_000)), max_size=80))
    def test_shares_are_kept_and_the_quota_is_never_exceeded(self, steps):
        world, used, day = World(pool={"messages_per_day": 24, "share": "principal", "block_bytes": 1}), Counter(), 0
        for principal, amount, seconds in steps:
            world.pass_time(seconds)
            if day_of(world) != day:
                used, day = Counter(dict.fromkeys(used, 0)), day_of(world)
            passed = world.send(amount, principal=principal) is None
            share = 24 // max(4, len(used | Counter({principal: 1})))
            if used[principal] + amount <= share and used.total() + amount <= 24:
                assert passed
            used[principal] += amount if passed else 0
            assert used.total() <= 24


class TestSendRate:
    @given(
        st.integers(1, 8),
        st.lists(st.tuples(st.integers(0, 64), st.integers(0, 12), st.sampled_from([0, DAY, -2 * DAY])), max_size=40),
    )
    def test_it_is_a_token_bucket_whatever_the_wall_clock(self, burst, steps):
        world, tokens = World(pool={"send_rate": 4, "burst": burst}), burst * 4
        for sixteenths, messages, jump in steps:
            world.pass_time(sixteenths / 16, jump=jump)
            tokens = min(burst * 4, tokens + sixteenths)  # in quarters of a message
            for _ in range(messages):
                excess = world.send()
                assert (excess is None) == (tokens >= 4)
                tokens -= 4 if tokens >= 4 else 0
                if excess is not None:
                    assert excess.status is Status.RATE_LIMITED
                    assert excess.retry_after == pytest.approx((4 - tokens) / 16)

    @pytest.mark.parametrize("rate", [2, 3, 7, 1000])
    def test_client_that_waits_as_it_is_asked_to_is_accepted(self, rate):
        world = World(pool={"send_rate": rate, "burst": 1})
        check = quota_check(lambda: world.quotas, lambda: world.now, lambda levels: None)
        arrival = Arrival(Request(key="k", body=b"1"), accepted_ms=0)
        for number in range(40):
            refusal = check.decide(arrival, 0)
            assert (refusal is not None) == (number % 2 == 1)
            if refusal is None:
                check.passed(arrival)
            else:
                world.pass_time(refusal.retry_after_ms / 1000)


class TestClockJumps:
    @pytest.mark.parametrize("jump", [DAY, -DAY, DAY / 3, -DAY / 3], ids=["+1 d", "-1 d", "+8 h", "-8 h"])
    @pytest.mark.proves("quotas/clock-leader-s-host")
    def test_a_jump_neither_gives_nor_takes_a_days_worth(self, jump):
        world = World(pool={"messages_per_day": 100})
        world.pass_time(3600.0)
        assert world.flood() == 100
        world.pass_time(1.0, jump=jump)
        assert world.send() is not None
        world.pass_time(23 * 3600.0)
        # The day has ended when it would have; the next one ends at midnight of the new time.
        left = DAY - world.wall % DAY
        assert world.flood() == (100 if left > DAY - 900 else int(100 * left / DAY))
        world.pass_time(left)
        assert world.flood() == 100

    @given(st.lists(st.tuples(st.integers(1, 40_000), st.sampled_from([0, 0, DAY, -DAY, 3600, -3600])), max_size=30))
    def test_a_greedy_sender_gets_its_quota_for_every_day_that_passes(self, steps):
        world = World(pool={"messages_per_day": 48})
        passed, began = world.flood(), world.monotonic
        for seconds, jump in steps:
            world.pass_time(seconds, jump=jump)
            passed += world.flood()
            days = (world.monotonic - began) / DAY
            # A day has begun when the test begins, and another one may just have. Parts of a day are rounded down.
            assert 48 * (days - 1) - len(steps) <= passed <= 48 * (days + 2.1)

    def test_small_corrections_move_the_end_of_the_day(self):
        world = World(pool={"messages_per_day": 5}, at=MIDNIGHT - 100)
        world.flood()
        world.pass_time(0.0, jump=60.0)
        world.pass_time(39.0)
        assert world.send() is not None
        world.pass_time(1.0)
        assert world.flood() == 5


class TestRestart:
    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9_000)), max_size=30), st.booleans())
    def test_the_next_leader_decides_as_this_one(self, messages, shared):
        pool = {"messages_per_day": 60, **({"share": "principal"} if shared else {})}
        world = World(pool=pool, rules=[{"name": "r", "per": "principal", "messages_per_day": 20}])

        def decisions():
            asked = [Sent("k", name, size) for name in "abcd" for size in (1, 30_000)]
            found = [world.quotas.decide(sent, world.now) for sent in asked]
            return world.quotas.usage(world.now).meters, [one and one.status for one in found]

        for principal, size in messages:
            world.send(size, principal=principal)
        before = decisions()
        world.restart()
        assert decisions() == before

    def test_a_day_that_ends_meanwhile_begins_anew(self):
        world = World(pool={"messages_per_day": 10}, at=MIDNIGHT - 60)
        world.flood()
        world.restart(after=61.0)
        assert world.flood() == 10
        assert len(world.quotas.record.days) == 1

    @pytest.mark.proves("quotas/clock-leader-s-host")
    def test_a_leader_whose_clock_is_behind_continues_the_day(self):
        world = World(pool={"messages_per_day": 10}, at=MIDNIGHT + 600)
        world.flood()
        world.restart(jump=-1200.0)
        assert world.send() is not None
        world.pass_time(600.0)  # midnight by that clock
        assert world.send() is not None
        world.pass_time(DAY - 1200.0)
        assert world.send() is None

    @pytest.mark.parametrize(
        "damage",
        [
            *[{"days": []}, {"days": [[[0] * 96] * 2]}, {"days": [[[-1] * 96] * 3]}],
            *[{"scale": 0}, {"saved_at": None}, {"meters": [{"name": "pool"}]}, {"extra": 1}],
        ],
        ids=lambda damage: str(damage)[:20],
    )
    @pytest.mark.proves("quotas/stored-counts-cannot-read")
    def test_a_damaged_state_is_refused(self, damage):
        world = World(pool={"messages_per_day": 10, "share": "key"})
        world.send()
        good = encode_state(world.quotas.store(world.now))
        with pytest.raises(ValueError, match=next(iter(damage))):
            parse_state(good | damage)
        for word, text in (("hashes", "AAAA"), ("counts", "!")):
            with pytest.raises(ValueError, match="pool"):
                parse_state(good | {"meters": [good["meters"][0] | {word: text}]})


def test_a_change_of_the_limits_keeps_what_was_counted():
    world = World(pool={"messages_per_day": 10})
    world.flood()
    for rules in ([{"name": "r", "messages_per_day": 1}], []):
        world.quotas.use(manifest(pool={"messages_per_day": 12}, rules=rules))
        assert world.flood() == 1


class TestForecast:
    @pytest.mark.parametrize(("every", "used_up_in"), [(3.0, 18_000 * 3.0), (30.0, None)], ids=["too fast", "it fits"])
    def test_quota_is_used_up_by_a_steady_rate_as_forecast(self, every, used_up_in):
        world = World(pool={"messages_per_day": 20_000})
        for _ in range(2_000 if used_up_in else 200):
            world.send()
            world.pass_time(every)
        forecast = world.quotas.usage(world.now).forecast
        expected = None if used_up_in is None else pytest.approx(used_up_in, rel=0.02)
        assert (forecast.earliest, forecast.latest, forecast.by_history) == (expected, expected, None)

    def test_earlier_days_tell_of_a_peak_that_is_still_to_come(self):
        world = World(pool={"messages_per_day": 1_000})
        for hours, messages in ((18, 800), (24, 800), (18, 600)):
            world.pass_time(hours * 3600.0)
            for _ in range(messages):
                world.send()
        by_history = world.quotas.usage(world.now).forecast.by_history
        assert by_history == pytest.approx(6 * 3600.0 + 450.0)  # in the middle of that quarter of an hour
