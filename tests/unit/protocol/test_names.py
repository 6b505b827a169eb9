"""The codec between keys and names: reversible, free of collisions, never too long."""

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
def test_every_key_round_trips_in_letters_every_broker_takes_and_fits_a_topic_word(key):
    encoded = encode_key(parse_key(key))
    assert re.fullmatch(r"[A-Za-z0-9+]*", encoded)
    assert decode_key(encoded) == key
    routing_key = PoolNames("p").control_group_routing_key(Key(key))
    assert len(routing_key) <= 255
    assert routing_key.count(".") == 1
    assert not set("*#") & set(routing_key)


@given(st.text(st.sampled_from("aA4+1_F%"), max_size=8))
def test_decode_answers_only_for_what_encode_returns(text):
    key = decode_key(text)
    assert key is None or encode_key(key) == text


def test_text_that_is_not_an_encoded_key_decodes_to_none():
    escapes = ["+4", "+zz", "+3d", "+41", "+FF"]  # cut, no hex, lower case, needless, no UTF-8
    others = ["a b", "a_" + "0" * 32, "é", "a\n", "a" * 256]
    assert [text for text in escapes + others if decode_key(text) is not None] == []


@given(st.lists(KEYS, min_size=2, max_size=2, unique=True), st.integers(33, 255))
def test_names_differ_and_never_exceed_their_limit_nor_cut_an_escape(keys, limit):
    names = {fit_key(Key(key), limit) for key in keys}
    assert len(names) == 2
    assert all(re.fullmatch(r"(?:[A-Za-z0-9]|\+[0-9A-F]{2})*(?:_[0-9a-f]{32})?", name) for name in names)
    assert max(map(len, names)) <= limit


@given(st.text("aé/", min_size=51, max_size=127), st.integers(33, 50))
def test_shortened_name_is_never_the_plain_name_of_another_key(key, limit):
    assert decode_key(fit_key(Key(key), limit)) is None


@given(POOLS, KEYS, st.none() | st.sampled_from(PRIORITIES))
def test_queue_name_fits_the_broker_and_leads_back_to_its_key(pool, key, priority):
    names = PoolNames(pool)
    queue = names.request_queue(Key(key), priority)
    assert len(queue.encode()) <= MAX_NAME_BYTES
    assert names.key_of_queue(queue, {KEY_ARGUMENT: key}) == (key if priority is None else None)
    assert names.key_of_level_queue(queue, {KEY_ARGUMENT: key}) == (None if priority is None else (key, priority))
    assert re.search(names.request_queue_pattern(), queue)


def test_key_argument_that_lies_is_not_believed():
    names = PoolNames("p")
    queue = names.request_queue(Key("é" * 127))
    for value in ("other", 7, b"x", "\udcff", "x" * 300):
        assert names.key_of_queue(queue, {KEY_ARGUMENT: value}) is None
        assert names.key_of_level_queue(names.request_queue(Key("é" * 127), 3), {KEY_ARGUMENT: value}) is None


SIMILAR = st.sampled_from([["a", "a_req"], ["a", "a_req_a"], ["a", "aa"], ["req", "a_req"]])


@given(
    SIMILAR | st.lists(POOLS, min_size=2, max_size=2, unique=True),
    KEYS | st.sampled_from(["", "req", "a", "-req-", "a-req-"]),
    st.none() | st.sampled_from(PRIORITIES),
)
def test_pattern_matches_no_queue_of_another_pool(pools, key, priority):
    own, other = map(PoolNames, pools)
    queue = other.request_queue(Key(key), priority)
    assert not re.search(own.request_queue_pattern(), queue)
    assert own.key_of_queue(queue, {}) is None


def test_pattern_matches_nothing_else_of_its_own_pool():
    names = PoolNames("p")
    others = [
        names.orphan_queue, names.dead_letter_queue, names.activity_queue, names.poison_queue, names.leader_queue,
        names.cancel_queue, names.control_queue(WorkerId("w")), "p-req-x.y", "xp-req-a", "p-req-+4", "p-req-a_Pri10",
    ]  # fmt: skip
    assert [name for name in others if re.search(names.request_queue_pattern(), name)] == []


def test_impossible_key_or_pool_id_is_refused():
    for key in ("x" * 256, "é" * 128, "\udcff"):
        with pytest.raises(InvalidKeyError, match="255"):
            parse_key(key)
    assert [text for text in ("", "A", "a-b", "a.b", "é", "x" * 33, "a\n") if is_pool_id(text)] == []
