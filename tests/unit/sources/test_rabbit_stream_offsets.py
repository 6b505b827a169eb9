"""What is read next: every offset once, in order, within the limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osrdyne.amqp.streams import StreamRange
from osrdyne.errors import ConfigurationError, StreamDataLostError
from osrdyne_sources.rabbit_stream.offsets import ends, next_end, resolve, split
from osrdyne_sources.rabbit_stream.options import Position

OFFSETS = st.integers(0, 2**40)
STREAMS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.tuples(OFFSETS, OFFSETS), min_size=1)


@given(streams=STREAMS, most=st.integers(1, 2**41) | st.none())
def test_batches_move_every_reader_to_the_end(streams: dict[str, tuple[int, int]], most: int | None) -> None:
    start = {name: min(pair) for name, pair in streams.items()}
    available = {name: max(pair) for name, pair in streams.items()}
    total = sum(available.values()) - sum(start.values())
    stop = next_end(start, available, most, fail_on_data_loss=True)
    assert all(start[name] <= stop[name] <= available[name] for name in streams)
    assert sum(stop.values()) - sum(start.values()) == (total if most is None else min(total, most))
    assert list(stop) == sorted(stop)


def test_stream_with_few_messages_is_read_beside_a_large_backlog() -> None:
    start, available = {"large": 0, "small": 0}, {"large": 1_000_000, "small": 1}
    assert next_end(start, available, 1000, fail_on_data_loss=True) == {"large": 999, "small": 1}


@given(streams=STREAMS, parts=st.integers(1, 20))
def test_splits_cover_a_batch_once(streams: dict[str, tuple[int, int]], parts: int) -> None:
    start = {name: min(pair) for name, pair in streams.items()}
    stop = {name: max(pair) for name, pair in streams.items()}
    most = max(1, *(stop[name] - start[name] for name in streams)) // parts + 1
    splits = split(start, stop, most)
    assert all(0 < one.wanted.stop - one.wanted.start <= most for one in splits)
    for name in streams:
        position = start[name]
        for one in (one for one in splits if one.stream == name):
            assert one.wanted.start == position
            position = one.wanted.stop
        assert position == stop[name]


def test_edges_are_those_of_the_stream() -> None:
    bounds = {"b": StreamRange(5, 9), "a": None}
    assert resolve(Position("earliest"), bounds) == {"a": 0, "b": 5}
    assert resolve(Position("latest"), bounds) == {"a": 0, "b": 9}
    assert ends(bounds, {"a": 7, "b": 1}) == {"a": 7, "b": 9}
    assert resolve(Position("latest", {"b": 7}), bounds) == {"a": 0, "b": 7}


def test_a_stream_that_was_declared_again_fails_or_is_read_from_its_first_message() -> None:
    with pytest.raises(StreamDataLostError, match=r"log .*3.*10"):
        next_end({"log": 10}, {"log": 3}, None, fail_on_data_loss=True)
    stop = next_end({"log": 10}, {"log": 3}, 2, fail_on_data_loss=False)
    assert stop == {"log": 2}
    assert [one.wanted for one in split({"log": 10}, stop, 100)] == [StreamRange(0, 2)]


def test_a_new_stream_is_read_from_its_first_message_and_a_missing_one_is_refused() -> None:
    assert next_end({"a": 1}, {"a": 2, "new": 4}, None, fail_on_data_loss=True) == {"a": 2, "new": 4}
    with pytest.raises(ConfigurationError, match="'old'"):
        next_end({"a": 1, "old": 4}, {"a": 2}, None, fail_on_data_loss=False)
