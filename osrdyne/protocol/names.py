"""Names on the broker, and the codec between a key and the part of a name it becomes.

A key is data, never syntax: every UTF-8 string of at most 255 bytes is a key. `encode_key` maps it to ASCII letters,
digits and `+HH` escapes, the only alphabet that every AMQP client accepts in queue names; the *binding key* is the raw
key. Source: docs/reference/protocol/names.md. `ReplyAddresses` checks the reply addresses of requests.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import NewType

from osrdyne.errors import InvalidKeyError

Key = NewType("Key", str)
QueueName = NewType("QueueName", str)
WorkerId = NewType("WorkerId", str)
QueueId = tuple[Key, int | None]
"""One request queue: the key of its group and its priority level, None for the default level."""

MAX_NAME_BYTES = 255
MAX_KEY_BYTES = 255
MAX_WORKER_ID_BYTES = 200
KEY_ARGUMENT = "x-osrdyne-key"
"""Queue argument with the raw key, so that a listing shows the key of unbound queues, too."""

PRIORITIES = range(10)

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_ESCAPE = re.compile(rb"\+([0-9A-F]{2})")
_ENCODED = re.compile(r"(?:[A-Za-z0-9]|\+[0-9A-F]{2})*\Z")
_LEVEL = re.compile(r"_Pri([0-9])\Z")
_DELAY = re.compile(r"[1-9][0-9]{0,9}\Z")
_PARTITION = re.compile(r"(?:0|[1-9][0-9]{0,3})\Z")
_POOL_ID = re.compile(r"[a-z0-9_]{1,32}\Z")
_OWN_NAME = re.compile(
    r"(?:(?:orphan|dl|activity|poison|cancel|progress|leader|audit)\Z|(?:req|ctl|retry|register|snapshot|log)-|[a-z]+-xchg(?:\Z|_))"
)
"""The suffixes of the pool id in the names of its queues and exchanges."""
_HASH_CHARS = 32  # 128 bits in hexadecimal


def parse_key(text: str) -> Key:
    """Check that a routing key is a valid key.

    Raises `InvalidKeyError` if it is not UTF-8 (undecodable bytes arrive as surrogates) or too long.
    """
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidKeyError("The routing key is not valid UTF-8; use a UTF-8 key of at most 255 bytes.") from None
    if size > MAX_KEY_BYTES:
        raise InvalidKeyError(f"The key has {size} bytes; at most {MAX_KEY_BYTES} are allowed.")
    return Key(text)


def priority_of(name: str) -> int | None:
    """The priority level of a request queue or a work exchange by its name; None: the default level."""
    match = _LEVEL.search(name)
    return None if match is None else int(match[1])


def encode_key(key: Key) -> str:
    """Encode the UTF-8 of the key: ASCII letters and digits stay, other bytes become `+HH` (uppercase hexadecimal)."""
    return "".join(chr(byte) if byte in _PLAIN else f"+{byte:02X}" for byte in key.encode("utf-8"))


def decode_key(encoded: str) -> Key | None:
    """The inverse of `encode_key`; None for text that `encode_key` never returns, such as a hash or a foreign name."""
    if not _ENCODED.match(encoded):
        return None
    raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), encoded.encode("ascii"))
    try:
        key = parse_key(raw.decode("utf-8"))
    except (UnicodeDecodeError, InvalidKeyError):
        return None
    return key if encode_key(key) == encoded else None


def fit_key(key: Key, limit: int) -> str:
    """`encode_key(key)` if it has at most `limit` characters, else a readable prefix, `_` and a 128-bit hash.

    An encoded key never contains `_`, so a shortened name is not the name of another key. Used for queue names (255
    characters without prefix and suffix), and by drivers for their own, shorter names. Raises ValueError for a limit
    that has no room for `_` and the hash.
    """
    if limit <= _HASH_CHARS:
        raise ValueError(f"a name needs at least {_HASH_CHARS + 1} characters to stay unique, not {limit}")
    encoded = encode_key(key)
    if len(encoded) <= limit:
        return encoded
    digest = hashlib.sha256(key.encode("utf-8")).hexdigest()[:_HASH_CHARS]
    prefix = encoded[: limit - _HASH_CHARS - 1]
    prefix = re.sub(r"\+[0-9A-F]?\Z", "", prefix)  # do not cut an escape in two
    return f"{prefix}_{digest}"


def replica_id(worker_id: WorkerId, replica: str) -> WorkerId:
    """The worker id of one of several workers that the platform makes of one start, such as pods of a Deployment."""
    return WorkerId(f"{worker_id}.{replica}")


def started_as(worker_id: str) -> WorkerId:
    """The worker id of the start: of a replica, the part before its own name. Other worker ids have no dot."""
    return WorkerId(worker_id.partition(".")[0])


def may_be_addressed(worker_id: str) -> bool:
    """Whether a control message may go to this worker. Longer ids are not osrdyne's, and a routing key has 255 bytes at
    most: the message could not be encoded."""
    return len(worker_id.encode("utf-8", "surrogateescape")) <= MAX_WORKER_ID_BYTES


def is_pool_id(text: str) -> bool:
    """Pool ids are `[a-z0-9_]{1,32}` and never encoded."""
    return _POOL_ID.match(text) is not None


@dataclass(frozen=True, slots=True)
class PoolNames:
    """Every name that a pool uses on the broker. Source: docs/reference/protocol/names.md."""

    pool: str

    @property
    def requests_exchange(self) -> str:
        return f"{self.pool}-req-xchg"

    @property
    def orphan_exchange(self) -> str:
        return f"{self.pool}-orphan-xchg"

    @property
    def orphan_queue(self) -> QueueName:
        return QueueName(f"{self.pool}-orphan")

    @property
    def dead_letter_exchange(self) -> str:
        return f"{self.pool}-dl-xchg"

    @property
    def dead_letter_queue(self) -> QueueName:
        return QueueName(f"{self.pool}-dl")

    @property
    def activity_exchange(self) -> str:
        return f"{self.pool}-activity-xchg"

    @property
    def activity_queue(self) -> QueueName:
        return QueueName(f"{self.pool}-activity")

    @property
    def poison_queue(self) -> QueueName:
        return QueueName(f"{self.pool}-poison")

    @property
    def poison_exchange(self) -> str:
        """The exchange of the poison queue. `processors.forgeries` drops messages from other exchanges."""
        return f"{self.pool}-poison-xchg"

    @property
    def control_exchange(self) -> str:
        return f"{self.pool}-ctl-xchg"

    @property
    def cancel_exchange(self) -> str:
        return f"{self.pool}-cancel-xchg"

    @property
    def cancel_queue(self) -> QueueName:
        return QueueName(f"{self.pool}-cancel")

    @property
    def progress_exchange(self) -> str:
        return f"{self.pool}-progress-xchg"

    @property
    def progress_queue(self) -> QueueName:
        return QueueName(f"{self.pool}-progress")

    @property
    def audit_exchange(self) -> str:
        return f"{self.pool}-audit-xchg"

    @property
    def audit_queue(self) -> QueueName:
        return QueueName(f"{self.pool}-audit")

    @property
    def audit_policy(self) -> str:
        """The RabbitMQ policy of the audit queue."""
        return f"{self.pool}-audit"

    @property
    def controller_policy(self) -> str:
        """The RabbitMQ policy of the controller's queues."""
        return f"{self.pool}-controller"

    @property
    def inbox_policy(self) -> str:
        """The RabbitMQ policy of the queues from which the leader takes messages of clients."""
        return f"{self.pool}-inbox"

    def inbox_pattern(self) -> str:
        """An anchored regular expression that matches these queues and nothing else."""
        return rf"^{re.escape(self.pool)}-(?:orphan|cancel)$"

    @property
    def poison_policy(self) -> str:
        """The RabbitMQ policy of the poison inventory."""
        return f"{self.pool}-poison"

    def controller_queue_pattern(self) -> str:
        """An anchored regular expression that matches the controller's queues, those of retries included, and no
        others; those that the methods above match, the audit queue and the streams of the log have own policies."""
        names = "leader|dl|activity|progress"
        return rf"^{re.escape(self.pool)}-(?:{names}|retry-[0-9]+|register-[0-9]+|snapshot-[a-z-]+-[0-9]+)$"

    @property
    def log_policy(self) -> str:
        """The RabbitMQ policy of the streams of the log of telemetry."""
        return f"{self.pool}-log"

    def log_stream_pattern(self) -> str:
        """An anchored regular expression that matches the streams of the log and nothing else."""
        return f"^{re.escape(self.log_stream_prefix)}[0-9]+$"

    @property
    def credit_exchange(self) -> str:
        """The exchange for the credit of streamed answers; the routing key is the worker id."""
        return f"{self.pool}-credit-xchg"

    @property
    def leader_queue(self) -> QueueName:
        return QueueName(f"{self.pool}-leader")

    def register_queues(self, term: int) -> tuple[QueueName, ...]:
        """Two pairs of short-lived durability queues (`broker.queues.durability`).

        Odd terms have four names and even terms four others, so that two successive leaders share none.
        """
        first = 1 if term % 2 else 5
        return tuple(QueueName(f"{self.pool}-register-{number}") for number in range(first, first + 4))

    def snapshot_queue_prefix(self, name: str) -> str:
        return f"{self.pool}-snapshot-{name}-"

    def snapshot_queue(self, name: str, term: int) -> QueueName:
        """The queue with the latest snapshot of this name in a term."""
        return QueueName(f"{self.snapshot_queue_prefix(name)}{term}")

    def work_exchange(self, priority: int | None = None) -> str:
        """The exchange for the accepted requests of a priority level in a managed pool; None is the default level."""
        return f"{self.pool}-work-xchg" if priority is None else f"{self.pool}-work-xchg_Pri{priority}"

    @property
    def retry_exchange(self) -> str:
        """The exchange to which workers of a managed pool publish requests for another attempt."""
        return f"{self.pool}-retry-xchg"

    @property
    def retried_exchange(self) -> str:
        """The dead letter exchange of the wait queues, which routes requests to the work exchanges of their levels."""
        return f"{self.pool}-retried-xchg"

    @property
    def retry_queue_prefix(self) -> str:
        return f"{self.pool}-retry-"

    def retry_queue(self, delay_ms: int) -> QueueName:
        """The wait queue for this delay."""
        return QueueName(f"{self.retry_queue_prefix}{delay_ms}")

    def delay_of_retry_queue(self, queue: str) -> int | None:
        """The delay in milliseconds; None for any other queue."""
        digits = queue.removeprefix(self.retry_queue_prefix)
        return int(digits) if _DELAY.match(digits) and queue == self.retry_queue(int(digits)) else None

    @property
    def log_stream_prefix(self) -> str:
        return f"{self.pool}-log-"

    def log_stream(self, partition: int) -> QueueName:
        """The stream of one partition of the pool's log."""
        return QueueName(f"{self.log_stream_prefix}{partition}")

    def partition_of_log_stream(self, queue: str) -> int | None:
        """The partition; None for any other queue."""
        digits = queue.removeprefix(self.log_stream_prefix)
        return int(digits) if _PARTITION.match(digits) and queue == self.log_stream(int(digits)) else None

    @property
    def request_queue_prefix(self) -> str:
        return f"{self.pool}-req-"

    @property
    def policy(self) -> str:
        return f"{self.pool}-req"

    @property
    def key_policy_prefix(self) -> str:
        return f"{self.pool}-limit-"

    def key_policy(self, key: Key) -> str:
        """The policy of the request queues of one key, which replaces `policy` there."""
        return f"{self.key_policy_prefix}{fit_key(key, 200)}"

    def request_queue(self, key: Key, priority: int | None = None) -> QueueName:
        """The request queue of a key; with `priority` 0-9 the queue of that priority level."""
        suffix = "" if priority is None else f"_Pri{priority}"
        room = MAX_NAME_BYTES - len(self.request_queue_prefix) - len(suffix)
        return QueueName(f"{self.request_queue_prefix}{fit_key(key, room)}{suffix}")

    def request_queue_pattern(self) -> str:
        """An anchored regular expression that matches this pool's request queues and nothing else."""
        key = rf"(?:[A-Za-z0-9]|\+[0-9A-F]{{2}})*(?:_[0-9a-f]{{{_HASH_CHARS}}})?"
        return f"^{re.escape(self.request_queue_prefix)}{key}(?:_Pri[0-9])?$"

    def key_queue_pattern(self, key: Key) -> str:
        """An anchored regular expression that matches the request queues of one key and nothing else."""
        level = self.request_queue(key, 0).removesuffix("0")  # with a level, a long key is cut at another place
        return f"^(?:{re.escape(self.request_queue(key))}|{re.escape(level)}[0-9])$"

    def key_of_queue(self, queue: str, arguments: dict[str, object]) -> Key | None:
        """The key of a request queue, decoded from its name or, for a shortened name, from the key argument.

        None if the queue is not one of this pool's base request queues. RabbitMQ does not verify the argument, so it
        counts only if its key has this queue name.
        """
        if not queue.startswith(self.request_queue_prefix):
            return None
        decoded = decode_key(queue.removeprefix(self.request_queue_prefix))
        if decoded is not None:
            return decoded
        named = arguments.get(KEY_ARGUMENT)
        if isinstance(named, str):
            try:
                key = parse_key(named)
            except InvalidKeyError:
                return None
            if self.request_queue(key) == queue:
                return key
        return None

    def key_of_level_queue(self, queue: str, arguments: dict[str, object]) -> tuple[Key, int] | None:
        """Key and priority of the request queue of a priority level; None for any other queue. As `key_of_queue`."""
        match = _LEVEL.search(queue)
        if match is None or not queue.startswith(self.request_queue_prefix):
            return None
        priority = int(match[1])
        named = arguments.get(KEY_ARGUMENT)
        candidates = (decode_key(queue[: match.start()].removeprefix(self.request_queue_prefix)), named)
        for candidate in candidates:
            try:
                key = parse_key(candidate) if isinstance(candidate, str) else None
            except InvalidKeyError:
                continue
            if key is not None and self.request_queue(key, priority) == queue:
                return key, priority
        return None

    def owns(self, name: str) -> bool:
        """Whether the pool has, or may get, a queue or an exchange of this name."""
        prefix = f"{self.pool}-"
        return name.startswith(prefix) and _OWN_NAME.match(name[len(prefix) :]) is not None

    def control_queue(self, worker_id: WorkerId) -> QueueName:
        return QueueName(f"{self.pool}-ctl-{worker_id}")

    def control_group_routing_key(self, key: Key) -> str:
        """Routing key for a control message to all workers of a group."""
        return f"group.{fit_key(key, 200)}"

    def control_worker_routing_key(self, worker_id: WorkerId) -> str:
        """Routing key for a control message to one worker."""
        return f"worker.{worker_id}"


DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"
"""RabbitMQ's direct reply-to. RabbitMQ replaces it in a request by an address: this name, `.` and more text."""


@dataclass(frozen=True, slots=True)
class ReplyAddresses:
    """The allowed reply addresses of a pool. Controller and workers use the same check.

    An answer goes through RabbitMQ's default exchange, where the routing key may name any queue of the virtual host. So
    a caller could make a worker or the controller write into the pool's own queues: into the control queue of another
    key's worker, the dead letters, or the queue of the leader token.

    `prefixes`: None allows every queue but the pool's own; otherwise a reply queue begins with one of them. Direct
    reply-to is always allowed.
    """

    names: PoolNames
    prefixes: tuple[str, ...] | None = None

    def refuse(self, reply_to: str | None) -> str | None:
        """Return why no answer may be sent to the address; None if it may, or if the request needs no answer."""
        if reply_to is None or reply_to == DIRECT_REPLY_TO or reply_to.startswith(f"{DIRECT_REPLY_TO}."):
            return None
        if self.names.owns(reply_to):
            return "the reply address is a name of the pool's own"
        if self.prefixes is not None and not reply_to.startswith(self.prefixes):
            return "requests.reply_to_prefixes does not allow the reply address"
        return None
