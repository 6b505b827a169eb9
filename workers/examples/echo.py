"""A worker without Spark whose behaviour each request controls: for tests, benchmarks and first steps.

osrdyne-worker workers.examples.echo:app
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from osrdyne_worker import Answer, App, Call, Context, RequestError

app = App(poolable=True)


class Sleep(BaseModel):
    seconds: float = Field(ge=0, le=3600)


class Progress(BaseModel):
    steps: int = Field(3, ge=0, le=1000)
    seconds: float = Field(0.0, ge=0, le=60)


class Flaky(BaseModel):
    failures: int = Field(1, ge=0)


@dataclass
class State:
    key: str
    started_at: float
    greeting: str


@app.on_start
def load(context: Context) -> State:
    """`config`: `load_seconds` delays the start, `load_error` fails it, `/info` returns `greeting`."""
    time.sleep(float(context.config.get("load_seconds", 0)))
    if "load_error" in context.config:
        raise RuntimeError(str(context.config["load_error"]))
    return State(context.key, time.time(), str(context.config.get("greeting", "hello")))


@app.handler("/echo")
async def echo(call: Call) -> Answer:
    """Return the body."""
    return Answer(call.body, content_type=call.content_type)


@app.handler("/echo_thread")
def echo_thread(call: Call) -> Answer:
    """Return the body from a thread."""
    return Answer(call.body, content_type=call.content_type)


@app.handler("/info")
async def info(call: Call) -> dict[str, Any]:
    """Describe the worker that answers."""
    state: State = call.context.state
    return {
        "key": state.key,
        "pid": os.getpid(),
        "worker_id": call.context.worker_id,
        "greeting": state.greeting,
        "redelivered": call.redelivered,
        "deadline": call.deadline,
    }


@app.handler("/block")
async def block(call: Call, request: Sleep) -> dict[str, float]:
    """Block the event loop, which a coroutine must not do: nothing else happens in the worker meanwhile."""
    time.sleep(request.seconds)  # noqa: ASYNC251
    return {"slept": request.seconds}


@app.handler("/sleep")
async def sleep(call: Call, request: Sleep) -> dict[str, float]:
    """Answer after `seconds`; stop at once if cancelled."""
    await asyncio.sleep(request.seconds)
    return {"slept": request.seconds}


@app.handler("/sleep_thread")
def sleep_thread(call: Call, request: Sleep) -> dict[str, float]:
    """Answer after `seconds` from a thread that checks for a cancel."""
    until = time.monotonic() + request.seconds
    while (left := until - time.monotonic()) > 0:
        call.raise_if_cancelled()
        time.sleep(min(left, 0.05))
    return {"slept": request.seconds}


@app.handler("/progress")
def progress(call: Call, request: Progress) -> dict[str, int]:
    """Send progress for every step."""
    for step in range(request.steps):
        call.progress({"step": step + 1, "of": request.steps})
        time.sleep(request.seconds)
    return {"steps": request.steps}


@app.handler("/fail")
def fail(call: Call) -> None:
    """Raise an unexpected exception."""
    raise ZeroDivisionError("as requested")


@app.handler("/refuse")
def refuse(call: Call) -> None:
    """Refuse the request."""
    raise RequestError("no", code=403, error_code="refused", details={"hint": "ask another service"})


@app.handler("/flaky")
async def flaky(call: Call, request: Flaky) -> dict[str, int]:
    """Fail the first `failures` attempts with 503: a route can retry them."""
    if call.attempt <= request.failures:
        raise RequestError(f"Attempt {call.attempt} fails.", code=503, error_code="flaky")
    return {"attempt": call.attempt}


@app.handler("/large")
async def large(call: Call, request: dict[str, int]) -> bytes:
    """Return an answer of `bytes` bytes."""
    return b"x" * request.get("bytes", 0)


class Crash(BaseModel):
    unless: Path | None = None


@app.handler("/crash")
def crash(call: Call, request: Crash) -> str:
    """End the worker process in the middle of a request, unless the file `unless` exists."""
    if request.unless is not None and request.unless.exists():
        return "survived"
    print("the worker dies now", file=sys.stderr, flush=True)
    os._exit(9)


@app.batch_handler("/echo_batch", max_size=64)
def echo_batch(calls: list[Call]) -> list[dict[str, Any]]:
    """Return each body, with the number of calls in its batch. A body `poison` fails the whole call of this handler."""
    if any(call.body == b"poison" for call in calls):
        raise ZeroDivisionError("as requested")
    return [{"body": call.body.decode(), "batch": len(calls)} for call in calls]


@app.batch_handler("/crash_batch", max_wait="1s")
def crash_batch(calls: list[Call], requests: list[Crash]) -> list[str]:
    """End the worker process in the middle of a batch, as `/crash` does."""
    return [crash(call, request) for call, request in zip(calls, requests, strict=True)]


@app.handler("/hang")
def hang(call: Call) -> None:
    """Block a thread without end."""
    while True:
        time.sleep(1)
