"""Call the handler of a request: decode the body, run the handler, encode its result. Called by the processor.

Coroutine functions run on the event loop, in a pooled process on one of their key, plain functions in a bounded pool of
threads, in a job group if there is a session. The processor handles deadlines and cancels: it cancels `run`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from osrdyne.aio.tasks import collector_paused
from osrdyne.errors import OsrdyneError
from osrdyne.logs import get_logger
from osrdyne.protocol.messages import Response
from osrdyne.protocol.progress import JobProgress
from osrdyne_worker.app.app import App, BatchOptions, RegisteredHandler, SessionFactory
from osrdyne_worker.app.call import Call
from osrdyne_worker.app.codec import (
    Decoder,
    answer_to_response,
    answer_with_rows,
    decoder_for,
    error_response,
    is_large,
    may_hold_rows,
    shown_path,
    stream_of,
)
from osrdyne_worker.app.coroutines import RunCoroutine, run_here
from osrdyne_worker.app.errors import DataChangedError, RequestError, describe
from osrdyne_worker.runtime.loop_watchdog import on_loop

if TYPE_CHECKING:
    from osrdyne_worker.app.streams import ArrowStream

log = get_logger("worker")

T = TypeVar("T")
PLAIN_ENCODINGS = frozenset({"", "identity", "utf-8", "utf8"})
MAX_LISTED_PATHS = 50
SESSION_GONE = "The session of this worker is gone."
MAX_DECODED_AT_ONCE = 64 * 1024
"""Bytes of a body, or of the bodies of a batch, that are decoded on the event loop, which is faster than in a thread.

