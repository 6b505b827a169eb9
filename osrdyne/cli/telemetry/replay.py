"""`osrdyne telemetry replay`: request a replay of each partition until it has reached its end."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from osrdyne.cli.options import (
    ConfigOption,
    Output,
    OutputOption,
    PoolOption,
    SetOption,
    TokenFileOption,
    load,
    positive_seconds,
)
from osrdyne.cli.output import print_json, print_table
from osrdyne.cli.requests.call import broker_uri, exit_code, run_request, token_for
from osrdyne.cli.requests.call_output import print_error
from osrdyne.client import AsyncClient, Reply
from osrdyne.client.request import MAX_TIMEOUT
from osrdyne.telemetry.schedule import IngestAnswer
from osrdyne.telemetry.times import parse_time

THROTTLED_DELAY = 1.0
"""Seconds until the next request if the last one stored nothing, because the table may be throttled."""

BeginOption = Annotated[
    str | None,
    typer.Option("--from", metavar="OFFSET|TIME", help="First offset, or time as 2026-11-22T10:00:00Z."),
]
EndOption = Annotated[
    str | None, typer.Option("--to", metavar="OFFSET|TIME", help="Where to stop: before this offset or time.")
]
PartitionsOption = Annotated[
    list[int] | None,
    typer.Option("--partition", min=0, help="Partition, repeatable. Default: all of telemetry.partitions."),
]


def replay(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table of the ingest that holds nothing else.")],
    begin: BeginOption = None,
    end: EndOption = None,
    partitions: PartitionsOption = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="Time limit of each request, e.g. 30s or 5m.")
    ] = "10m",
    token_file: TokenFileOption = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Store a range of the log in TABLE, through the pool of the ingest. Repeat the command to continue it."""
    settings = load(config, assignments, pool=pool, client=True).settings
    request = {"from": range_end(begin, "--from"), "to": range_end(end, "--to")}
    numbers = sorted(set(partitions)) if partitions else range(settings.telemetry.partitions)
    limit = positive_seconds(timeout, option="--timeout", at_most=MAX_TIMEOUT)
    answers: list[dict[str, Any]] = []

    async def store_all() -> Reply | None:
        uri, token = broker_uri(None, settings), token_for(token_file)
        async with AsyncClient(uri, settings.pool.id, name="osrdyne telemetry replay", token=token) as client:
            for partition in numbers:
                counts = {"rows": 0, "invalid": 0}
                while True:
                    key = f"{table}/{partition}"
                    answer = IngestAnswer.of_reply(
                        await client.call(key, "/replay", request, timeout=limit),
                        path="/replay",
                        pool=settings.pool.id,
                        remedy="; name their pool with --pool",
                    )
                    counts["rows"] += answer.rows
                    counts["invalid"] += answer.invalid
                    typer.echo(f"partition {partition}: {answer.stop:,} of {answer.end:,}", err=True)
                    if not answer.has_more:
                        break
                    if answer.stop == answer.start:
                        await asyncio.sleep(max(THROTTLED_DELAY, answer.next_after))
                answers.append({"table": table, "partition": partition, **counts, "offset": answer.stop})
        return None

    outcome = run_request(store_all())
    if isinstance(outcome, BaseException):
        print_error(outcome)
        raise typer.Exit(exit_code(outcome))
    if output is Output.JSON:
        print_json(answers)
        return
    rows = [(str(one["partition"]), *(f"{one[name]:,}" for name in ("rows", "invalid", "offset"))) for one in answers]
    print_table(("partition", "rows", "invalid", "to offset"), rows, empty="No partition.")


def range_end(text: str | None, option: str) -> int | str | None:
    """One end of a range of the log: an offset, a time as given, or None. Raises `BadParameter` for any other text."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        parse_time(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    return text
