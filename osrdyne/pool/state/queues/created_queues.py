"""The queues that clients created for keys, and their policies, in this term. No I/O.

`QueueLifetimes` (`pool.queues.lifetimes`) writes it. The components that depend on the policy of a key, or on the
removal of its queue, read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from osrdyne.aio.signals import ChangeFeed
from osrdyne.errors import ConfigurationError
from osrdyne.ingress.policies.elements import BY_NAME
from osrdyne.ingress.policies.lifetimes import CreatedQueue
from osrdyne.ingress.policies.policy import Bounds, effective_policy
from osrdyne.ingress.policies.table import FoundPolicy
from osrdyne.protocol.names import Key


def policy_of_record(record: CreatedQueue, bounds: Bounds) -> FoundPolicy:
    """The effective policy of a created queue. Raises `ConfigurationError` if its proposal is not valid."""
    try:
        proposed = {BY_NAME[name].field: BY_NAME[name].parse(value) for name, value in record.proposal.items()}
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"the stored policy of a created queue is invalid: {error}") from error
    now = datetime.fromtimestamp(record.renewed_at, UTC)
    return FoundPolicy(None, effective_policy(proposed, bounds=bounds, now=now), is_own=True)


class CreatedQueues:
    """The records of a term and their policies, by key. `policy_changes`: keys whose policy may have changed, by a
    record or by the document of policies; `ActivePolicies` notifies it too."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.policy_changes: ChangeFeed[Key] = ChangeFeed()
        self._records: dict[Key, CreatedQueue] = {}
        self._policies: Mapping[Key, FoundPolicy] = {}

    def get(self, key: Key) -> CreatedQueue | None:
        return self._records.get(key)

    def all(self) -> Sequence[CreatedQueue]:
        return list(self._records.values())

    @property
    def has_any(self) -> bool:
        return bool(self._records)

    def is_ending(self, key: Key) -> bool:
        """Whether the queue of this key is being removed. Called for each request."""
        record = self._records.get(key)
        return record is not None and record.is_ending

    def policy(self, key: Key) -> FoundPolicy | None:
        """The policy of the created queue of a key; None if it has none."""
        return self._policies.get(key)

    def replace(self, records: Iterable[CreatedQueue]) -> None:
        """Replace all records. Raises `ConfigurationError` if the proposal of one is not valid; then none changes."""
        after = {record.key: record for record in records}
        policies = {
            key: self._policies[key] if self._is_known(record) else policy_of_record(record, self.bounds)
            for key, record in after.items()
        }
        before, self._records, self._policies = self._records, after, policies
        for key in before.keys() | after.keys():
            if before.get(key) != after.get(key):
                self.policy_changes.notify(key)

    def _is_known(self, record: CreatedQueue) -> bool:
        known = self._records.get(record.key)
        return known is not None and (known.proposal, known.renewed_at) == (record.proposal, record.renewed_at)