pydantic holds the GIL while it parses one body: during that time the event loop waits, also for a thread. But it runs
between two bodies, and during validators that are written in Python.
"""
CANCEL_INTERVAL = 1.0
"""Seconds between two attempts to cancel the jobs of a request."""


class SessionLostError(OsrdyneError):
    """The session of the worker (the Spark JVM) is gone: no request can run any more."""


class InvalidBatchError(RequestError):
    """A batch handler did not return an answer for each call. Halving the batch would not help."""


_LEFT_OUT = RequestError("The request was cancelled before it ran.", code=500, error_code="internal_error")


class HandlerExitError(OsrdyneError):
    """A handler tried to end the process."""


@dataclass(frozen=True, slots=True)
class Target:
    """A handler, and the decoder of its request bodies; None if the handler takes no body."""

    handler: RegisteredHandler
    decode: Decoder | None


class Dispatcher:
    """The handlers of an application. Raises `ConfigurationError` for an invalid handler.

    `threads` must have a thread for every request that runs at once; `side_threads` is for short calls about running
    requests (cancel, progress) and about the session (health). `run_coroutine` runs the coroutine of a handler and ends
    when it has ended; by default on this event loop.
    """

    def __init__(
        self,
        app: App,
        *,
        threads: ThreadPoolExecutor,
        side_threads: ThreadPoolExecutor,
        run_coroutine: RunCoroutine = run_here,
        debug: bool = False,
    ) -> None:
        self._targets: Mapping[str, Target] = {
            path: Target(handler, decoder_for(handler)) for path, handler in app.registered_handlers().items()
        }
        default = app.registered_default_handler()
        self._default = None if default is None else Target(default, decoder_for(default))
        self._sessions: SessionFactory | None = app.sessions
        # Not the threads of the handlers: a health check must not wait behind stuck handlers.
        self._threads = threads
        self._side_threads = side_threads
        self._run_coroutine = run_coroutine
        self._debug = debug

    def has_handler(self, path: str) -> bool:
        """Whether a handler is registered for the path. The default handler does not count."""
        return path in self._targets

    def may_abandon(self, path: str) -> bool:
        """Whether the next request may run beside a cancelled call of this handler that runs on."""
        target = self._targets.get(path, self._default)
        return target is not None and target.handler.abandonable

    def batch_options(self, path: str) -> BatchOptions | None:
        """The options of the batch handler of the path; None if it has none."""
        target = self._targets.get(path)
        return None if target is None else target.handler.batch

    def coalesces(self, call: Call) -> bool | None:
        """Whether one call of the handler answers all identical requests; None: the route of the request decides."""
        target = self._targets.get(call.path, self._default)
        coalesce = None if target is None else target.handler.coalesce
        if not callable(coalesce):
            return coalesce
        try:
            decision = coalesce(call)
            return None if decision is None else bool(decision)
        except Exception as error:  # of the application: the request must not fail because of it
            log.warning("coalesce function of a handler failed", path=shown_path(call.path), reason=describe(error))
            return False

    @property
    def largest_batch(self) -> int:
        """The largest `max_size` of the batch handlers; 1 without any."""
        sizes = [target.handler.batch.max_size for target in self._targets.values() if target.handler.batch is not None]
        return max(sizes, default=1)

    async def run(self, call: Call, *, group_id: str) -> Response | ArrowStream:
        """Run the handler of one request; return its reply, or the stream of its rows, which the caller must close.

        Raises only `SessionLostError`, `DataChangedError` and `CancelledError`.
        """
        target = self._targets.get(call.path, self._default)
        if target is not None and target.handler.batch is not None:
            [response] = await self.run_batch([call], group_id=group_id)
            return response or error_response(_LEFT_OUT, path=call.path)
        self._attach_session(call)
        try:
            if target is None:
                # Raised inside the `try`, so that an unknown path is answered like any error of the request.
                raise self._unknown_path(call.path)
            handler = target.handler
            if not handler.is_async:
                return await self._in_thread(
                    lambda: self._respond_or_stream(handler, call, handler.function(*_arguments(target, call))),
                    call,
                    group_id,
                    discard=_close_unused,
                )
            if _takes_long_to_decode(target, call):
                arguments = await self._in_thread(lambda: _arguments(target, call), call, group_id)
            else:
                arguments = _arguments(target, call)
            # An asynchronous handler must not block, and a watchdog ends the worker if it does.
            result = await self._run_coroutine(
                on_loop(handler.function, *arguments, context=call.context, calls=[call])
            )
            if not may_hold_rows(result) and not is_large(result):
                return answer_to_response(result)
            # A job of Spark collects the rows, an iterator reads files, or the answer takes long to encode: nothing of
            # it may block the event loop.
            return await self._in_thread(
                lambda: self._respond_or_stream(handler, call, result), call, group_id, discard=_close_unused
            )
        except DataChangedError:
            raise
        except RequestError as error:
            return error_response(error, path=call.path)
        except Exception as error:
            return await self._failure(error, call)

    async def next_part(self, stream: ArrowStream, call: Call, *, group_id: str) -> bytes | Response:
        """Return the next part of a stream, or its final reply, which may be an error. Raises as `run` does;
        `DataChangedError` only before the first part."""
        try:
            # A thread for each part: a stream that waits for credit occupies none.
            part = await self._in_thread(lambda: stream.next_part() or stream.end(), call, group_id)
        except RequestError as error:
            # Before the first part the handler may run again; afterwards the client has rows of the former data.
            if isinstance(error, DataChangedError) and stream.parts == 0:
                raise
            return error_response(error, path=call.path)
        except Exception as error:
            return await self._failure(error, call)
        return part

    async def close_stream(self, stream: ArrowStream, call: Call, *, group_id: str) -> None:
        """Close a stream: a generator of the handler runs its `finally` blocks. Logs what they raise."""
        try:
            await self._in_thread(stream.close, call, group_id)
        except Exception as error:
            log.warning("stream not closed properly", path=shown_path(call.path), reason=describe(error))

    async def run_batch(self, calls: list[Call], *, group_id: str) -> list[Response | None]:
        """Run the batch handler of the calls, which have the same path and context; return the reply to each.

        If the handler raises, each half of the calls runs by itself, so that one call cannot fail the others. Calls
        that are cancelled meanwhile are left out (None). Raises only `SessionLostError`, `DataChangedError` and
        `CancelledError`.
        """
        target = self._targets[calls[0].path]
        found: dict[Call, Response] = {}
        ready: list[tuple[Call, Any]] = []
        for call in calls:
            self._attach_session(call)
        # Decoded before the handler runs: an invalid body fails its own call and never the batch.
        for call, request in zip(calls, await self._decode_all(target, calls, group_id), strict=True):
            if isinstance(request, RequestError):
                found[call] = error_response(request, path=call.path)
            else:
                ready.append((call, request))
        # A stack of parts: halving finds one failing call among n in about 2 * log2(n) runs of the handler.
        parts = [ready]
        while parts:
            # Checked for each part: a call may be cancelled while an earlier part runs.
            part = [one for one in parts.pop() if not one[0].cancelled]
            if not part:
                continue
            results: list[Response | Exception]
            try:
                results = await self._answer_batch(target, part, group_id)
            except DataChangedError:
                # Of the data, and not of one call: the whole batch runs again on the new data.
                raise
            except InvalidBatchError as error:
                # The handler ran, and its answers cannot be matched to the calls: a further run would repeat its side
                # effects.
                results = [error] * len(part)
            except Exception as error:
                if len(part) > 1:
                    # Without a session the halves would fail, too: the worker exits instead.
                    await self._check_alive(error, part[0][0])
                    log.warning("batch failed", path=calls[0].path, calls=len(part), reason=describe(error))
                    # The first half on top of the stack: calls run in the order of their arrival.
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                    continue
                results = [error]
            for (call, _), result in zip(part, results, strict=True):
                found[call] = result if isinstance(result, Response) else await self._error_of(result, call)
        return [found.get(call) for call in calls]

    async def _decode_all(self, target: Target, calls: list[Call], group_id: str) -> list[Any]:
        """Return the decoded body of each call (None without a decoder), or the `RequestError` of an invalid body."""
        decode = target.decode
        if decode is None:
            return [None] * len(calls)
        if sum(len(call.body) for call in calls) <= MAX_DECODED_AT_ONCE:
            return [_decoded(decode, call) for call in calls]
        # In a thread: bodies of many megabytes would keep the event loop from sending heartbeats.
        return await self._in_thread(lambda: [_decoded(decode, call) for call in calls], calls[0], group_id)

    async def _answer_batch(
        self, target: Target, part: list[tuple[Call, Any]], group_id: str
    ) -> list[Response | Exception]:
        """Call a batch handler once. Raises what the handler raises."""
        handler, calls = target.handler, [call for call, _ in part]
        arguments = (calls,) if target.decode is None else (calls, [request for _, request in part])
        if not handler.is_async:
            return await self._in_thread(
                lambda: self._respond_all(handler, calls, handler.function(*arguments)), calls[0], group_id
            )
        results = await self._run_coroutine(
            on_loop(handler.function, *arguments, context=calls[0].context, calls=calls)
        )
        return await self._in_thread(lambda: self._respond_all(handler, calls, results), calls[0], group_id)

    def _respond_all(self, handler: RegisteredHandler, calls: list[Call], results: Any) -> list[Response | Exception]:
        if not isinstance(results, list | tuple) or len(results) != len(calls):
            what = f"{len(results)} answers" if isinstance(results, list | tuple) else type(results).__name__
            raise InvalidBatchError(
                f"The batch handler returned {what} for {len(calls)} calls; it must return a list with an answer or an "
                "exception for each.",
                code=500,
                error_code="invalid_answer",
            )
        responses: list[Response | Exception] = []
        for call, result in zip(calls, results, strict=True):
            try:
                responses.append(result if isinstance(result, Exception) else self._respond(handler, call, result))
            except Exception as error:  # the answer of this call alone
                responses.append(error)
        return responses

    async def _error_of(self, error: Exception, call: Call) -> Response:
        if isinstance(error, RequestError):
            return error_response(error, path=call.path)
        return await self._failure(error, call)

    def _attach_session(self, call: Call) -> None:
        if self._sessions is not None:
            # Attached and not created: a request that never asks for its Spark session costs none.
            call.attach_session(partial(self._sessions.request_session, call.context.session))

    def _respond(self, handler: RegisteredHandler, call: Call, result: Any) -> Response:
        collect = None if self._sessions is None else self._sessions.rows
        return answer_to_response(
            answer_with_rows(result, limit=handler.row_limit, accept=call.accept, collect=collect)
        )

    def _respond_or_stream(self, handler: RegisteredHandler, call: Call, result: Any) -> Response | ArrowStream:
        if call.stream_bytes is None:
            return self._respond(handler, call, result)
        stream, result = stream_of(
            result,
            limit=handler.stream_limit,
            max_bytes=call.stream_bytes,
            open_batches=getattr(self._sessions, "batches", None),
        )
        return self._respond(handler, call, result) if stream is None else stream

    async def _in_thread(
        self, function: Callable[[], T], call: Call, group_id: str, *, discard: Callable[[T], None] | None = None
    ) -> T:
        """Call `function` in a thread, in the job group of the request. If the request is cancelled meanwhile, cancel
        its jobs until the thread has ended, and call `discard` with the result, in a thread as well."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, self._work, function, call, group_id)
        try:
            # Shielded: a cancelled future would count as done while its thread still runs the handler.
            result = await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                # Repeatedly: Spark does not cancel a stage that it submits after the first attempt.
                await self._cancel_group(call, group_id)
                await asyncio.wait({future}, timeout=CANCEL_INTERVAL)
            if discard is not None and not isinstance(unused := future.result(), BaseException):
                closing = loop.run_in_executor(self._threads, self._work, lambda: discard(unused), call, group_id)
                await asyncio.wait({closing})
                if isinstance(error := closing.result(), BaseException):
                    log.warning("unused answer not closed properly", path=shown_path(call.path), reason=describe(error))
            raise
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self, function: Callable[[], T], call: Call, group_id: str) -> T | Exception:
        """In a thread: call `function`; return its result or its exception. A future cannot carry every exception."""
        try:
            if self._sessions is None:
                return function()
            return self._sessions.run_in_group(call.context.session, group_id, function)
        except Exception as error:
            return error
        except BaseException as error:  # a handler called sys.exit
            # SystemExit has no effect in a thread, and would end the worker on the event loop.
            return HandlerExitError(f"The handler ended with {describe(error)}.")

    async def _cancel_group(self, call: Call, group_id: str) -> None:
        """Cancel the jobs of this request in the session. A failure is logged: the caller repeats the attempt."""
        if self._sessions is None:
            return
        try:
            await self._in_side_thread(lambda sessions: sessions.cancel(call.context.session, group_id))
        except Exception:
            log.warning("spark jobs could not be cancelled", group=group_id, exc_info=True)

    async def progress(self, session: Any, group_ids: list[str]) -> Mapping[str, int]:
        """The sum of the progress of these requests in the session."""
        if self._sessions is None:
            return {}
        return await self._in_side_thread(
            lambda sessions: _sum(sessions.progress(session, group_id) for group_id in group_ids)
        )

    async def job_progress(self, session: Any, group_id: str) -> JobProgress:
        """The progress of the jobs of one request; without a session factory, or one that reports it, all zero."""
        report = getattr(self._sessions, "job_progress", None)
        if report is None:
            return JobProgress()
        return JobProgress(**await self._in_side_thread(lambda _: report(session, group_id)))

    async def is_alive(self, session: Any) -> bool:
        """Whether the session is alive; False if the check fails."""
        if self._sessions is None:
            return True
        try:
            return await self._in_side_thread(lambda sessions: sessions.is_alive(session))
        except Exception:
            log.warning("session health check failed", exc_info=True)
            return False

    async def loss_reason(self, session: Any) -> str:
        """Why the session is lost, in one or two sentences. Session factories may implement it."""
        find = getattr(self._sessions, "loss_reason", None)
        if find is None:
            return SESSION_GONE
        try:
            reason: str | None = await self._in_side_thread(lambda _: find(session))
        except Exception:
            log.warning("reason of the session's loss unknown", exc_info=True)
            return SESSION_GONE
        return f"{SESSION_GONE} {reason}" if reason else SESSION_GONE

    async def stray_tasks(self, session: Any) -> Mapping[str, int]:
        """Running tasks of completed requests, by group; empty if the session does not report them."""
        if self._sessions is None:
            return {}
        try:
            return await self._in_side_thread(lambda sessions: sessions.stray_tasks(session))
        except Exception:
            log.warning("stray tasks unknown", exc_info=True)
            return {}

    async def executor_seconds(self, session: Any) -> float | None:
        """How long tasks of this worker have run, in seconds on one core; None if unknown. Session factories may
        implement it."""
        find = getattr(self._sessions, "executor_seconds", None)
        if find is None:
            return None
        try:
            seconds: float | None = await self._in_side_thread(lambda _: find(session))
        except Exception:
            log.warning("time of tasks unknown", exc_info=True)
            return None
        return seconds

    async def _in_side_thread(self, function: Callable[[SessionFactory], T]) -> T:
        sessions = self._sessions
        assert sessions is not None
        return await asyncio.get_running_loop().run_in_executor(self._side_threads, lambda: function(sessions))

    async def _failure(self, error: Exception, call: Call) -> Response:
        await self._check_alive(error, call)
        # Callers get the traceback only if the operator has set `debug`.
        log.error("handler failed", path=shown_path(call.path), correlation_id=call.correlation_id, exc_info=error)
        refusal = await self._refusal(error) or RequestError(describe(error), code=500, error_code="internal_error")
        if self._debug:
            refusal.details["traceback"] = traceback.format_exception(error)
        return error_response(refusal, path=call.path)

    async def reload_failed(self, error: Exception, call: Call) -> Response:
        """Return the reply to a request whose data could not be reloaded. Raises `SessionLostError` if the session is
        lost."""
        await self._check_alive(error, call)
        found = await self._refusal(error)
        reason = describe(error) if found is None else found.message
        message = f"The data could not be reloaded; the former data stays in use. {reason}"
        return error_response(RequestError(message, 503, "reload_failed"), path=call.path)

    async def _check_alive(self, error: Exception, call: Call) -> None:
        """Raise `SessionLostError` if the session is lost, which is then the cause of `error`."""
        # Called after every unexpected error: a request that fails because the JVM has died must not be answered.
        if not await self.is_alive(call.context.session):
            raise SessionLostError(await self.loss_reason(call.context.session)) from error

    async def _refusal(self, error: Exception) -> RequestError | None:
        """Return the answer to an error of the session; None if it is an error of the handler itself."""
        if self._sessions is None:
            return None
        try:
            return await self._in_side_thread(lambda sessions: sessions.refusal(error))
        except Exception:  # the factory reads the error from the JVM, which may have died
            log.warning("error of the session could not be read", exc_info=True)
            return None

    def _unknown_path(self, path: str) -> RequestError:
        # The message lists some of the paths, `known_paths` lists all.
        known = sorted(self._targets)
        listed = ", ".join(known[:MAX_LISTED_PATHS]) or "none"
        fault = (
            f"There is no handler for the path {shown_path(path)!r}" if path else "The request has no x-rpc-path header"
        )
        return RequestError(
            f"{fault}; known paths: {listed}.", code=404, error_code="unknown_path", details={"known_paths": known}
        )


