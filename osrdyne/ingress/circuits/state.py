"""The state of a circuit breaker: plain data, and its JSON form, which the next leader reads.

Source: docs/design/circuits.md.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from osrdyne.errors import InvalidKeyError
from osrdyne.ingress.circuits.samples import Sample, Samples, Side
from osrdyne.ingress.documents.problems import InvalidDocumentError, Problem
from osrdyne.protocol.names import Key, parse_key

VERSION = 1


class CircuitState(IntEnum):
    """The number is the value of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class CircuitId:
    """A circuit of a route, None for requests of no named route; with a `key` the circuit of one group only."""

    route: str | None
    key: Key | None = None

    @property
    def hash(self) -> str:
        """16 hexadecimal digits: names of routes and keys are data, and may not be part of a URL."""
        text = json.dumps([self.route, self.key])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class Probe:
    """The request that decides about a half-open circuit; `request_id` is None until it was sent."""

    key: Key
    since_ms: int
    request_id: str | None = None


@dataclass(slots=True)
class Circuit:
    """One circuit. `since_ms`: when it got its state, milliseconds since the epoch.

    `held`: the groups that wait for it. `candidates`: those of them that may have a request, the least recently probed
    one first. `released`: the groups that it held until it was closed and that have not been resumed since.
    """

    id: CircuitId
    state: CircuitState = CircuitState.CLOSED
    since_ms: int = 0
    samples: Samples = field(default_factory=Samples)
    held: dict[Key, None] = field(default_factory=dict)
    released: dict[Key, None] = field(default_factory=dict)
    candidates: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    probe: Probe | None = None

    def copy(self) -> Circuit:
        samples = Samples(self.samples.successes.copy(), self.samples.failures.copy())
        probe = None if self.probe is None else replace(self.probe)
        return replace(
            self,
            samples=samples,
            held=dict(self.held),
            released=dict(self.released),
            candidates=self.candidates.copy(),
            probe=probe,
        )

    @property
    def paused(self) -> int:
        """The number of groups that are paused because of it."""
        return len(self.held) + len(self.released)


