"""`osrdyne credentials …`: RabbitMQ users for the clients of a pool."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Annotated

import typer

from osrdyne.cli.options import ConfigOption, PoolOption, SetOption, load
from osrdyne.config.models import Settings
from osrdyne.errors import ConfigurationError
from osrdyne.protocol.names import PoolNames
from osrdyne.protocol.uri import with_user

app = typer.Typer(help="Create and remove RabbitMQ users for clients.", no_args_is_help=True)

ClientOption = Annotated[
    str, typer.Option("--client", metavar="NAME", help="Name of the client, which becomes the RabbitMQ user.")
]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


@app.command()
def create(
    client: ClientOption, config: ConfigOption = None, assignments: SetOption = None, pool: PoolOption = None
) -> None:
    """Create a RabbitMQ user that may only send requests to the pool, and print its AMQP URI once."""
    settings = load(config, assignments, pool=pool).settings
    password = secrets.token_urlsafe(32)
    asyncio.run(_create(settings, _checked(client), password))
    typer.echo(with_user(settings.broker.effective_uri(), client, password))


@app.command()
def revoke(
    client: ClientOption, config: ConfigOption = None, assignments: SetOption = None, pool: PoolOption = None
) -> None:
    """Remove the user of a client. RabbitMQ closes its connections at once."""
    settings = load(config, assignments, pool=pool).settings
    asyncio.run(_revoke(settings, _checked(client)))
    typer.echo(f"The user {client} is removed.")


async def _create(settings: Settings, user: str, password: str) -> None:
    from osrdyne.broker.management.client import ManagementClient
    from osrdyne.broker.management.credentials import client_permissions

    async with ManagementClient(settings.broker) as management:
        if user in await management.list_users(user):
            raise ConfigurationError(f"RabbitMQ has a user {user!r} already: revoke it first, or choose another name.")
        await management.put_user(user, password=password)
        try:
            await management.put_permissions(user, client_permissions(PoolNames(settings.pool.id)))
        except BaseException:
            await management.delete_user(user)  # it has no permissions, but its name would be taken
            raise


async def _revoke(settings: Settings, user: str) -> None:
    from osrdyne.broker.management.client import ManagementClient
    from osrdyne.broker.management.credentials import client_permissions

    async with ManagementClient(settings.broker) as management:
        if user not in await management.list_users(user):
            raise ConfigurationError(f"RabbitMQ has no user {user!r}.")
        if await management.permissions(user) not in {None, client_permissions(PoolNames(settings.pool.id))}:
            raise ConfigurationError(
                f"The user {user!r} has other permissions than a client of the pool {settings.pool.id}: remove it with "
                "rabbitmqctl delete_user."
            )
        await management.delete_user(user)


def _checked(name: str) -> str:
    """Return the name. Raises `ConfigurationError` if it is not valid for a client."""
    if _NAME.fullmatch(name) is None or name.startswith("osrdyne-"):
        raise ConfigurationError(
            f"--client: {name!r} is not a name for a client: use up to 100 letters, digits and . _ -; names that begin "
            "with osrdyne- are for workers."
        )
    return name
