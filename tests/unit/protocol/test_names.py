"""The codec between keys and names: reversible, free of collisions, never too long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.errors import InvalidKeyError
from osrdyne.protocol.names import (
    KEY_ARGUMENT,
    MAX_NAME_BYTES,
    PRIORITIES,
    Key,
    PoolNames,
    WorkerId,
    decode_key,
    encode_key,
    fit_key,
    is_pool_id,
    parse_key,
)

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=255).filter(lambda text: len(text.encode()) <= 255)
POOLS = st.from_regex(r"[a-z0-9_]{1,32}", fullmatch=True)


@given(KEYS)
def test_every_key_round_trips_in_letters_every_broker_takes(key: str) -> None:
    encoded = encode_key(parse_key(key))
    assert re.fullmatch(r"[A-Za-z0-9+]*", encoded)
    assert decode_key(encoded) == key


@given(st.text(st.sampled_from("aA4+1_F%"), max_size=8))
def test_decode_answers_only_for_what_encode_returns(text: str) -> None:
    key = decode_key(text)
    assert key is None or encode_key(key) == text


@pytest.mark.parametrize(
    "text", ["+4", "+zz", "+3d", "a b", "+41", "a_" + "0" * 32, "+FF", "é", "a\n", "a" * 256],
    ids=["cut", "no hex", "lower case", "blank", "needless escape", "shortened", "no UTF-8", "not ASCII", "newline",
         "long"],
)  # fmt: skip
def test_text_that_is_not_an_encoded_key_decodes_to_none(text: str) -> None:
    assert decode_key(text) is None


@given(st.lists(KEYS, min_size=2, max_size=2, unique=True), st.integers(33, 255))
def test_different_keys_have_different_names_whatever_the_limit(keys: list[str], limit: int) -> None:
    first, second = (fit_key(Key(key), limit) for key in keys)
    assert first != second


@given(KEYS, st.integers(33, 255))
def test_name_never_exceeds_its_limit_nor_cuts_an_escape(key: str, limit: int) -> None:
    name = fit_key(Key(key), limit)
    assert len(name) <= limit
    assert re.fullmatch(r"(?:[A-Za-z0-9]|\+[0-9A-F]{2})*(?:_[0-9a-f]{32})?", name)


@given(st.text("aé/", min_size=51, max_size=127), st.integers(33, 50))
def test_shortened_name_is_never_the_plain_name_of_another_key(key: str, limit: int) -> None:
    assert decode_key(fit_key(Key(key), limit)) is None


@given(POOLS, KEYS, st.none() | st.sampled_from(PRIORITIES))
def test_queue_name_fits_the_broker_and_leads_back_to_its_key(pool: str, key: str, priority: int | None) -> None:
    names = PoolNames(pool)
    queue = names.request_queue(Key(key), priority)
    assert len(queue.encode()) <= MAX_NAME_BYTES
    assert names.key_of_queue(queue, {KEY_ARGUMENT: key}) == (key if priority is None else None)
    assert names.key_of_level_queue(queue, {KEY_ARGUMENT: key}) == (None if priority is None else (key, priority))
    assert re.search(names.request_queue_pattern(), queue)


def test_key_argument_that_lies_is_not_believed() -> None:
    names = PoolNames("p")
    queue = names.request_queue(Key("é" * 127))
    for value in ("other", 7, b"x", "\udcff", "x" * 300):
        assert names.key_of_queue(queue, {KEY_ARGUMENT: value}) is None
        assert names.key_of_level_queue(names.request_queue(Key("é" * 127), 3), {KEY_ARGUMENT: value}) is None


@given(st.lists(POOLS, min_size=2, max_size=2, unique=True), KEYS, st.none() | st.sampled_from(PRIORITIES))
def test_pattern_matches_no_queue_of_another_pool(pools: list[str], key: str, priority: int | None) -> None:
    own, other = map(PoolNames, pools)
    assert not re.search(own.request_queue_pattern(), other.request_queue(Key(key), priority))


@pytest.mark.parametrize(("own", "other"), [("a", "a_req"), ("a", "a_req_a"), ("a", "aa"), ("req", "a_req")])
def test_pattern_tells_pools_with_similar_names_apart(own: str, other: str) -> None:
    for key in ("", "req", "a", "-req-", "a-req-"):
        assert not re.search(PoolNames(own).request_queue_pattern(), PoolNames(other).request_queue(Key(key)))
        assert PoolNames(own).key_of_queue(PoolNames(other).request_queue(Key(key)), {}) is None


def test_pattern_matches_nothing_else_of_its_own_pool() -> None:
    names = PoolNames("p")
    others = [
        names.orphan_queue, names.dead_letter_queue, names.activity_queue, names.poison_queue, names.leader_queue,
        names.cancel_queue, names.control_queue(WorkerId("w")), "p-req-x.y", "xp-req-a",
        "p-req-+4", "p-req-a_Pri10",
    ]  # fmt: skip
    assert [name for name in others if re.search(names.request_queue_pattern(), name)] == []


@pytest.mark.parametrize("key", ["x" * 256, "é" * 128, "\udcff"], ids=["256 bytes", "256 bytes of é", "not UTF-8"])
def test_impossible_key_is_refused_with_the_reason(key: str) -> None:
    with pytest.raises(InvalidKeyError, match="255"):
        parse_key(key)


@pytest.mark.parametrize("text", ["", "A", "a-b", "a.b", "é", "x" * 33, "a\n"])
def test_pool_id_outside_its_alphabet_is_refused(text: str) -> None:
    assert not is_pool_id(text)


@given(KEYS)
def test_control_routing_key_of_a_group_fits_a_topic_word(key: str) -> None:
    routing_key = PoolNames("p").control_group_routing_key(Key(key))
    assert len(routing_key) <= 255
    assert routing_key.count(".") == 1
    assert not set("*#") & set(routing_key)