def _close_unused(answer: Response | ArrowStream) -> None:
    """Close the stream of a request that was cancelled while its handler opened it. Otherwise its job would continue to
    write rows to the disk that no client reads."""
    if not isinstance(answer, Response):
        answer.close()


def _takes_long_to_decode(target: Target, call: Call) -> bool:
    if target.decode is None or target.handler.request_type is bytes:
        return False
    return len(call.body) > MAX_DECODED_AT_ONCE


def _arguments(target: Target, call: Call) -> tuple[Any, ...]:
    if target.decode is None:
        return (call,)
    return (call, decode_body(target.decode, call))


def decode_body(decode: Decoder, call: Call) -> Any:
    encoding = (call.content_encoding or "").lower()
    if encoding not in PLAIN_ENCODINGS:
        raise RequestError(
            f"The content encoding {encoding!r} is not supported; send the body without encoding.",
            code=415,
            error_code="unsupported_encoding",
        )
    if len(call.body) <= MAX_DECODED_AT_ONCE:
        return decode(call.body)
    # The collector would visit the new objects again and again. That can take most of the time of a decode, for which
    # the event loop waits, too.
    with collector_paused():
        return decode(call.body)


def _decoded(decode: Decoder, call: Call) -> Any:
    try:
        return decode_body(decode, call)
    except RequestError as error:
        return error


def _sum(figures: Any) -> Mapping[str, int]:
    total: dict[str, int] = {}
    for one in figures:
        for name, value in one.items():
            total[name] = total.get(name, 0) + value
    return total
