"""A pytest plugin: the tier of a test follows from the fixtures that it uses, and each tier has a target of its own.

| tier | a test belongs to it when it needs |
|---|---|
| `test` | none of the following: pure code, fakes, the RabbitMQ of the run, a daemon in the process of the test |
| `process` | the fixture `processes`: it starts daemons, workers, commands or servers as processes |
| `spark` | the fixture `java`: it starts Spark, or uses the session `spark` |
| `docker`, `kubernetes` | the fixture `docker_engine` or `kubernetes_api` |
| `nightly` | the mark `nightly`, whatever its fixtures |

The first three fixtures stand below; another fixture that starts such a thing requests one of them, and a file without
such a fixture says `pytestmark = pytest.mark.usefixtures("processes")`. A test that starts a process without the
fixture fails. `--tier rabbitmq4` runs the tests about RabbitMQ of the first tier once more, and those of the second
that have the mark `rabbitmq4`.

The tier gives each test its time limit, and with `--tier` the order of the files, the longest first
(`tests/durations.json`, written by `tools/test_times --record`). In the tier `spark`, two processes of pytest-xdist
prefer the files that use the session `spark`, because its start takes as much processor time as most of them.
"""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Generator, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TIER_OF_FIXTURE = {"kubernetes_api": "kubernetes", "docker_engine": "docker", "java": "spark", "processes": "process"}
"""A test with several of them belongs to the tier of the first."""
TIERS = ("test", "process", "spark", "rabbitmq4", "docker", "kubernetes", "nightly")
SECONDS = {"test": 60, "process": 180, "spark": 600, "docker": 600, "kubernetes": 180, "nightly": 1800}
"""The time limit of one test, its fixtures included."""
PURE_SECONDS = 10
"""The time limit of a test in `tests/unit`, where nothing waits."""
APART = ("delta", "hdfs", "s3")
"""Folders whose targets put another PySpark on the path."""
OF_RABBITMQ, OWN_RABBITMQ = {"broker", "rabbitmq"}, "own_broker"
"""Fixtures and parameters of tests that are about the RabbitMQ they are given, and of tests that start their own."""
SHARED_SPARKS = 2
"""Processes of pytest-xdist that prefer tests with the session `spark`."""
SHARING = (
    "tests/spark/",
    "tests/security/test_sql_",
    "tests/contract/test_rabbit_stream_contract.py",
)
"""Where these tests are."""
KNOWN_TIERS = Path("build") / "tiers.json"
"""Which tiers the tests of a file belong to, so that the next target imports only files that it needs."""


# --- fixtures


@pytest.fixture(scope="session")
def processes():
    """Requested by what starts daemons, workers, commands or servers as processes."""


@pytest.fixture(scope="session")
def java(processes):
    """Requested by what starts Spark."""


@pytest.fixture(scope="session")
def docker_engine(processes):
    """Requested by what needs a Docker engine."""


@pytest.fixture(scope="session")
def kubernetes_api(processes):
    """Requested by what needs the API server of `KUBECONFIG`."""


# --- the tier of a test


def tier_of(item: pytest.Item) -> str:
    if item.get_closest_marker("nightly") is not None:
        return "nightly"
    fixtures = getattr(item, "fixturenames", ())
    return next((tier for fixture, tier in TIER_OF_FIXTURE.items() if fixture in fixtures), "test")


def is_about_rabbitmq(item: pytest.Item) -> bool:
    """Whether the test runs on the RabbitMQ that it is given; some suites run on a fake as well."""
    if tier_of(item) not in {"test", "process"} or item.get_closest_marker("one_rabbitmq") is not None:
        return False
    if tier_of(item) == "process" and item.get_closest_marker("rabbitmq4") is None:
        return False
    fixtures = set(getattr(item, "fixturenames", ()))
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    # Only text is compared: values of numpy and pandas have an `==` of their own.
    named = any(isinstance(value, str) and value == "rabbitmq" for value in parameters)
    real = named or ("broker" in fixtures and "component" not in item.path.parts)
    return real and OWN_RABBITMQ not in fixtures


def is_chosen(item: pytest.Item, tier: str | None) -> bool:
    """`tier`: None for a run without `--tier`, which leaves out only what takes long."""
    if tier is None:
        return tier_of(item) != "nightly"
    return is_about_rabbitmq(item) if tier == "rabbitmq4" else tier_of(item) == tier


def time_limit(item: pytest.Item) -> int:
    tier = tier_of(item)
    return PURE_SECONDS if tier == "test" and "unit" in item.path.parts else SECONDS[tier]


