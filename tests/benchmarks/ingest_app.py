"""The worker of the ingest benchmark: the ingest, and a handler that only reads the same messages."""

from pydantic import BaseModel

from osrdyne_worker import Call
from osrdyne_worker.pipelines.ingest import Ingest, app

__all__ = ["app"]


class ReadRequest(BaseModel):
    """The offsets from `start` to before `stop`."""

    start: int
    stop: int


@app.handler("/read")
def read(call: Call, request: ReadRequest) -> None:
    """Let Spark read a range with as many tasks, and drop it."""
    ingest: Ingest = call.context.state
    frame = call.context.session.read.format("rabbitmq-stream").options(
        **ingest.source,
        startingOffsets=str(request.start),
        endingOffsets=str(request.stop),
        maxOffsetsPerPartition=str((request.stop - request.start) // ingest.config.tasks),
    )
    frame.load().write.format("noop").mode("overwrite").save()
