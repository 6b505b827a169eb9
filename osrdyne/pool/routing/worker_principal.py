"""The principal for whom the workers of a pool receive requests: `worker.principal`, the name of an API token.

Where a policy demands the grant `listen` (Authorization), the leader starts workers of a key only while this principal
has the grant for it. With `broker.scoped_credentials`, RabbitMQ lets no other program consume from the queue with the
user of a worker. Workers present nothing themselves.
"""

from __future__ import annotations

import math

from osrdyne.auth.decision import AccessRefusal, check_grant
from osrdyne.auth.grants import Grant, Principal
from osrdyne.logs import Logger, get_logger
from osrdyne.pool.context import TermContext
from osrdyne.pool.ports import TokenVerifier
from osrdyne.pool.routing.policies import ActivePolicies
from osrdyne.protocol.names import Key

CHECK_INTERVAL = 5.0  # Seconds after which a token that was revoked, expired or created counts at the latest.


class WorkerPrincipal:
    """The principal of the workers in one term."""

    def __init__(self, context: TermContext, *, policies: ActivePolicies, verifier: TokenVerifier | None) -> None:
        self._clock = context.clock
        self._name = context.settings.worker.principal
        self._policies = policies
        self._verifier = verifier
        self._identity: Principal | AccessRefusal = AccessRefusal.NO_KEYS
        self._log: Logger = get_logger("worker_principal", pool=context.names.pool, principal=self._name)

    def refuse(self, key: str) -> str | None:
        """Why workers of this key may not receive requests, as part of a sentence; None if they may."""
        if self._name is None:
            return "the pool has no worker.principal"
        identity = self._identity
        if isinstance(identity, AccessRefusal):
            return f"{self._name}: {identity.value}"
        denial = check_grant(identity, Grant.LISTEN, key)
        return None if denial is None else f"{self._name}: {denial.refusal.value}"

    def is_refused(self, key: Key) -> bool:
        """Whether a policy demands the grant from the workers of this key, and their principal does not have it."""
        found = self._policies.of(key)
        return found is not None and found.policy.authorization.demands_receive and self.refuse(key) is not None

    async def load(self) -> None:
        """Find the principal. Called before the first worker is started."""
        if self._name is None or self._verifier is None:
            return
        before, self._identity = self._identity, await self._verifier.named(self._name)
        if before != self._identity:
            refused = self._identity.value if isinstance(self._identity, AccessRefusal) else None
            self._log.info("principal of the workers changed", refused=refused)
            self._policies.notify_present()

    async def run(self) -> None:
        """Find it again at intervals. Runs until cancelled."""
        while True:
            await self._clock.sleep(math.inf if self._name is None else CHECK_INTERVAL)
            await self.load()
