"""A worker whose handler fails as often as a request asks for; and that dies, once, where the test wants it to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from osrdyne.protocol.messages import DUPLICATE_HEADER
from osrdyne_worker import App, Call, RequestError
from osrdyne_worker.requests.retries import Retries

DEATH_VARIABLE = "FLAKY_DIES_ONCE"
"""Names a file that does not exist: the worker dies between the confirm of a retry and its acknowledgement, and makes
the file, so that its successor lives."""

app = App()
send = Retries.send


class Wanted(BaseModel):
    """How many attempts are to fail."""

    failures: int


@app.handler("/flaky")
def flaky(call: Call, wanted: Wanted) -> dict[str, object]:
    if call.attempt <= wanted.failures:
        raise RequestError(f"Attempt {call.attempt} fails.", code=503)
    return {"attempt": call.attempt, "duplicate": call.headers.get(DUPLICATE_HEADER, False)}


async def send_and_die(self: Retries, *arguments: Any) -> bool:
    """Do what `Retries.send` does, and then perhaps end the process."""
    taken = await send(self, *arguments)
    death = Path(os.environ[DEATH_VARIABLE])
    if not death.exists():
        death.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return taken


if DEATH_VARIABLE in os.environ:
    Retries.send = send_and_die  # type: ignore[method-assign, assignment]
