"""`osrdyne call KEY PATH`: send one request and print its answer on standard output, and all else on standard error.

Exit codes: 0 ok, 1 an error answer, 2 wrong usage or configuration, 3 no answer in time, 4 broker unreachable, 130
interrupted. `osrdyne.client` sends the request, `call_output` prints the answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from osrdyne.cli.options import (
    ConfigOption,
    KeyArgument,
    PoolOption,
    SetOption,
    TokenFileOption,
    load,
    parse_header,
    positive_seconds,
    read_body,
)
from osrdyne.cli.requests.call_output import CallOutput, ProgressDisplay, print_answer, print_error, write_part
from osrdyne.client import (
    ARROW_TYPE,
    AsyncClient,
    ConnectionLostError,
    PoolNotFoundError,
    Reply,
    RequestError,
    RequestExpiredError,
    RequestTimeoutError,
)
from osrdyne.client.aio import ANSWER_MARGIN
from osrdyne.client.daemon_api import token_from_environment, token_of_file
from osrdyne.client.request import MAX_TIMEOUT, RequestOptions
from osrdyne.config.models import Settings
from osrdyne.errors import BrokerUnavailableError, ConfigurationError
from osrdyne.logs import configure_logging
from osrdyne.protocol.data_versions import MAX_DATA_VERSION
from osrdyne.protocol.messages import JSON_TYPE
from osrdyne.protocol.uri import with_tls

TOKEN_VARIABLE = "OSRDYNE_CALL_TOKEN"
"""Other than the variable of the API, whose token may have rights that no request needs."""
FAILED, USAGE_ERROR, TIMED_OUT, UNREACHABLE, INTERRUPTED = 1, 2, 3, 4, 130


def call(
    key: KeyArgument,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Handler of the worker, e.g. /sql.")],
    data: Annotated[
        str | None, typer.Option("--data", "-d", metavar="JSON|@FILE|-", help="Request body; - reads standard input.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Time limit, e.g. 30s or 5m. Default: the pool's TTL.")
    ] = None,
    progress: Annotated[
        bool | None,
        typer.Option("--progress/--no-progress", help="Show progress messages. Default: only on a terminal."),
    ] = None,
    output: Annotated[CallOutput, typer.Option("--output", "-o", help="Output format.")] = CallOutput.TABLE,
    stream: Annotated[
        bool, typer.Option("--stream", help="Receive a large table in parts, as an Arrow stream to a file or pipe.")
    ] = False,
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="Header as name=value; repeatable.")
    ] = None,
    token_file: TokenFileOption = None,
    app_id: Annotated[
        str, typer.Option("--app-id", metavar="NAME", help="Name of the publisher, for routes that test it.")
    ] = "osrdyne call",
    no_activate: Annotated[
        bool, typer.Option("--no-activate", help="Do not start a worker if none runs for the key.")
    ] = False,
    data_version: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=MAX_DATA_VERSION, help="Lowest version of the data that may answer, e.g. 7."
        ),
    ] = None,
    broker: Annotated[
        str | None, typer.Option(metavar="URI", help="AMQP URI without a password. Default: from the configuration.")
    ] = None,
    pool: PoolOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Send a request for KEY and print the answer. The first request starts the key's worker."""
    configure_logging(level="error")
    if stream and output is CallOutput.JSON:
        raise typer.BadParameter("--stream gives Arrow: leave out -o json.", param_hint="--stream")
    output = CallOutput.ARROW if stream else output
    if output is CallOutput.ARROW and sys.stdout.isatty():
        raise typer.BadParameter("Arrow is binary: redirect the output to a file or a pipe.", param_hint="--output")
    settings = load(config, assignments, pool=pool, client=True).settings
    slack = settings.requests.max_clock_skew + ANSWER_MARGIN
    client = AsyncClient(
        broker_uri(broker, settings), settings.pool.id, name=app_id, token=token_for(token_file), answer_slack=slack
    )
    body = read_body(data)
    limit = None if timeout is None else positive_seconds(timeout, option="--timeout", at_most=MAX_TIMEOUT)
    options: RequestOptions = {
        "timeout": min(settings.requests.ttl, MAX_TIMEOUT) if limit is None else limit,
        "headers": dict(parse_header(header) for header in headers or ()),
        "accept": ARROW_TYPE if output is CallOutput.ARROW else None,
        "content_type": JSON_TYPE if body else None,
        "no_activate": no_activate,
        "data_version": data_version,
    }
    with ProgressDisplay(wanted=progress, terminal=sys.stderr.isatty()) as display:
        outcome = run_request(
            receive(client, key, path, body, options) if stream else send(client, key, path, body, display, options)
        )
    if outcome is None:
        return
    if isinstance(outcome, Reply):
        print_answer(outcome, output)
    else:
        print_error(outcome)
        if broker is None and isinstance(outcome, BrokerUnavailableError) and is_default(settings):
            typer.echo("Start `osrdyne dev`, or name your RabbitMQ with --broker, --config or broker.uri.", err=True)
        raise typer.Exit(exit_code(outcome))


async def receive(client: AsyncClient, key: str, path: str, body: bytes | None, options: RequestOptions) -> None:
    """Write a streamed answer to standard output, one part after the other."""
    async with client, aclosing(client.call_parts(key, path, body, **options)) as parts:
        async for part in parts:
            # In a thread: a slow reader of the output must not stop the client from renewing its credit.
            await asyncio.to_thread(write_part, part)


async def send(
    client: AsyncClient, key: str, path: str, body: bytes | None, display: ProgressDisplay, options: RequestOptions
) -> Reply:
    async with client:
        display.waiting(path, key)
        if not display.is_shown:  # workers send progress only to callers that want it
            return await client.call(key, path, body, **options)
        return await client.call(
            key,
            path,
            body,
            on_progress=display.show,
            on_starting=display.starting,
            on_jobs=display.jobs,
            **options,
        )


def run_request(
    request: Coroutine[Any, Any, Reply | None],
) -> Reply | RequestError | BrokerUnavailableError | KeyboardInterrupt | None:
    """Run a request, and return its answer or the error that ended it. Ctrl-C cancels the request."""
    try:
        return asyncio.run(request)
    except (RequestError, BrokerUnavailableError, KeyboardInterrupt) as error:
        return error


def exit_code(outcome: BaseException) -> int:
    match outcome:
        case KeyboardInterrupt():
            return INTERRUPTED
        case RequestTimeoutError() | RequestExpiredError():
            return TIMED_OUT
        case BrokerUnavailableError() | ConnectionLostError():
            return UNREACHABLE
        case PoolNotFoundError():
            return USAGE_ERROR
        case _:
            return FAILED


def is_default(settings: Settings) -> bool:
    """Whether no setting names a RabbitMQ: the user may not know yet that one is needed."""
    return settings.broker == type(settings.broker)()


def broker_uri(given: str | None, settings: Settings) -> str:
    """`--broker`, or the URI of the configuration. Flags show in the process list: a password in one is refused."""
    if given is None:
        return settings.broker.effective_uri()
    try:
        password, uri = urlsplit(given).password, with_tls(given, settings.broker.tls.files())
    except ValueError:
        return given  # the error of the connection names the fault
    if password is not None:
        raise ConfigurationError(
            "--broker: flags show in the process list; put a URI with a password into OSRDYNE__BROKER__URI instead."
        )
    return uri


def token_for(file: str | None) -> str | None:
    """The token of `--token-file`, else of the environment."""
    return token_from_environment(TOKEN_VARIABLE) if file is None else token_of_file(file, "--token-file")
