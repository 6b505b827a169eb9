"""Offsets of several streams, and the ranges to read next. Pure.

An offset of the source maps each stream to the offset of the next message to read; Spark stores it in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from osrdyne.amqp.streams import StreamRange
from osrdyne.errors import ConfigurationError, StreamDataLostError
from osrdyne_sources.rabbit_stream.options import Position

Offsets = Mapping[str, int]
Bounds = Mapping[str, StreamRange | None]
"""The offsets that each stream has; None for a stream without messages."""


@dataclass(frozen=True, slots=True)
class Split:
    """A range of one stream that one task reads."""

    stream: str
    wanted: StreamRange


def ordered(offsets: Offsets) -> dict[str, int]:
    """Sort an offset: Spark compares offsets by their JSON text."""
    return dict(sorted(offsets.items()))


def resolve(position: Position, bounds: Bounds) -> dict[str, int]:
    """Return the offset that a position means now; an empty stream begins and ends with 0."""
    resolved = {}
    for stream, found in bounds.items():
        edge = 0 if found is None else found.start if position.edge == "earliest" else found.stop
        resolved[stream] = position.offsets.get(stream, edge)
    return ordered(resolved)


def ends(bounds: Bounds, start: Offsets) -> dict[str, int]:
    """Return where the streams end; one without messages has nothing to read after `start`."""
    return ordered({stream: start.get(stream, 0) if found is None else found.stop for stream, found in bounds.items()})


def next_end(start: Offsets, available: Offsets, most: int | None, *, fail_on_data_loss: bool) -> dict[str, int]:
    """Return how far to read from `start`: at most `most` offsets, divided among the streams by their lags.

    Raises `StreamDataLostError` when a stream ends before `start`, unless `fail_on_data_loss` is false: then it is
    read from its first message, because a stream never loses its last messages unless it was deleted.
    """
    if missing := start.keys() - available.keys():
        raise ConfigurationError(
            f"The checkpoint has the stream {min(missing)!r}, which the options no longer name: name it, or begin with "
            "a new checkpoint."
        )
    start = {stream: start.get(stream, 0) for stream in available}
    for stream, stop in available.items():
        if stop < start[stream]:
            if fail_on_data_loss:
                raise StreamDataLostError(
                    f"The stream {stream} ends at offset {stop}, before the position {start[stream]} of the reader: it "
                    "was deleted and declared again. Begin with a new checkpoint, or set failOnDataLoss to false to "
                    "read the new stream from its first message.",
                    stream=stream,
                    start=start[stream],
                    stop=stop,
                )
            start[stream] = 0
    lags = {stream: available[stream] - start[stream] for stream in available}
    total = sum(lags.values())
    if most is None or total <= most:
        return ordered(available)
    # Each stream gets its share rounded down. The rest goes first to the streams without a share: otherwise a stream
    # with few messages would never be read beside one with a large backlog.
    shares = {stream: lag * most // total for stream, lag in lags.items()}
    left = most - sum(shares.values())
    for stream in sorted(lags, key=lambda name: (shares[name] > 0, shares[name] - lags[name], name)):
        extra = min(left, lags[stream] - shares[stream], 1)
        shares[stream] += extra
        left -= extra
    return ordered({stream: start[stream] + shares[stream] for stream in available})


def split(start: Offsets, stop: Offsets, most: int) -> list[Split]:
    """Divide the messages between two offsets into ranges of at most `most` offsets.

    A stream that ends before its start was declared again, and is read from its first message.
    """
    splits = []
    for stream, end in sorted(stop.items()):
        begin = start.get(stream, 0)
        if end < begin:
            begin = 0
        count = -(-(end - begin) // most)  # of equal size, so that no task has much less to do than the others
        edges = [begin + (end - begin) * number // count for number in range(count)] + [end] if count else []
        splits += [Split(stream, StreamRange(low, high)) for low, high in pairwise(edges)]
    return splits
