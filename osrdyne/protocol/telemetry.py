"""The messages in the log of telemetry, and the partition of a key. Source: docs/reference/telemetry/log.md.

Used by the ingress, which writes the log, and by its readers: ingest, the last-value reader, programs of users.
"""

from __future__ import annotations

import zlib

from osrdyne.protocol.names import Key

ENDPOINT = "/streams/{name}/inputs/log"
"""The sink of routes that write to the log of this name."""

KEY_HEADER = "x-osrdyne-key"
"""The key of the client's request: a device or a site. The routing key of a message in the log is its stream."""
ENQUEUED_HEADER = "x-osrdyne-enqueued"
"""When the ingress accepted the message, in milliseconds since the epoch (integer)."""

PARTITIONS_ARGUMENT = "x-osrdyne-partitions"
"""Queue argument of a stream: the number of partitions of its log."""


def partition_of(key: Key, partitions: int) -> int:
    """The partition of a key: CRC-32 of its UTF-8, modulo the number of partitions. All messages of a key are in one
    partition, in the order in which the ingress accepted them."""
    return zlib.crc32(key.encode("utf-8")) % partitions
