"""The echo worker, a request that runs until a file exists, for tests that need it to be under way meanwhile, and one
of a backend that may fail."""

import time
from pathlib import Path

from pydantic import BaseModel

from osrdyne_worker import Call, RequestError
from workers.examples.echo import app

__all__ = ["app"]


class Gate(BaseModel):
    file: Path


@app.handler("/wait")
def wait(call: Call, request: Gate) -> str:
    """Answer once the file exists; ends at once when cancelled."""
    while not request.file.exists():
        call.raise_if_cancelled()
        time.sleep(0.05)
    return "waited"


class Backend(BaseModel):
    directory: Path


@app.handler("/backend")
def backend(call: Call, request: Backend) -> str:
    """Note the request in the file `served`; hang while the file `hangs` exists, and fail while `down` does."""
    with (request.directory / "served").open("a") as served:
        served.write(f"{call.correlation_id}\n")
    time.sleep(0.05)
    while (request.directory / "hangs").exists():
        call.raise_if_cancelled()
        time.sleep(0.05)
    if (request.directory / "down").exists():
        raise RequestError("The backend is down.", 503, "backend_down")
    return "ok"
