"""An application for pooled processes without Spark: its sessions are dictionaries, and each key has its own state."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from osrdyne_worker import App, Call, Context


class Dictionaries:
    """A session factory for the process and, with a key, for that key."""

    def build_shared(self, context: Context) -> dict[str, Any]:
        return {"process": context.worker_id}

    def for_key(self, shared: dict[str, Any]) -> Dictionaries:
        return Dictionaries()

    def heap(self, shared: dict[str, Any]) -> tuple[int, int]:
        return 1, 2

    def enter_thread(self) -> None: ...

    def build(self, context: Context) -> dict[str, Any]:
        return {"key": context.key}

    def run_in_group(self, session: Any, group_id: str, function: Callable[[], Any]) -> Any:
        return function()

    def cancel(self, session: Any, group_id: str) -> None: ...

    def progress(self, session: Any, group_id: str) -> Mapping[str, int]:
        return {}

    def request_session(self, session: Any) -> dict[str, Any]:
        return dict(session)

    def refusal(self, error: Exception) -> None: ...

    def rows(self, value: Any, *, limit: int) -> None: ...

    def is_alive(self, session: Any) -> bool:
        return True

    def stray_tasks(self, session: Any) -> Mapping[str, int]:
        return {}

    def close(self, session: Any) -> None:
        session.clear()


app = App(sessions=Dictionaries(), poolable=True)


@dataclass
class State:
    key: str
    values: dict[str, Any] = field(default_factory=dict)


@app.on_start
def load(context: Context) -> State:
    if "load_error" in context.config:
        raise RuntimeError(str(context.config["load_error"]))
    return State(context.key)


@app.on_stop
def save(context: Context) -> None:
    if "stopped_file" in context.config:
        Path(context.config["stopped_file"]).touch()


@app.handler("/put")
def put(call: Call, request: dict[str, Any]) -> dict[str, Any]:
    """Store values; everything that belongs to the key."""
    state: State = call.context.state
    state.values.update(request)
    call.context.session.update(request)
    return _all_of(call)


@app.handler("/get")
def get(call: Call) -> dict[str, Any]:
    return _all_of(call)


@app.handler("/get_on_loop")
async def get_on_loop(call: Call) -> dict[str, Any]:
    return _all_of(call)


@app.handler("/fail")
def fail(call: Call) -> None:
    raise ValueError(f"of {call.context.key}")


@app.handler("/exit")
def leave(call: Call) -> None:
    sys.exit(3)


@app.handler("/block")
def block(call: Call) -> None:
    """Never ends, whatever is done to it."""
    threading.Event().wait()


def _all_of(call: Call) -> dict[str, Any]:
    state: State = call.context.state
    return {
        "key": [call.context.key, state.key, call.context.session["key"]],
        "values": dict(state.values),
        "session": {name: value for name, value in call.context.session.items() if name != "key"},
        "greeting": call.context.config.get("greeting"),
        "header": call.headers.get("x-test"),
        "thread": threading.current_thread().name,
    }
