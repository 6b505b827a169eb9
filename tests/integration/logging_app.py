"""A worker whose application logs with Python's own `logging`."""

from __future__ import annotations

import logging

from osrdyne_worker import App, Call

app = App()
log = logging.getLogger("my_app.handlers")


@app.handler("/log")
def write(call: Call) -> None:
    log.debug("too small to be seen")
    log.warning("table %s is stale", "lineitem")
    logging.getLogger("chatty").warning("of no interest")
    for library in ("aio_pika", "aiormq.connection"):
        logging.getLogger(library).error("of no interest: %s", library)
    try:
        raise ValueError("amqp://user:s3cret@host/")
    except ValueError:
        logging.getLogger("my_app").exception("no luck")
