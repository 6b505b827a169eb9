"""A worker whose handler fails as often as a request asks for."""

from pydantic import BaseModel

from osrdyne.protocol.messages import DUPLICATE_HEADER
from osrdyne_worker import App, Call, RequestError

app = App()


class Wanted(BaseModel):
    """How many attempts are to fail."""

    failures: int


@app.handler("/flaky")
def flaky(call: Call, wanted: Wanted) -> dict[str, object]:
    if call.attempt <= wanted.failures:
        raise RequestError(f"Attempt {call.attempt} fails.", code=503)
    return {"attempt": call.attempt, "duplicate": call.headers.get(DUPLICATE_HEADER, False)}
