"""A Spark worker with a handler that kills its JVM; `journal` in the configuration names the file of what ran where."""

import os
from pathlib import Path
from typing import Any

from osrdyne_worker import App, Call
from osrdyne_worker.spark.session import SparkSessions

app = App(sessions=SparkSessions())


def note(call: Call, what: str) -> None:
    with Path(call.context.config["journal"]).open("a", encoding="utf-8") as journal:
        journal.write(f"{os.getpid()} {what}\n")


@app.handler("/count")
def count(call: Call, request: dict[str, int]) -> int:
    found: int = call.context.session.range(request["n"]).count()
    note(call, f"counted {request['n']}")
    return found


@app.handler("/kill")
def kill(call: Call, request: dict[str, Any]) -> int:
    from pyspark import SparkContext

    note(call, "kills")
    SparkContext._gateway.proc.kill()
    found: int = call.context.session.range(1).count()  # fails: the JVM is gone
    return found
