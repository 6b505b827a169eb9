"""The daemon between a client and a worker that follow the reference's protocol literally and know nothing of osrdyne.

Both are written with aio-pika alone, from the published description of the reference.
"""

import sys
from pathlib import Path

import pytest
from plain_client import reference_client

from osrdyne.client import RequestFailedError, UnknownStatusError

HERE = Path(__file__).parent
OURS = "a key of osrdyne's own worker"
LAUNCH = f"""
case "$WORKER_KEY" in
  "{OURS}") exec "{sys.executable}" "{HERE / "echo_launcher.py"}" /nonexistent ;;
esac
WORKER_AMQP_URI=$(cat "$WORKER_AMQP_URI_FILE") exec "{sys.executable}" "{HERE / "plain_worker.py"}"
"""


async def test_client_and_worker_of_the_reference_work_together(make_daemon, tmp_path):
    daemon = make_daemon(driver={"options": {"command": ["sh", "-c", LAUNCH]}}, requests={"statuses": "reference"})
    await daemon.start()
    async with reference_client(daemon.amqp_uri, daemon.pool) as client:
        answer = f"{daemon.pool}|infra=42|/path|".encode()
        assert await client.call("infra=42", "/path", b"new key") == ("ok", answer + b"new key")
        assert await client.call("infra=42", "/path", b"bound key") == ("ok", answer + b"bound key")
        assert (await client.call("infra=42", "/error"))[0] == "core_error"
        assert (await client.call("infra=42", "/requeue"))[0] == "ok"

        # The dead letter responder answers for the worker, which is busy.
        held_until = tmp_path / "done"
        held = await client.send("infra=42", "/hold", str(held_until).encode())
        late = await client.send("infra=42", "/path", expiration=0.5)
        status, _ = await client.status_and_body(late)
        assert (status, late.result().headers["x-osrdyne-status"]) == ("core_error", "expired")
        assert not held.done()
        held_until.touch()
        assert (await client.status_and_body(held))[0] == "ok"

        # The worker of osrdyne maps its own statuses, and sends progress only on request.
        status, _ = await client.call(OURS, "/refuse")
        assert (status, client.replies[-1].headers["x-osrdyne-status"]) == ("core_error", "error")
        assert await client.call(OURS, "/progress", b'{"steps": 2}') == ("ok", b'{"steps":2}')
        before = len(client.replies)
        assert await client.call(OURS, "/progress", b'{"steps": 2}', headers={"x-progress": True}) == (
            "ok",
            b'{"step":1,"of":2}',
        )
        await client.call(OURS, "/info")
        assert len(client.replies) == before + 4

    # The client of osrdyne reads what both of them answer.
    async with daemon.client() as ours:
        assert (await ours.call("infra=42", "/path", b"x")).body == answer + b"x"
        with pytest.raises(RequestFailedError):
            await ours.call(OURS, "/refuse")
        with pytest.raises(UnknownStatusError) as raised:
            await ours.call("infra=42", "/error")
        assert raised.value.status == "core_error"
