"""`osrdyne groups …` from another process, against a running daemon."""

import asyncio

import pytest
from daemon_process import WORKER, until

pytestmark = pytest.mark.one_rabbitmq

KEY = "infra=42,timetable=24"
APP = "tests.integration.changing_app:app"


@pytest.mark.proves("workers/worker-report-outcome-reload")
async def test_reload_by_hand_is_answered_with_the_outcome(make_daemon, tmp_path):
    (tmp_path / "data").write_text("0", encoding="utf-8")
    worker = {"app": APP, "config": {"directory": str(tmp_path)}}
    daemon = make_daemon(driver={"options": {"command": [WORKER, APP]}}, worker=worker)
    await daemon.start()
    missing = daemon.osrdyne("groups", "reload", KEY)
    assert (missing.returncode, "no group" in missing.stderr) == (1, True)
    async with daemon.client() as client:
        assert (await client.call(KEY, "/data")).body == b"0"
        (tmp_path / "data").write_text("1", encoding="utf-8")
        done = await asyncio.to_thread(daemon.osrdyne, "groups", "reload", KEY)
        assert (done.returncode, done.stderr, "reloaded" in done.stdout) == (0, "", True)
        assert (await client.call(KEY, "/data")).body == b"1"
        (tmp_path / "fail").touch()
        failed = await asyncio.to_thread(daemon.osrdyne, "groups", "reload", KEY)
        assert (failed.returncode, "the data is broken" in failed.stdout) == (1, True)
        (tmp_path / "fail").unlink()
        # A worker that dies meanwhile.
        for name in ("hold", "die"):
            (tmp_path / name).touch()
        before = (tmp_path / "reloads").read_text(encoding="utf-8")
        dying = asyncio.create_task(asyncio.to_thread(daemon.osrdyne, "groups", "reload", KEY))
        await until(lambda: (tmp_path / "reloads").read_text(encoding="utf-8") != before, "it reloads")
        (tmp_path / "hold").unlink()
        ended = await dying
        assert (ended.returncode, "ended" in ended.stdout) == (0, True), ended.stdout
        (tmp_path / "die").unlink()
        assert (await client.call(KEY, "/data", timeout=120)).body == b"1"
