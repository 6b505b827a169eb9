"""A worker that loads, and holds requests, until a file exists: a test decides what happens meanwhile."""

import time
from pathlib import Path

from osrdyne_worker import App, Call, Context

app = App()


@app.on_start
def load(context: Context) -> None:
    if "gate" in context.config:
        wait_for(Path(str(context.config["gate"])))


def wait_for(gate: Path) -> None:
    while not gate.exists():
        time.sleep(0.02)


@app.handler("/echo")
def echo(call: Call) -> bytes:
    return call.body


@app.handler("/hold")
def hold(call: Call) -> bytes:
    """Wait for the file that the body names."""
    wait_for(Path(call.body.decode()))
    return call.body