# --- collection


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier only; see tests/plugins/tiers.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests are known to belong to other tiers are not imported."""
    tier = config.getoption("tier")
    if tier is None:
        return None
    if collection_path.is_dir():
        return True if collection_path.parent == config.rootpath / "tests" and collection_path.name in APART else None
    known = known_tiers(config.rootpath).get(collection_path.relative_to(config.rootpath).as_posix())
    return True if known is not None and tier not in known else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After pytest-randomly, a wrapper, has shuffled, and before pytest-xdist reads the marks of groups."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(time_limit(item)))
    tier = config.getoption("tier")
    if tier is not None:
        remember_tiers(config, items)
    chosen = [item for item in items if is_chosen(item, tier)]
    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item, tier)])
    items[:] = chosen
    if tier is None:
        return
    seconds = durations(config.rootpath)
    items.sort(key=lambda item: -seconds.get(file_of(item), 0.0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of the tier `spark`: all tests of a file run in one process, and two processes prefer files with shared Spark."""
    if config.getoption("tier") != "spark":
        return None
    from xdist.scheduler import LoadFileScheduling  # in the process that distributes the tests

    class SparkScheduling(LoadFileScheduling):  # type: ignore[misc]
        def _assign_work_unit(self, node: Any) -> None:
            shared = self.nodes.index(node) < SHARED_SPARKS
            preferred = (file for file in self.workqueue if file.startswith(SHARING) is shared)
            self.workqueue.move_to_end(next(preferred, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    return SparkScheduling(config, log)


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(item.config.rootpath).as_posix()


@cache
def durations(root: Path) -> dict[str, float]:
    """Seconds of each test file on the reference machine."""
    found: dict[str, float] = json.loads((root / "tests" / "durations.json").read_text(encoding="utf-8"))["files"]
    return found


# --- which files a later target need not import


@cache
def fingerprint(root: Path) -> str:
    """Of all that decides on the tier of a test besides its own file: helpers, and the suites of `osrdyne.testing`."""
    helpers = (path for path in (root / "tests").rglob("*.py") if not path.name.startswith("test_"))
    return digest_of(*sorted([*helpers, *(root / "osrdyne" / "testing").rglob("*.py")]))


def digest_of(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def known_tiers(root: Path) -> dict[str, list[str]]:
    """Of the files that have not changed since a run imported them."""
    try:
        kept = json.loads((root / KNOWN_TIERS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    files = kept["files"].items() if kept.get("helpers") == fingerprint(root) else ()
    present = [(name, one) for name, one in files if (root / name).is_file()]
    return {name: one["tiers"] for name, one in present if one["digest"] == digest_of(root / name)}


def remember_tiers(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Of the files that this run has imported, for the next one."""
    root, worker = config.rootpath, os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if worker != "gw0" or [Path(one).resolve() for one in config.args] != [root / "tests"]:
        return
    found: dict[str, set[str]] = {}
    for item in items:
        also = {"rabbitmq4"} if is_about_rabbitmq(item) else set()
        found.setdefault(file_of(item), set()).update({tier_of(item)} | also)
    known = known_tiers(root)
    if found.keys() <= known.keys():
        return
    tiers = known | {name: sorted(of_file) for name, of_file in found.items()}
    files = {name: {"digest": digest_of(root / name), "tiers": tiers[name]} for name in tiers}
    (root / KNOWN_TIERS).parent.mkdir(exist_ok=True)
    (root / KNOWN_TIERS).with_suffix(".new").write_text(json.dumps({"helpers": fingerprint(root), "files": files}))
    (root / KNOWN_TIERS).with_suffix(".new").replace(root / KNOWN_TIERS)


# --- no processes in the first tier


class ProcessStarts:
    """The programs that the process of the tests has started, by test."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    def note(self, arguments: Any) -> None:
        """The name of the program, and of the Python module that it runs."""
        words = [arguments] if isinstance(arguments, str | bytes | os.PathLike) else list(arguments)
        program, *more = (os.fsdecode(word) for word in words)
        module = more[more.index("-m") + 1] if "-m" in more[:-1] else ""
        self.programs.append(f"{Path(program).name}:{module}" if module else Path(program).name)

    @property
    def heavy(self) -> list[str]:
        return sorted({program for program in self.programs if HEAVY.search(program)})


HEAVY = re.compile("osrdyne|rabbitmq|epmd|spark-submit|spark-class|docker")
"""Daemons, workers, commands and servers. What else a test starts ends at once."""
STARTS = pytest.StashKey[ProcessStarts]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    starts = item.config.stash.setdefault(STARTS, ProcessStarts())
    starts.programs.clear()
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def noted(self: Any, arguments: Any, *more: Any) -> None:
        starts.note(arguments)
        execute(self, arguments, *more)

    subprocess.Popen._execute_child = noted  # type: ignore[attr-defined]
    try:
        return (yield)
    finally:
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    starts = item.config.stash.get(STARTS, ProcessStarts())
    if call.when == "teardown" and starts.programs:
        item.user_properties.append(("processes", " ".join(sorted(starts.programs))))
        report.user_properties = list(item.user_properties)
        if starts.heavy and tier_of(item) == "test" and report.passed:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} starts {', '.join(starts.heavy)}: it needs the fixture `processes`"
    return report
