"""A daily quota on RabbitMQ, with a daemon of its own process that is killed."""

import json
import zlib
from contextlib import suppress
from typing import Any

import pytest
from daemon_process import DaemonProcess, until
from managed_callers import managed, numbered, until_counted, without_workers

from osrdyne.client import QuotaExceededError
from osrdyne.errors import BrokerNotFoundError
from osrdyne.protocol.names import Key
from tests.connections import connected

QUOTA = 500


async def usage(daemon: DaemonProcess) -> Any:
    return (await daemon.get("/v1/quota"))["usage"]


async def is_used(daemon: DaemonProcess, amount: int) -> bool:
    return bool((await usage(daemon))["meters"][0]["used"] == amount)


async def saved(uri: str, queue: str) -> int | None:
    """What the leader has saved in RabbitMQ; None if nothing yet."""
    async with connected(uri) as connection:
        with suppress(BrokerNotFoundError):  # the leader declares the queue when it saves for the first time
            delivery = await (await connection.channel()).get(queue)  # closing the connection returns it
            return None if delivery is None else int(json.loads(zlib.decompress(delivery.body))["meters"][0]["used"])
    return None


@pytest.mark.proves("quotas/leader-killed-counts-what")
async def test_quota_runs_out_at_the_exact_message_and_outlives_its_leader(make_daemon, answers, broker_settings):
    daemon = managed(make_daemon)
    await without_workers(daemon)
    done = daemon.osrdyne("quota", "set", "--messages-per-day", str(QUOTA), "--author", "test")
    assert done.returncode == 0, done.stderr
    uri, term = broker_settings.uri.get_secret_value(), (await daemon.get("/v1/leadership"))["term"]
    queue = answers.names.snapshot_queue("quota", term)

    await answers.send("any", numbered("first", 300))
    await until(lambda: is_used(daemon, 300), "300 requests are counted")

    async def is_saved():
        return await saved(uri, queue) == 300

    await until(is_saved, "the counts are saved")

    async def are_forwarded():
        info = await answers.channel.declare_queue(answers.names.request_queue(Key("cam")), passive=True)
        return info.ready == 300

    await until(are_forwarded, "the requests are in the queue of their group")
    # One that is not acknowledged returns, and counts again. Nothing comes between this count and the acknowledgement.
    await until_counted(daemon, 300, "osrdyne_ingress_total", 'outcome="accepted"')
    daemon.kill()
    await daemon.start()
    await until(lambda: is_used(daemon, 300), "the next leader reads the counts")

    second = numbered("second", 300)
    await answers.send("any", second)
    refused = 300 - (QUOTA - 300)

    await until(lambda: len(answers.served) >= refused, "the requests beyond the quota are answered")
    assert await is_used(daemon, QUOTA)
    assert (len(answers.served), answers.statuses(second)) == (refused, {"quota-exceeded"})

    earlier = (await usage(daemon))["remaining"]
    async with daemon.client() as client:
        with pytest.raises(QuotaExceededError) as error:
            await client.call("cam", "/echo")
    assert (await usage(daemon))["remaining"] <= error.value.retry_after <= earlier
    assert "is used up" in daemon.osrdyne("quota", "show").stdout