@dataclass(slots=True)
class BreakerState:
    """The state that is stored for the next leader. Times are milliseconds since the epoch.

    `circuits`: in the order of their last outcome, the oldest first. `paused`: the paused groups of the pool, in the
    order in which they were paused; groups that no circuit holds are to be resumed. `resumed_at_ms`: when the last
    group was resumed. `now_ms`: the time of the last change, to detect a clock that was set back.
    """

    circuits: OrderedDict[CircuitId, Circuit] = field(default_factory=OrderedDict)
    paused: dict[Key, None] = field(default_factory=dict)
    resumed_at_ms: int | None = None
    now_ms: int = 0

    def copy(self) -> BreakerState:
        """A copy that later changes do not affect, to encode it in a thread."""
        circuits = OrderedDict((one, circuit.copy()) for one, circuit in self.circuits.items())
        return BreakerState(circuits, dict(self.paused), self.resumed_at_ms, self.now_ms)

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values; `state_from_json` reads them."""
        return {
            "version": VERSION,
            "now": self.now_ms,
            "resumed_at": self.resumed_at_ms,
            "paused": list(self.paused),
            "circuits": [_circuit_to_json(circuit) for circuit in self.circuits.values()],
        }


def state_from_json(value: object) -> BreakerState:
    """Parse a stored state. Raises `InvalidDocumentError` with the path of the first error. A leader then begins with
    closed circuits, because an unreadable state must not keep groups paused."""
    members = _members(value, "")
    if members.get("version") != VERSION:
        raise _invalid("version", f"{VERSION} is expected")
    circuits: OrderedDict[CircuitId, Circuit] = OrderedDict()
    for number, item in enumerate(_list(members.get("circuits"), "circuits")):
        circuit = _circuit_from_json(item, f"circuits[{number}]")
        if circuit.id in circuits:
            raise _invalid(f"circuits[{number}]", "the circuit is given twice")
        circuits[circuit.id] = circuit
    paused = dict.fromkeys(_keys(members.get("paused"), "paused"))
    if any(not circuit.held.keys() | circuit.released.keys() <= paused.keys() for circuit in circuits.values()):
        raise _invalid("paused", "a group that a circuit holds or has released is missing")
    resumed_at = members.get("resumed_at")
    return BreakerState(
        circuits,
        paused,
        None if resumed_at is None else _moment(resumed_at, "resumed_at"),
        _moment(members.get("now"), "now"),
    )


def _circuit_to_json(circuit: Circuit) -> dict[str, Any]:
    # Each key once, in a table: thousands of samples have a few keys.
    keys = {key: number for number, key in enumerate(circuit.samples.groups())}
    probe = circuit.probe
    return {
        "route": circuit.id.route,
        "key": circuit.id.key,
        "state": circuit.state.name.lower(),
        "since": circuit.since_ms,
        "keys": list(keys),
        "successes": [[one, keys[found.key], found.at_ms] for one, found in circuit.samples.successes.items()],
        "failures": [[one, keys[found.key], found.at_ms] for one, found in circuit.samples.failures.items()],
        "held": list(circuit.held),
        "released": list(circuit.released),
        "candidates": list(circuit.candidates),
        "probe": None if probe is None else {"key": probe.key, "since": probe.since_ms, "request": probe.request_id},
    }


def _circuit_from_json(value: object, path: str) -> Circuit:
    members = _members(value, path)
    route, key = members.get("route"), members.get("key")
    if not isinstance(route, str | None):
        raise _invalid(f"{path}.route", "a text or null is expected")
    states = {state.name.lower(): state for state in CircuitState}
    name = members.get("state")
    if not isinstance(name, str) or name not in states:
        raise _invalid(f"{path}.state", f"one of {', '.join(states)} is expected")
    keys = _keys(members.get("keys"), f"{path}.keys")
    sides = [_side(members.get(side), keys, f"{path}.{side}") for side in ("successes", "failures")]
    if sides[0].keys() & sides[1].keys():
        raise _invalid(f"{path}.failures", "a request is also among the successes")
    held = dict.fromkeys(_keys(members.get("held"), f"{path}.held"))
    # Missing in the states of earlier versions.
    released = dict.fromkeys(_keys(members.get("released", []), f"{path}.released"))
    candidates = OrderedDict.fromkeys(_keys(members.get("candidates"), f"{path}.candidates"))
    if not candidates.keys() <= held.keys():
        raise _invalid(f"{path}.candidates", "the circuit does not hold a group of them")
    state = states[name]
    if state is CircuitState.CLOSED and held:
        raise _invalid(f"{path}.held", "a closed circuit holds no group")
    probe = _probe(members.get("probe"), f"{path}.probe")
    if probe is not None and (state is not CircuitState.HALF_OPEN or probe.key not in held):
        raise _invalid(f"{path}.probe", "only a half-open circuit has one, of a group that it holds")
    return Circuit(
        CircuitId(route, None if key is None else _key(key, f"{path}.key")),
        state,
        _moment(members.get("since"), f"{path}.since"),
        Samples(*sides),
        held,
        released,
        candidates,
        probe,
    )


def _side(value: object, keys: list[Key], path: str) -> Side:
    side: Side = OrderedDict()
    for number, item in enumerate(_list(value, path)):
        match item:
            case [str(request_id), int(place), int(at_ms)] if 0 <= place < len(keys) and request_id not in side:
                side[request_id] = Sample(keys[place], at_ms)
            case _:
                raise _invalid(f"{path}[{number}]", "a new request, the place of its key and a time are expected")
    times = [sample.at_ms for sample in side.values()]
    if times != sorted(times):
        raise _invalid(path, "the samples are not in the order of time")
    return side


def _probe(value: object, path: str) -> Probe | None:
    if value is None:
        return None
    members = _members(value, path)
    request_id = members.get("request")
    if not isinstance(request_id, str | None):
        raise _invalid(f"{path}.request", "a text or null is expected")
    return Probe(_key(members.get("key"), f"{path}.key"), _moment(members.get("since"), f"{path}.since"), request_id)


def _members(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(path, "an object is expected")
    return value


def _list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise _invalid(path, "a list is expected")
    return value


def _keys(value: object, path: str) -> list[Key]:
    keys = [_key(one, f"{path}[{number}]") for number, one in enumerate(_list(value, path))]
    if len(set(keys)) < len(keys):
        raise _invalid(path, "a key is given twice")
    return keys


def _key(value: object, path: str) -> Key:
    if not isinstance(value, str):
        raise _invalid(path, "a text is expected")
    try:
        return parse_key(value)
    except InvalidKeyError as error:
        raise _invalid(path, str(error)) from None


def _moment(value: object, path: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise _invalid(path, "milliseconds since the epoch are expected")


def _invalid(path: str, message: str) -> InvalidDocumentError:
    return InvalidDocumentError([Problem(message, path=path)])
