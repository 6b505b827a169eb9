"""Where an answer may go. The same check for controller and workers.

An answer goes through RabbitMQ's default exchange, where its routing key names any queue of the virtual host. So a
caller could have a worker or the controller write into the pool's own queues: into the control queue of another key's
worker, into the dead letters, into the queue of the leader token.
"""

from __future__ import annotations

from dataclasses import dataclass

from osrdyne.protocol.names import PoolNames

DIRECT_REPLY_TO = "amq.rabbitmq.reply-to"
"""RabbitMQ's direct reply-to: by itself, or followed by `.` and the address that it was replaced by."""


@dataclass(frozen=True, slots=True)
class ReplyAddresses:
    """The reply addresses that a pool answers to.

    `prefixes`: None allows every queue but the pool's own; otherwise a reply queue begins with one of them. Direct
    reply-to is always allowed.
    """

    names: PoolNames
    prefixes: tuple[str, ...] | None = None

    def refuse(self, reply_to: str | None) -> str | None:
        """Why no answer may go there; None: it may, or the request wants none."""
        if reply_to is None or reply_to == DIRECT_REPLY_TO or reply_to.startswith(f"{DIRECT_REPLY_TO}."):
            return None
        if self.names.owns(reply_to):
            return "the reply address is a name of the pool's own"
        if self.prefixes is not None and not reply_to.startswith(self.prefixes):
            return "requests.reply_to_prefixes does not allow the reply address"
        return None
