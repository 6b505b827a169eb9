"""What only the systemd driver does. Run inside the container as root, by `test_systemd`, not from outside."""

import asyncio
import hashlib
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from conformance import CONTEXT, OPTIONS, SystemdHarness

from osrdyne.drivers.base import InstanceState
from osrdyne.drivers.systemd import SystemdDriver
from osrdyne.drivers.systemd.options import BusChoice
from osrdyne.errors import SlotTakenError, StartFailedError
from osrdyne.testing.driver_conformance import PATIENCE, SECRET, clean_up, exited, find, is_ready, make_spec
from osrdyne.testing.driver_harness import AMQP_URI

FILES = Path("/run/osrdyne")
UNITS = Path("/etc/systemd/system")


@pytest.fixture
def make_driver():
    def make(**options):
        context = replace(CONTEXT, worker_config={"runtime": {"stop_grace": 30.0}})
        return SystemdDriver(OPTIONS.model_copy(update={"bus": BusChoice.AUTO, **options}), context)

    return make


@pytest.fixture
async def driver(make_driver):
    driver = make_driver()
    yield driver
    await clean_up(driver)


@pytest.fixture
def other_unit():
    """A template that osrdyne did not make, installed for one test."""
    path = UNITS / "osrdyne-worker-other@.service"

    def install(change):
        path.write_text(change((UNITS / "osrdyne-worker-conformance@.service").read_text()))
        systemctl("daemon-reload")

    yield install
    path.unlink(missing_ok=True)
    systemctl("daemon-reload")


def systemctl(*arguments):
    return subprocess.run(["systemctl", *arguments], check=True, capture_output=True, text=True).stdout


async def test_password_is_shown_by_neither_systemd_nor_files_nor_the_environment(driver):
    started = await driver.start(make_spec())
    said = await is_ready(driver, started)
    shown = systemctl("show", started.external_id)
    assert f"Id={started.external_id}" in shown
    assert SECRET not in shown
    assert said["uri_sha256"] == hashlib.sha256(AMQP_URI.encode()).hexdigest()
    assert [file.suffix for file in FILES.iterdir()] == [".env"]
    assert all(SECRET not in file.read_text() for file in FILES.iterdir())
    pid = systemctl("show", "-P", "MainPID", started.external_id).strip()
    owner = Path(f"/proc/{pid}").stat()
    as_worker = ["setpriv", f"--reuid={owner.st_uid}", f"--regid={owner.st_gid}", "--clear-groups"]  # as the JVM would
    environment = subprocess.check_output([*as_worker, "cat", f"/proc/{pid}/environ"], text=True)
    assert "WORKER_AMQP_URI_FILE=-" in environment
    assert SECRET not in environment


async def test_workers_are_a_dynamic_user_with_a_directory_for_each_in_the_slice(driver):
    users, directories = set(), set()
    for slot in (0, 1):
        started = await driver.start(make_spec(slot=slot))
        await is_ready(driver, started)
        shown = systemctl("show", "--property=DynamicUser,Slice", started.external_id)
        assert set(shown.split()) == {"DynamicUser=yes", "Slice=osrdyne.slice"}
        pid = systemctl("show", "-P", "MainPID", started.external_id).strip()
        instance = started.external_id.partition("@")[2].removesuffix(".service")
        owner = Path(f"/proc/{pid}").stat().st_uid
        directory = Path(f"/var/lib/private/osrdyne-worker/{instance}")
        assert directory.stat().st_uid == owner
        assert systemctl("show", "-P", "WorkingDirectory", started.external_id).strip().endswith(f"/{instance}")
        users.add(owner)
        directories.add(directory)
    assert 0 not in users
    assert len(directories) == 2


