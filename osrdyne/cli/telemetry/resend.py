"""`osrdyne telemetry resend`: send a range of the log to another pool."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from pathlib import Path
from typing import Annotated, cast

import typer

from osrdyne.aio.clock import SystemClock
from osrdyne.amqp import connect
from osrdyne.amqp.streams import StreamConnection, StreamRange
from osrdyne.broker.session import connection_options
from osrdyne.cli.options import ConfigOption, SetOption, load
from osrdyne.cli.telemetry.replay import BeginOption, EndOption, PartitionsOption, range_end
from osrdyne.errors import BrokerNotFoundError, ConfigurationError
from osrdyne.ingress.quotas.question import parse_rate
from osrdyne.protocol.names import PoolNames, is_pool_id
from osrdyne.telemetry.resend import Progress, Resend, ResendOrder


def resend(
    to_pool: Annotated[
        str, typer.Option("--to-pool", metavar="ID", help="Pool that receives the requests: not that of the log.")
    ],
    begin: BeginOption = None,
    end: EndOption = None,
    partitions: PartitionsOption = None,
    rate: Annotated[
        str, typer.Option(metavar="RATE", help="Messages of all partitions together, e.g. 100/s; 0: no limit.")
    ] = "100/s",
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the progress, so that the same command continues it.")
    ] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Send a range of the log to another pool, as one-way requests with the original message ids."""
    settings = load(config, assignments, client=True).settings
    if not is_pool_id(to_pool):
        raise typer.BadParameter(f"{to_pool!r} is not the id of a pool", param_hint="--to-pool")
    if to_pool == settings.pool.id:
        raise typer.BadParameter(
            "the pool of the log would write the messages to its log again; name another pool", param_hint="--to-pool"
        )
    try:
        per_minute = cast(Fraction, parse_rate(rate))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from error
    order = ResendOrder(settings.pool.id, to_pool, range_end(begin, "--from"), range_end(end, "--to"))
    progress = Progress.load(order, state)
    numbers = sorted(set(partitions)) if partitions else range(settings.telemetry.partitions)

    def on_sent(partition: int, left: StreamRange) -> None:
        typer.echo(f"partition {partition}: {left.start:,} of {left.stop:,}", err=True)

    async def run() -> int:
        options = connection_options(settings, purpose="telemetry resend", heartbeat=60)
        connection = await connect(options)
        try:
            channel = await connection.channel(confirms=True)
            try:
                # Publishing to a missing exchange would close the channel.
                await channel.declare_exchange(PoolNames(to_pool).requests_exchange, "direct", passive=True)
            except BrokerNotFoundError:
                raise ConfigurationError(f"--to-pool: RabbitMQ has no pool {to_pool}; start its daemon once.") from None
            async with await StreamConnection.open(options, silence=options.rpc_timeout) as streams:
                one = Resend(
                    progress,
                    streams=streams,
                    publisher=channel,
                    rate=float(per_minute) / 60 or None,
                    clock=SystemClock(),
                    on_sent=on_sent,
                )
                return sum([await one.partition(partition) for partition in numbers])
        finally:
            await connection.close()

    typer.echo(f"{asyncio.run(run()):,} messages sent to {to_pool}.")
