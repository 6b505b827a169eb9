"""`osrdyne telemetry simulate`: publish messages of simulated devices, made by `osrdyne.telemetry.simulator`.

Exit codes: 0 done, 1 some messages were not answered, 2 wrong usage or configuration, 4 broker unreachable, 130
interrupted.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import suppress
from datetime import UTC, datetime
from fractions import Fraction
from typing import Annotated

import typer

from osrdyne.aio.clock import SystemClock
from osrdyne.cli.options import ConfigOption, JsonOption, PoolOption, SetOption, TokenFileOption, load, positive_seconds
from osrdyne.cli.output import print_json, print_table
from osrdyne.cli.requests.call import UNREACHABLE, broker_uri, token_for
from osrdyne.client import AsyncClient
from osrdyne.client.request import MAX_TIMEOUT
from osrdyne.config.types import parse_duration, parse_size
from osrdyne.errors import BrokerUnavailableError, InvalidKeyError
from osrdyne.ingress.quotas.question import exact, parse_rate
from osrdyne.logs import configure_logging
from osrdyne.telemetry.simulator import DEFAULT_KEY, SimulatedMessage, Simulation, simulate
from osrdyne.telemetry.simulator_run import Devices, RunSummary, SimulatorRun

FAILED, INTERRUPTED = 1, 130
_OPTIONS = {"late_by": "--late-by", "out_of_order": "--out-of-order", "clock_skew": "--clock-skew"}
_OPTIONS |= {"messages_a_minute": "--rate", "alarms_a_minute": "--alarms"}


def simulate_devices(
    devices: Annotated[int, typer.Option(metavar="NUMBER", help="Number of devices.")] = 50,
    sites: Annotated[int, typer.Option(metavar="NUMBER", help="Number of sites that the devices are at.")] = 1,
    rate: Annotated[
        str,
        typer.Option(
            metavar="RATE", help="Messages of all devices together, e.g. 277/min, 12/s; a number: messages a minute."
        ),
    ] = "60/min",
    per_device: Annotated[
        bool, typer.Option("--per-device", help="--rate and --alarms are the rates of each device.")
    ] = False,
    events: Annotated[float, typer.Option(metavar="NUMBER", help="Events in one message, on average.")] = 1.0,
    size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Exact size of each event, e.g. 2.5KB. Default: not padded.")
    ] = None,
    duration: Annotated[str, typer.Option(metavar="DURATION", help="Simulated time, e.g. 30m.")] = "1m",
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="The same seed and start give the same messages.")] = 1,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time of the first message, e.g. 2026-11-23T08:00:00Z. Default: so that the simulated time ends now, "
            "or begins now at the speed 1.",
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(metavar="FACTOR", help="Times faster than real time; 0: as fast as possible.")
    ] = 1.0,
    key: Annotated[
        str, typer.Option(metavar="TEMPLATE", help="Key of messages; {site} and {device} are replaced.")
    ] = DEFAULT_KEY,
    path: Annotated[str, typer.Option(metavar="PATH", help="Path of messages.")] = "/telemetry",
    alarms: Annotated[
        str, typer.Option(metavar="RATE", help="Alarms in addition to --rate, e.g. 2/min; header level=alarm.")
    ] = "0",
    alarm_path: Annotated[str, typer.Option(metavar="PATH", help="Path of alarms.")] = "/alarm",
    late: Annotated[float, typer.Option(metavar="SHARE", help="Share of messages with late events, 0 to 1.")] = 0.0,
    late_by: Annotated[str, typer.Option(metavar="DURATION", help="Maximum delay of late events.")] = "10m",
    out_of_order: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of messages sent after the next one of their device.")
    ] = 0.0,
    clock_skew: Annotated[
        str, typer.Option(metavar="DURATION", help="Maximum error of the clock of a device; constant for each device.")
    ] = "0s",
    duplicates: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of messages sent twice, with one message id.")
    ] = 0.0,
    invalid: Annotated[float, typer.Option(metavar="SHARE", help="Share of messages whose JSON is cut off.")] = 0.0,
    oversized: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of messages whose first event has 33 KiB.")
    ] = 0.0,
    one_way: Annotated[
        bool,
        typer.Option(
            "--one-way", help="Request no answers: RabbitMQ confirms the messages, and refusals are not counted."
        ),
    ] = False,
    in_flight: Annotated[
        int,
        typer.Option(metavar="NUMBER", min=1, max=100_000, help="Maximum number of messages that wait for an answer."),
    ] = 500,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Time limit for an answer.")] = "60s",
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the messages as JSON lines, at once, and send none.")
    ] = False,
    token_file: TokenFileOption = None,
    broker: Annotated[
        str | None, typer.Option(metavar="URI", help="AMQP URI without a password. Default: from the configuration.")
    ] = None,
    as_json: JsonOption = False,
    pool: PoolOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Publish messages of simulated devices, and print how many were confirmed or refused. Ctrl-C ends it earlier."""
    configure_logging(level="error")
    if not 0 <= speed < float("inf"):
        raise typer.BadParameter("must be 0 or more", param_hint="--speed")
    factor = devices if per_device else 1
    length = exact(_duration(duration, "--duration"))
    try:
        simulation = Simulation(
            devices=devices,
            sites=sites,
            messages_a_minute=_rate(rate, "--rate") * factor,
            events=exact(events),
            event_bytes=None if size is None else _size(size),
            duration=length,
            seed=seed,
            start_ms=_start(start, float(length), speed),
            key=key,
            alarms_a_minute=_rate(alarms, "--alarms") * factor,
            late=late,
            late_by=_duration(late_by, "--late-by"),
            out_of_order=out_of_order,
            clock_skew=_duration(clock_skew, "--clock-skew"),
            duplicates=duplicates,
            invalid=invalid,
            oversized=oversized,
        )
    except InvalidKeyError as error:
        raise typer.BadParameter(str(error), param_hint="--key") from None
    except ValueError as error:
        name, _, problem = str(error).rpartition(": ")
        raise typer.BadParameter(problem, param_hint=_OPTIONS.get(name, f"--{name or 'events'}")) from None
    if print_only:
        for message in simulate(simulation):
            typer.echo(_line(message))
        return
    limit = positive_seconds(timeout, option="--timeout", at_most=MAX_TIMEOUT)
    settings = load(config, assignments, pool=pool, client=True).settings
    client = AsyncClient(
        broker_uri(broker, settings), settings.pool.id, name="osrdyne simulate", token=token_for(token_file)
    )
    sender = Devices(client, path=path, alarm_path=alarm_path, timeout=limit, one_way=one_way)
    run = SimulatorRun(sender.publish, clock=SystemClock(), speed=speed, in_flight=in_flight)
    summary = run.summary
    try:
        asyncio.run(_run(run, client, simulation))
    except BrokerUnavailableError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(UNREACHABLE) from None
    except KeyboardInterrupt:
        summary.interrupted = True
    if as_json:
        print_json(summary.to_json())
    else:
        _print(summary)
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)
    if summary.unanswered:
        raise typer.Exit(FAILED)


