"""A worker whose data is a file in a directory, with files that hold, fail or kill its reloads and shared runs."""

import os
import time
from pathlib import Path

from osrdyne_worker import App, Call, Context

app = App(poolable=True)


@app.on_start
def load(context: Context) -> str:
    directory = Path(str(context.config["directory"]))
    found = (directory / "data").read_text(encoding="utf-8")
    if context.state is None:
        return found
    with (directory / "reloads").open("a", encoding="utf-8") as file:
        file.write(f"{context.data_version}\n")
    while (directory / "hold").exists():
        time.sleep(0.02)
    if (directory / "die").exists():
        os._exit(9)
    if (directory / "fail").exists():
        raise ValueError("the data is broken")
    return found


@app.handler("/data")
async def data(call: Call) -> str:
    state: str = call.context.state
    return state


@app.handler("/echo")
async def echo(call: Call) -> bytes:
    return call.body


@app.handler("/shared", coalesce=True)
def shared(call: Call) -> str:
    """The number of the run that has answered."""
    directory = Path(str(call.context.config["directory"]))
    with (directory / "runs").open("a", encoding="utf-8") as file:
        file.write("run\n")
    runs = len((directory / "runs").read_text(encoding="utf-8").split())
    while (directory / "hold").exists():
        time.sleep(0.02)
    if (directory / "die").exists():
        os._exit(9)
    return str(runs)
