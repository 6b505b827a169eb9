"""The systemd driver on a systemd in memory, for events that are rare on the real one, and its environment files."""

import asyncio
import stat

import pytest

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext, InstanceState
from osrdyne.drivers.systemd import SystemdDriver
from osrdyne.drivers.systemd.options import SystemdOptions
from osrdyne.drivers.systemd.records import EnvironmentFiles, Record
from osrdyne.drivers.systemd.units import ActiveState
from osrdyne.errors import DriverUnavailableError
from osrdyne.protocol.names import Key, WorkerId
from osrdyne.testing.driver_harness import make_spec


class WorkingUnits:
    """Starts units. `before_states`, `after_states`: called once, before and after a listing of all units is made."""

    def __init__(self):
        self.up = {}
        self.before_states = self.after_states = None

    async def states(self, pattern):
        if "*" in pattern:
            await self._once("before_states")
        found = dict(self.up)
        if "*" in pattern:
            await self._once("after_states")
        return found

    async def start(self, unit):
        self.up[unit] = ActiveState.UP
        return True

    async def forget_failure(self, _unit):
        pass

    async def _once(self, name):
        hook = getattr(self, name)
        setattr(self, name, None)
        if hook is not None:
            await hook()


@pytest.fixture
async def driver(tmp_path):
    options = SystemdOptions(runtime_directory=str(tmp_path / "osrdyne"))
    context = DriverContext(pool="blue", stack="b:1//", clock=SystemClock(), worker_command=())
    driver = SystemdDriver(options, context)
    yield driver
    await driver.close()


def use(monkeypatch, driver, units):
    async def chosen():
        return units

    monkeypatch.setattr(driver, "_units", chosen)
    return units


async def test_start_that_systemd_never_gets_to_is_given_up_and_frees_its_slot(driver, monkeypatch):
    units = use(monkeypatch, driver, WorkingUnits())
    units.start = lambda _unit: asyncio.Event().wait()  # it waits for another unit
    monkeypatch.setattr("osrdyne.drivers.systemd.driver._START_PATIENCE", 0.01)
    with pytest.raises(DriverUnavailableError, match="systemctl list-jobs"):
        await driver.start(make_spec())
    [given_up] = await driver.list_instances()
    assert (given_up.state, str(given_up.exit)) == (InstanceState.EXITED, "ended (it was never started)")
    await driver.remove(given_up.instance_id)
    assert await driver.list_instances() == []


async def test_worker_that_starts_after_the_records_were_read_is_listed_with_its_record(driver, monkeypatch):
    units = use(monkeypatch, driver, WorkingUnits())
    spec = make_spec()
    started = []

    async def start():
        started.append(await driver.start(spec))

    units.before_states = start
    assert await driver.list_instances() == started


async def test_worker_whose_start_ends_during_a_listing_is_not_listed_as_ended(driver, monkeypatch):
    units = use(monkeypatch, driver, WorkingUnits())
    spec, may_run, taken = make_spec(), asyncio.Event(), asyncio.Event()
    run_unit = units.start

    async def start_later(unit):
        taken.set()
        await may_run.wait()
        return await run_unit(unit)

    units.start = start_later
    starting = asyncio.create_task(driver.start(spec))
    await taken.wait()

    async def let_it_run():
        may_run.set()
        await starting

    units.after_states = let_it_run
    assert await driver.list_instances() == [await starting]


URI = "amqp://worker:secret@broker/"
RECORD = Record(Key('a\n"漢\0'), 2, WorkerId("w1"), "hash", "3.14", 1234.5)


@pytest.fixture
def files(tmp_path):
    return EnvironmentFiles(tmp_path / "osrdyne", "blue-")


def test_record_is_found_again_and_the_uri_is_in_a_private_file_until_the_worker_has_started(files):
    assert files.create("blue-0-a", RECORD, 'A="1\r2\r\n漢"\n', uri=URI)
    assert files.create("green-0-a", RECORD, "", uri=URI)  # of another pool
    (files.path / "blue-notes.env").write_text("A=1\n")
    assert EnvironmentFiles(files.path, "blue-").records() == {"blue-0-a": RECORD}
    env, uri = files.path / "blue-0-a.env", files.path / "blue-0-a.uri"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (env, uri, files.path)] == [0o600, 0o600, 0o700]
    first, rest = env.read_bytes().split(b"\n", 1)
    assert first.startswith(b"# {") and first.isascii()
    assert rest == 'A="1\r2\r\n漢"\n'.encode()
    assert (uri.read_text(), b"secret" in env.read_bytes()) == (URI, False)
    files.mark_started("blue-0-a", RECORD)
    assert (uri.exists(), files.read("blue-0-a").started) == (False, True)
    assert env.read_bytes().endswith(b"\n" + rest)


def test_slot_is_taken_once_and_freed_by_its_own_worker_only_and_leaves_no_file(files):
    files.create("blue-0-a", RECORD, "", uri=URI)
    assert not files.create("blue-0-a", Record(Key("b"), 0, WorkerId("w2"), "", "", 0.0), "", uri=URI)
    assert sorted(file.name for file in files.path.iterdir()) == ["blue-0-a.env", "blue-0-a.uri"]
    files.remove("blue-0-a", WorkerId("w2"))
    assert files.read("blue-0-a") == RECORD
    files.remove("blue-0-a", RECORD.worker_id)
    assert list(files.path.iterdir()) == []


def test_directory_that_others_can_write_to_is_refused(files):
    files.path.mkdir()
    files.path.chmod(0o777)
    with pytest.raises(DriverUnavailableError, match="another user"):
        files.prepare()