async def _run(run: SimulatorRun, client: AsyncClient, simulation: Simulation) -> None:
    loop = asyncio.get_running_loop()
    async with client:
        try:
            # The first signal waits for the answers, the second one does not.
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, _stop, loop, run)
            await run.run(simulate(simulation))
        finally:
            _default_signals(loop)


def _stop(loop: asyncio.AbstractEventLoop, run: SimulatorRun) -> None:
    run.stop()
    _default_signals(loop)  # before the sentence: who reads it may press Ctrl-C again
    if (waiting := run.summary.waiting) > 0:
        messages = "1 message" if waiting == 1 else f"{waiting} messages"
        with suppress(OSError):  # Ctrl-C ends the reader of a pipe too
            typer.echo(f"Waiting for the answers to {messages}; a second Ctrl-C does not wait for them.", err=True)


def _default_signals(loop: asyncio.AbstractEventLoop) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)


def _start(text: str | None, length: float, speed: float) -> int:
    if text is None:
        return max(0, int(1000 * (time.time() - (length if speed == 0 else length * max(0.0, 1 - 1 / speed)))))
    try:
        moment = datetime.fromisoformat(text)
        return round(1000 * (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a time; write 2026-11-23T08:00:00Z", param_hint="--start") from None


def _rate(text: str, option: str) -> Fraction:
    try:
        rate = parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    assert isinstance(rate, Fraction)
    return rate


def _duration(text: str, option: str) -> float:
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    assert isinstance(duration, float)
    return duration


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from None
    assert isinstance(size, int)
    return size


def _line(message: SimulatedMessage) -> str:
    return json.dumps(
        {
            "at": message.at_us / 1_000_000,
            "key": message.key,
            "message_id": message.message_id,
            "kind": message.kind,
            "headers": message.headers,
            "body": message.body.decode(),
        }
    )


def _print(summary: RunSummary) -> None:
    rows = (
        (
            str(kind),
            f"{one.sent:,}",
            f"{one.confirmed:,}",
            f"{one.refused.total():,}",
            f"{one.unanswered.total():,}",
            _milliseconds(one.times.percentile(0.5)),
            _milliseconds(one.times.percentile(0.95)),
        )
        for kind, one in sorted(summary.kinds.items())
    )
    columns = ("kind", "sent", "confirmed", "refused", "unanswered", "p50", "p95")
    print_table(columns, rows, empty="No message was sent.")
    rate = summary.sent / summary.seconds * 60 if summary.seconds else 0.0
    typer.echo(
        f"Sent {summary.sent:,} messages with {summary.events:,} events in {summary.seconds:.1f} s ({rate:,.0f} a "
        f"minute), at most {summary.behind:.1f} s after their time."
    )
    for name, counts in (("Refused", summary.refused), ("Not answered", summary.unanswered)):
        if counts:
            typer.echo(f"{name}: {', '.join(f'{count:,} × {cause}' for cause, count in counts.most_common())}.")


def _milliseconds(duration: float | None) -> str:
    return "-" if duration is None else f"{1000 * duration:.1f} ms"
