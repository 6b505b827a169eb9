"""The worker of the alarms in the benchmark of the paths of telemetry."""

import time

from osrdyne_worker import App, Call

app = App()


@app.handler("/alarm")
async def alarm(call: Call) -> dict[str, float]:
    """Answer when the handler was called: all processes of a host have the same monotonic clock."""
    return {"handled": time.monotonic()}
