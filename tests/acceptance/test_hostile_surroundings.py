"""What is wrong around a daemon is one clear sentence and a retry, or an answer to those concerned. No traceback."""

from urllib.parse import urlsplit

import pytest
from daemon_process import DaemonProcess, free_port, until

from osrdyne.protocol.names import PoolNames

pytestmark = pytest.mark.one_rabbitmq


async def until_it_retries(daemon: DaemonProcess) -> str:
    """The one sentence that a daemon gives, again and again, as the reason why it does not lead."""
    daemon.launch()
    await until(lambda: not daemon.is_running or len(daemon.events("term ended")) >= 2, "it tried twice")
    assert daemon.is_running, daemon.log()

    [sentence] = {entry["error"] for entry in daemon.events("term ended")}

    async def says_why() -> bool:
        # Perhaps not at the first question: between two attempts the daemon stands by for a moment, and is ready then.
        ready = await daemon.get("/ready")
        details = {component["detail"] for component in ready.get("components", ())}
        return ready.get("ready") is False and sentence in details

    await until(says_why, "the daemon is not ready, and says why")
    assert await daemon.stop() == 0
    return str(sentence)


@pytest.mark.parametrize("wrong", ["password", pytest.param("management address", marks=pytest.mark.nightly)])
@pytest.mark.proves("broker/wrong-password-management-plugin")
async def test_wrong_access_is_reported_and_no_secret_shown(make_daemon, broker_settings, wrong):
    parts = urlsplit(broker_settings.uri.get_secret_value())
    if wrong == "password":
        daemon = make_daemon(amqp_uri=f"amqp://guest:hidden@{parts.hostname}:{parts.port}/")
    else:
        daemon = make_daemon(management_uri=f"http://guest:hidden@127.0.0.1:{free_port()}")
    sentence = await until_it_retries(daemon)
    assert ("refuse" if wrong == "password" else "management") in sentence
    assert "hidden" not in daemon.log()


@pytest.mark.proves("broker/wrong-password-management-plugin")
async def test_foreign_controller_queue_is_named_and_the_daemon_recovers(
    make_daemon, channel, pool_id, management, caller
):
    orphans = PoolNames(pool_id).orphan_queue
    await channel.declare_queue(orphans)
    daemon = make_daemon()
    assert orphans in await until_it_retries(daemon)
    await channel.delete_queue(orphans)
    await daemon.start()
    await caller.info("k")
