"""Whether workers log in to RabbitMQ as an administrator. Asked by the daemon when it leads, and by `doctor`."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from osrdyne.aio.clock import Clock
from osrdyne.broker.management.client import ManagementClient
from osrdyne.config.models import BrokerSettings
from osrdyne.errors import BrokerAccessError
from osrdyne.protocol.uri import with_user

REMEDY = "Set broker.scoped_credentials: true, or name a user with fewer rights in broker.worker_uri."


async def administrator_of_workers(settings: BrokerSettings, *, clock: Clock) -> str | None:
    """The user in the URI that every worker is given, if that user is an administrator of RabbitMQ.

    RabbitMQ is asked as that very user, so that the daemon's own user needs no rights for it. Raises `BrokerError`.
    """
    parts = urlsplit(settings.effective_worker_uri())
    user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
    address = SecretStr(with_user(settings.effective_management_uri(), user, password))
    async with ManagementClient(settings.model_copy(update={"management_uri": address}), clock=clock) as management:
        try:
            whoami = await management.whoami()
        except BrokerAccessError:  # a user without tags may not use the HTTP API at all
            return None
    return user if whoami.may_make_users else None


def describe(user: str) -> str:
    return f"Workers log in as {user!r}, an administrator of RabbitMQ: code in a worker can do everything there."
