"""The environment of a worker. Source: docs/reference/protocol/workers.md."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from osrdyne.errors import ConfigurationError, InvalidKeyError
from osrdyne.protocol.names import Key, PoolNames, QueueName, WorkerId, decode_key, encode_key, parse_key
from osrdyne.protocol.rates import EventRate, rate_from_wire

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
URI_VARIABLE, URI_FILE_VARIABLE = "WORKER_AMQP_URI", "WORKER_AMQP_URI_FILE"
STANDARD_INPUT = "-"
"""In place of a file: the worker reads the URI from its standard input, which no other process can read."""
REFERENCE_POOL = "core"
"""The pool of a worker without `WORKER_POOL`, as in the reference."""
ESCAPED_KEY_VARIABLE = "WORKER_KEY_ESCAPED"
"""Instead of `WORKER_KEY`: the encoded key, as in queue names, for keys that no environment variable can hold."""
PLACEMENT_VARIABLE = "WORKER_PLACEMENT"
PAUSED_VARIABLE = "WORKER_PAUSED"
"""`1`: the worker takes no requests until its leader sends `resume`."""
RATE_VARIABLE = "WORKER_RATE"
"""The rate of the worker until its leader sends another, as in the control message `rate`, JSON."""
LIFELINE_VARIABLE = "WORKER_LIFELINE"
"""The number of a file descriptor, a pipe that ends with the daemon: the worker then ends, too."""
READY_FILE_VARIABLE = "WORKER_READY_FILE"
"""The path of a file that exists while the worker takes requests, for readiness probes of the platform."""


class Placement(StrEnum):
    """The purpose of a worker process."""

    DEDICATED = "dedicated"
    """One key."""
    POOLED = "pooled"
    """Any number of keys, which the leader assigns to it (`protocol.pooled`)."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """The settings that a worker gets when it is started.

    `amqp_uri` contains credentials: it is left out of the repr, and a driver that can mount a secret puts it into a
    file (`WORKER_AMQP_URI_FILE`) instead of the environment. `config` is the pool's worker configuration (JSON). The
    worker publishes requests for another attempt to `retry_exchange`; a direct pool has none. `poison`: the text
    fingerprints of requests that the worker refuses, each with the seconds for which it refuses it. A pooled process
    has no request queues of its own, and its key is `protocol.pooled.PROCESS_KEY`. `paused`: the worker begins as after
    the control message `pause`. `rate`: the rate of the worker until its leader sends another one; None: no limit.
    """

    worker_id: WorkerId
    key: Key
    pool: str
    amqp_uri: str = field(repr=False)
    requests_queues: tuple[QueueName, ...]
    activity_exchange: str
    control_exchange: str
    retry_exchange: str | None = None
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    config: Mapping[str, object] = field(default_factory=dict, repr=False)
    poison: Mapping[str, float] = field(default_factory=dict)
    placement: Placement = Placement.DEDICATED
    paused: bool = False
    rate: EventRate | None = None

    @property
    def requests_queue(self) -> QueueName:
        """The base request queue: the last of `requests_queues`, which come highest priority first."""
        return self.requests_queues[-1]

    def to_variables(self) -> dict[str, str]:
        """Return the environment variables, including the URI.

        An environment variable cannot hold a NUL character: a key with one is in `WORKER_KEY_ESCAPED` instead.
        """
        key = {ESCAPED_KEY_VARIABLE: encode_key(self.key)} if "\0" in self.key else {"WORKER_KEY": self.key}
        retries = {} if self.retry_exchange is None else {"WORKER_RETRY_EXCHANGE": self.retry_exchange}
        poison = {"WORKER_POISON": json.dumps(dict(self.poison))} if self.poison else {}
        # Only if it differs from the default: another variable changes the hash of the settings, and the leader would
        # replace all workers.
        placement = {PLACEMENT_VARIABLE: str(self.placement)} if self.placement is not Placement.DEDICATED else {}
        paused = {PAUSED_VARIABLE: "1"} if self.paused else {}
        rate = {RATE_VARIABLE: json.dumps(self.rate.to_wire())} if self.rate is not None else {}
        queue = {"WORKER_REQUESTS_QUEUE": self.requests_queue} if self.requests_queues else {}
        return {
            "WORKER_ID": self.worker_id,
            **key,
            **retries,
            **poison,
            **placement,
            **paused,
            **rate,
            **queue,
            "WORKER_POOL": self.pool,
            "WORKER_AMQP_URI": self.amqp_uri,
            "WORKER_REQUESTS_QUEUES": json.dumps(self.requests_queues),
            "WORKER_ACTIVITY_EXCHANGE": self.activity_exchange,
            "WORKER_CONTROL_EXCHANGE": self.control_exchange,
            "WORKER_MAX_MSG_SIZE": str(self.max_message_bytes),
            "WORKER_CONFIG": json.dumps(self.config),
        }

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> WorkerEnvironment:
        """Read the environment of a worker process.

        Raises `ConfigurationError` that names the missing or invalid variable. Only the variables of the reference
        protocol are required; the defaults of the others are derived from the pool's name.
        """
        pool = variables.get("WORKER_POOL") or REFERENCE_POOL
        names = PoolNames(pool)
        worker_id = _require(variables, "WORKER_ID")
        placement = _placement(variables)
        if variables.get("WORKER_ID_USE_HOSTNAME", "").strip().lower() not in {"", "0", "false"}:
            worker_id = os.uname().nodename
        return cls(
            worker_id=WorkerId(worker_id),
            key=read_key(variables),
            pool=pool,
            amqp_uri=_amqp_uri(variables),
            requests_queues=_queues(variables, pool, placement),
            activity_exchange=variables.get("WORKER_ACTIVITY_EXCHANGE", names.activity_exchange),
            control_exchange=variables.get("WORKER_CONTROL_EXCHANGE", names.control_exchange),
            retry_exchange=variables.get("WORKER_RETRY_EXCHANGE") or None,
            max_message_bytes=_size(variables),
            config=config_from_variables(variables),
            poison=_poison(variables),
            placement=placement,
            paused=variables.get(PAUSED_VARIABLE) == "1",
            rate=_rate(variables),
        )


def _require(variables: Mapping[str, str], name: str) -> str:
    value = variables.get(name)
    if not value and not (name == "WORKER_KEY" and value == ""):
        raise ConfigurationError(
            f"The environment variable {name} is missing; the osrdyne daemon sets it, "
            "and `osrdyne groups env KEY` prints it for a worker that you start yourself."
        )
    return value or ""


def read_key(variables: Mapping[str, str]) -> Key:
    """The key of the worker. Raises `ConfigurationError`."""
    escaped = variables.get(ESCAPED_KEY_VARIABLE)
    try:
        key = parse_key(_require(variables, "WORKER_KEY")) if escaped is None else decode_key(escaped)
    except InvalidKeyError as error:
        raise ConfigurationError(f"WORKER_KEY: {error}") from error
    if key is None:
        raise ConfigurationError("WORKER_KEY_ESCAPED is not an escaped key (letters, digits and +HH).")
    return key


def _amqp_uri(variables: Mapping[str, str]) -> str:
    file = variables.get(URI_FILE_VARIABLE)
    if not file:
        return _require(variables, URI_VARIABLE)
    try:
        if file == STANDARD_INPUT:
            with open(0, encoding="utf-8", closefd=False) as standard_input:
                text = standard_input.read()
        else:
            text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"WORKER_AMQP_URI_FILE: cannot read {file}: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise ConfigurationError(f"WORKER_AMQP_URI_FILE: {file} is not UTF-8 text.") from None
    if not (uri := text.strip()):
        raise ConfigurationError(
            f"WORKER_AMQP_URI_FILE: {file} is empty: another worker has read it, or none was given."
        )
    return uri


def _placement(variables: Mapping[str, str]) -> Placement:
    text = variables.get(PLACEMENT_VARIABLE) or Placement.DEDICATED
    if text not in list(Placement):
        raise ConfigurationError(f"{PLACEMENT_VARIABLE} must be dedicated or pooled, not {text!r}.")
    return Placement(text)


def _queues(variables: Mapping[str, str], pool: str, placement: Placement) -> tuple[QueueName, ...]:
    text = variables.get("WORKER_REQUESTS_QUEUES")
    if not text and placement is Placement.POOLED:
        return ()
    if not text:
        # The reference daemon passes no queue; its workers derive the name from the pool and the unescaped key.
        return (QueueName(variables.get("WORKER_REQUESTS_QUEUE") or f"{pool}-req-{read_key(variables)}"),)
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if placement is Placement.POOLED and names == []:
        return ()
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError("WORKER_REQUESTS_QUEUES must be a JSON list of queue names.")
    return tuple(QueueName(name) for name in names)


def _size(variables: Mapping[str, str]) -> int:
    text = variables.get("WORKER_MAX_MSG_SIZE", str(DEFAULT_MAX_MESSAGE_BYTES))
    if re.fullmatch(r"0*[1-9][0-9]{0,17}", text) is None:
        raise ConfigurationError(f"WORKER_MAX_MSG_SIZE must be a number of bytes, not {text!r}.")
    return int(text)


def config_from_variables(variables: Mapping[str, str]) -> Mapping[str, object]:
    """The document in `WORKER_CONFIG`. Raises `ConfigurationError`."""
    try:
        config = json.loads(variables.get("WORKER_CONFIG") or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"WORKER_CONFIG is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigurationError("WORKER_CONFIG must be a JSON object.")
    return config


def _poison(variables: Mapping[str, str]) -> Mapping[str, float]:
    try:
        texts = json.loads(variables.get("WORKER_POISON") or "{}")
    except (ValueError, RecursionError):
        texts = None
    if not isinstance(texts, dict) or not all(isinstance(seconds, int | float) for seconds in texts.values()):
        raise ConfigurationError("WORKER_POISON must be a JSON object of fingerprints and seconds.")
    return texts


def _rate(variables: Mapping[str, str]) -> EventRate | None:
    try:
        return rate_from_wire(json.loads(variables.get(RATE_VARIABLE) or "null"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{RATE_VARIABLE} is not a rate: {error}.") from error
