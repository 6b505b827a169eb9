"""The echo worker, and a request that runs until a file exists: for tests that need it to be under way meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel

from osrdyne_worker import Call
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
