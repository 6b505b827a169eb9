"""Proofs: messages of the leader to its own queues, which show that their consumers still get messages.

RabbitMQ before 4.0 may attach a consumer to a queue that was declared again and drop what it delivers to it (broker:
reattached-consumers). No count shows that: the messages are neither ready nor received. The consumers of the controller
publish proofs and skip those that they receive; no processor sees one.
"""

from __future__ import annotations

from osrdyne.amqp import Delivery, Message
from osrdyne.broker.publishing.publisher import LeaderPublisher

_TYPE = "osrdyne.proof"


class Proofs:
    """The proofs of one term.

    `user`: the daemon's own user, as verified by RabbitMQ; None: no proofs, because any client could send one.
    `patience`: seconds after which a proof must have come.
    """

    def __init__(self, publisher: LeaderPublisher, *, user: str | None, patience: float, reattaches: bool) -> None:
        self._publisher = publisher
        self._user = user
        self.patience = patience
        self.are_needed = reattaches and user is not None

    async def publish(self, queue: str) -> None:
        """Publish a proof to a queue. Raises what `LeaderPublisher.publish` raises."""
        message = Message(message_type=_TYPE, user_id=self._user)
        await self._publisher.publish(message, exchange="", routing_key=queue, mandatory=True)

    def is_proof(self, delivery: Delivery) -> bool:
        """Whether the delivery is a proof of this or an earlier term."""
        properties = delivery.properties
        # RabbitMQ refuses a `user-id` that is not the user of the connection.
        return self._user is not None and properties.message_type == _TYPE and properties.user_id == self._user
