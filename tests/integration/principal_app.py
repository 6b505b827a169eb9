"""A worker that says whom it works for, and what it can see of the request."""

from osrdyne_worker import App, Call

app = App()


@app.handler("/whoami")
def whoami(call: Call) -> dict[str, object]:
    return {"principal": call.principal, "headers": sorted(call.headers)}
