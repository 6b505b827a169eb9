"""A worker that loads until a file exists, so that a test decides what happens meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

from osrdyne_worker import App, Call, Context

app = App()


@app.on_start
def load(context: Context) -> None:
    gate = Path(str(context.config["gate"]))
    while not gate.exists():
        time.sleep(0.02)


@app.handler("/echo")
def echo(call: Call) -> bytes:
    return call.body