@pytest.mark.parametrize("unit", ["osrdyne.service", "osrdyne-worker@.service"])
def test_unit_scores_well_in_the_review_of_systemd(unit):
    """The exposure that `systemd-analyze security` computes, times ten; an ordinary service has 96."""
    review = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=16"]
    done = subprocess.run([*review, f"/etc/systemd/system/{unit}"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "Overall exposure level" in done.stdout


async def test_units_of_others_are_neither_listed_nor_touched(driver):
    (FILES / "stranger.env").write_text("A=1\n")
    (FILES / "stranger.uri").touch()
    stranger = "osrdyne-worker-other-people@stranger.service"
    systemctl("start", stranger)
    started = await driver.start(make_spec())
    assert await driver.list_instances() == [started]
    await driver.stop(started.instance_id, grace=0)
    assert systemctl("is-active", stranger).strip() == "active"
    systemctl("stop", stranger)
    (FILES / "stranger.env").unlink()
    (FILES / "stranger.uri").unlink()


@pytest.mark.parametrize(
    ("options", "message", "line"),
    [
        ({"template": "osrdyne-worker-nowhere"}, "deploy/systemd", ""),
        ({"bus": BusChoice.DBUS}, "203/EXEC", "No such file or directory"),
        ({"bus": BusChoice.SYSTEMCTL}, "203/EXEC", "No such file or directory"),
    ],
    ids=["unit", "program", "program without D-Bus"],
)
async def test_what_is_missing_refuses_a_start_for_good(make_driver, other_unit, options, message, line):
    other_unit(lambda text: text.replace("ExecStart=/opt/osrdyne/bin/python", "ExecStart=/nowhere/python"))
    driver = make_driver(**{"template": "osrdyne-worker-other", **options})
    with pytest.raises(StartFailedError, match=message) as caught:
        await driver.start(make_spec())
    assert line in "\n".join(caught.value.log_lines)
    assert await driver.list_instances() == []
    await driver.close()


@pytest.fixture
async def half_done(driver, make_driver, monkeypatch):
    """What a controller leaves that dies in a start when nothing is missing but the unit."""
    dead, begun = make_driver(), asyncio.Event()

    async def never_returns(*_):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(dead, "_start_unit", never_returns)
    starting = asyncio.create_task(dead.start(make_spec()))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    starting.cancel()
    await asyncio.wait({starting})
    await dead.close()
    [left] = await driver.list_instances()
    return left


async def test_start_that_a_dead_controller_left_half_done_frees_its_slot(driver, half_done):
    assert (half_done.state, half_done.exit.reason) == (InstanceState.EXITED, "it was never started")
    await driver.remove(half_done.instance_id)
    assert (await driver.start(make_spec())).state is InstanceState.RUNNING


async def test_start_that_a_dead_controller_left_half_done_may_land_late(driver, half_done):
    systemctl("start", half_done.external_id)
    assert [item.state for item in await driver.list_instances()] == [InstanceState.RUNNING]
    await is_ready(driver, half_done)
    systemctl("stop", half_done.external_id)
    assert (await find(driver, half_done.instance_id)).exit.code == 0


async def test_start_that_lands_after_its_file_was_removed_starts_nothing(driver):
    unit = driver._names.unit(driver._names.instance(make_spec().key, 0))
    late = subprocess.run(["systemctl", "start", unit], check=False, capture_output=True)
    systemctl("reset-failed", unit)
    assert late.returncode != 0


async def test_worker_whose_file_was_deleted_is_still_listed_and_holds_its_slot(driver):
    started = await driver.start(make_spec())
    [file] = FILES.glob("*.env")
    file.unlink()
    [listed] = await driver.list_instances()
    assert (listed.key, listed.external_id, listed.spec_hash) == (started.key, started.external_id, "")
    with pytest.raises(SlotTakenError):
        await driver.start(make_spec())
    await driver.stop(listed.instance_id, grace=5)
    assert await driver.list_instances() == []


async def test_worker_with_too_little_memory_is_killed_and_reports_it(make_driver, other_unit):
    hungry = "ExecStart=/opt/osrdyne/bin/python -c 'print(len(b\"1\" * 10**9))'"
    other_unit(lambda text: re.sub("ExecStart=.*", hungry, text).replace("#MemoryMax=8G", "MemoryMax=64M"))
    driver = make_driver(template="osrdyne-worker-other")
    ended = await exited(driver, await driver.start(make_spec()))
    assert ended.exit.signal == "SIGKILL"
    assert "memory" in ended.exit.reason
    await clean_up(driver)


async def test_without_dbus_systemctl_does_it_all(driver):
    async with SystemdHarness().away():
        started = await driver.start(make_spec())
        assert await driver.list_instances() == [started]
        await driver.stop(started.instance_id, grace=5)
        assert (await find(driver, started.instance_id)).state is InstanceState.EXITED
        assert [(finding.subject, finding.fatal) for finding in await driver.check() if not finding.ok] == [
            ("systemd", False)
        ]


MISFITS = {
    "restarts by itself": ("Restart=no", "Restart=always"),
    "reads no file": ("%t/osrdyne/%i.env", "/elsewhere/%i.env"),
    "on its standard input": ("StandardInput=", "#"),
    "worker.stop_grace is 30 s": ("TimeoutStopSec=5min", "TimeoutStopSec=9s"),
}


async def test_unit_that_does_not_fit_is_found_by_doctor(make_driver, other_unit):
    for message, change in MISFITS.items():
        other_unit(lambda text, change=change: text.replace(*change))
        driver = make_driver(template="osrdyne-worker-other")
        assert any(message in finding.message for finding in await driver.check() if not finding.ok), message
        await driver.close()
