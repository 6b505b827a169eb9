"""The Java process (JVM) of a worker: start it, copy its output to the worker's log, end it, find out why it ended.

Used by `session`. A process has one JVM at most, which pyspark holds in `SparkContext._gateway`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from osrdyne.errors import ConfigurationError
from osrdyne.logs import get_logger, mask_uri
from osrdyne_worker.spark.java.surroundings import locale_variables, log_in

log = get_logger(__name__)

REMEMBERED_LINES = 200
RECENT = 60.0
"""The maximum age in seconds of a log line that may name the cause of the JVM's end: a JVM may run on for long after
other errors."""
LONGEST_LINE = 64 * 1024
_END_TIMEOUT = 10.0
_POLL_INTERVAL = 0.02
_LAST_OUTPUT_TIMEOUT = 1.0
"""Seconds to wait for the last output of a JVM that has ended. Processes that it started may still hold the pipe."""

_NO_MEMORY = re.compile(r"java\.lang\.OutOfMemoryError(?:: [\w -]+)?|insufficient memory for the Java Runtime")
_LOGGED_ERROR = re.compile(r"^\d\d/\d\d/\d\d \d\d:\d\d:\d\d (?:ERROR|FATAL) (.+)")
_FAULT = re.compile(r"^(?:Error occurred during initialization of VM|Error: (?!Could not create|A fatal exception).+)")
_UNCAUGHT = re.compile(r'^Exception in thread "main" (?:[\w.$]+: )?(.+)')
_UNINTERESTING = re.compile(
    r"^(?:\s+at |\s*\.\.\. \d+ more|Error: Could not create the Java|Error: A fatal exception|"
    r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d (?:WARN|INFO) |WARNING: |Picked up |Using Spark's default log4j|Setting default log"
    r"|To adjust logging level|\s*$)"
)
_SPARK_ERROR = re.compile(r"\[[A-Z][A-Z0-9_.]+\]")
_PACKAGE = re.compile(r"^(?:[a-z_][\w$]*\.)+(?:SparkIllegalArgumentException: |SparkException: )?")
_SQL_STATE = re.compile(r"\s*SQLSTATE: \w{5}$")
MAX_MESSAGE = 1000
MAX_CAUSES = 20
_SPARK_OUT_OF_MEMORY = 52
"""The exit code with which Spark ends its process after an OutOfMemoryError."""
_REMEDY = "raise spark.driver.memory, or let requests use less data at once"


class JvmOutput:
    """Copies the JVM's standard output and standard error to our standard error, and stores the last lines."""

    def __init__(self, *, sink: int = 2, monotonic: Callable[[], float] = time.monotonic) -> None:
        source, self.end = os.pipe()
        self._sink = sink
        self._monotonic = monotonic
        self._lines: deque[tuple[float, str]] = deque(maxlen=REMEMBERED_LINES)
        self._thread = threading.Thread(target=self._copy, args=(source,), name="jvm-output", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Close our end of the pipe: the JVM holds its own."""
        # While this end is open the reading thread never sees the end of the JVM's output.
        os.close(self.end)

    def recent(self) -> list[str]:
        """The last lines. Waits briefly for the last output of a JVM that is ending."""
        self._thread.join(_LAST_OUTPUT_TIMEOUT)
        since = self._monotonic() - RECENT
        return [line for at, line in list(self._lines) if at >= since]

    def _copy(self, source: int) -> None:
        with open(source, "rb") as lines:
            while line := lines.readline(LONGEST_LINE):
                # Remembered before it is passed on: callers get the last lines of a JVM as the reason.
                self._lines.append((self._monotonic(), line.decode("utf-8", "replace").rstrip()))
                rest = memoryview(line)
                with suppress(OSError):  # a log that cannot be written must not block the JVM
                    while rest:
                        rest = rest[os.write(self._sink, rest) :]


class Jvm:
    """The JVM that this process has started."""

    def __init__(self, process: subprocess.Popen[bytes] | None, output: JvmOutput) -> None:
        self._process = process
        self._output = output
        self.started_at = time.monotonic()

    @classmethod
    def present(cls) -> Jvm:
        """The JVM that pyspark is connected with already; its output is not captured."""
        output = JvmOutput()
        output.started()
        return cls(process(), output)

    @property
    def pid(self) -> int | None:
        """None for a JVM that others have started."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is None or self._process.poll() is None

    def recent_output(self) -> list[str]:
        """The last lines that the JVM has written."""
        return self._output.recent()

    def why_ended(self) -> str | None:
        """Why the JVM ended, or why Spark stopped in it; None if unknown."""
        code = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):  # its connections close a moment before the process ends
                code = self._process.wait(_LAST_OUTPUT_TIMEOUT)
        return cause_of_end(code, self._output.recent())


def cause_of_end(code: int | None, lines: Sequence[str]) -> str | None:
    """Why a JVM ended, from its exit code (negative: a signal; None: it still runs) and its last lines."""
    without_memory = next((found[0] for line in reversed(lines) if (found := _NO_MEMORY.search(line))), None)
    if without_memory is not None or code == _SPARK_OUT_OF_MEMORY:
        return f"Spark's Java process ran out of memory ({without_memory or f'exit code {code}'}): {_REMEDY}."
    if code == -9:
        return f"Spark's Java process was killed by SIGKILL, as the kernel does when memory runs out: {_REMEDY}."
    error = last_error(lines)
    if code is None:
        return None if error is None else f"Spark stopped: {error}"
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"Spark's Java process ended with {how}{'.' if error is None else f': {error}'}"


def last_error(lines: Sequence[str]) -> str | None:
    """The line of a JVM's output that most likely names the cause of its end; None if no line does."""
    for index, line in enumerate(lines):
        if _FAULT.match(line):
            following = lines[index + 1] if line.endswith("of VM") and index + 1 < len(lines) else line
            return mask_uri(following.strip())
    for pattern in (_UNCAUGHT, _LOGGED_ERROR):
        found = next((match[1] for line in reversed(lines) if (match := pattern.match(line))), None)
        if found is not None:
            return mask_uri(found.strip())
    return next((mask_uri(line.strip()) for line in lines if not _UNINTERESTING.match(line)), None)


def causes(java_exception: Any) -> Iterator[Any]:
    """A Java exception and its causes, at most `MAX_CAUSES`. Calls the JVM, which must be running."""
    for _ in range(MAX_CAUSES):
        if java_exception is None:
            return
        yield java_exception
        java_exception = java_exception.getCause()


def root_message(java_exception: Any) -> str:
    """The class and message of the deepest cause of a Java exception, in one line; prefers an error of Spark itself."""
    text = ""
    for cause in causes(java_exception):
        text = str(cause.toString())
        if _SPARK_ERROR.search(text):
            break
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    return _SQL_STATE.sub("", _PACKAGE.sub("", " ".join(lines)))[:MAX_MESSAGE].strip()


class StartingJvm:
    """A JVM from its start until pyspark is connected with it. Imports nothing of pyspark before `connect`, so that
    Python can import its modules meanwhile.

    `settings`: those on its command line, which all users of the host can read. `home`: the installation of Spark.
    Raises `OSError` if it cannot be started.
    """

    def __init__(self, settings: Mapping[str, str], home: Path) -> None:
        self.settings = dict(settings)
        self._connected = False
        self._output = JvmOutput()
        self._directory = Path(tempfile.mkdtemp())
        # As pyspark's `launch_gateway` starts it: the JVM writes its port and a secret into this file.
        self._connection_file = self._directory / "connection"
        command = [str(home / "bin" / "spark-submit")]
        for name, value in self.settings.items():
            command += ["--conf", f"{name}={value}"]
        command += shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        variables = {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._connection_file)}
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **locale_variables(), **variables},
                stdin=subprocess.PIPE,  # the JVM exits at its end, and so with this process
                stdout=self._output.end,
                stderr=self._output.end,
                preexec_fn=_ignore_interrupts,
            )
        except BaseException:
            self._remove_directory()
            raise
        finally:
            self._output.started()

    @property
    def is_connected(self) -> bool:
        """Whether `connect` was called, which ends the JVM itself if it fails."""
        return self._connected

    def connect(self) -> Jvm:
        """Wait for the JVM and connect pyspark with it. Raises `JvmStartError` with the JVM's own message if it
        exits."""
        from pyspark import SparkContext
        from pyspark.java_gateway import launch_gateway

        self._connected = True
        try:
            port, secret = self._wait()
            with _variables(PYSPARK_GATEWAY_PORT=str(port), PYSPARK_GATEWAY_SECRET=secret):
                gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
            gateway.proc = self._process
            log_in(gateway)  # before Spark, whose context needs a user
            SparkContext._ensure_initialized(gateway=gateway)
        except BaseException:
            _end_process(self._process)
            raise
        finally:
            self._remove_directory()
        return Jvm(self._process, self._output)

    def end(self) -> None:
        """End the JVM, which pyspark is not connected with."""
        _end_process(self._process)
        self._remove_directory()

    def _wait(self) -> tuple[int, str]:
        """The port of the JVM and its secret."""
        while not self._connection_file.exists():
            if self._process.poll() is not None:
                error = last_error(self._output.recent())
                raise JvmStartError(error or "its messages are above in this worker's output.")
            time.sleep(_POLL_INTERVAL)
        # Complete: the JVM writes another file and renames it.
        content = self._connection_file.read_bytes()
        port, length = struct.unpack_from(">ii", content)
        return port, content[8 : 8 + length].decode()

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _ignore_interrupts() -> None:
    # A terminal sends Ctrl-C to all its processes; the worker ends its JVM itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _variables(**variables: str) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


class JvmStartError(Exception):
    """The JVM exited while it started; the message comes from the JVM."""


def is_started() -> bool:
    """Whether pyspark is connected with a JVM, as in a process whose Spark others have started."""
    if "pyspark" not in sys.modules:
        return False
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def process() -> subprocess.Popen[bytes] | None:
    """The JVM that pyspark has started for this process, if any."""
    from pyspark import SparkContext

    found: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)
    return found


def require_java() -> None:
    """Raises `ConfigurationError` if there is no Java."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        where = f"JAVA_HOME is {home}, where there is no bin/java" if home else "there is no java on the PATH"
        raise ConfigurationError(
            f"Spark needs Java 17 or later, and {where}: install it (Debian: apt install default-jre-headless) "
            "or set JAVA_HOME."
        )


def end() -> None:
    """End the JVM of this process and reset pyspark, so that it can start another one."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway, running = SparkContext._gateway, process()
    if gateway is None:
        return
    # Reset first: if the JVM does not end, no later session may use it.
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    if running is not None:
        _end_process(running)
    try:
        # Not `gateway.shutdown()`: it waits for an answer of the JVM, which may be dead.
        gateway.shutdown_callback_server()
        gateway.close()
    except Exception:
        log.debug("JVM gateway already closed")


def _end_process(running: subprocess.Popen[bytes]) -> None:
    if running.stdin is not None:
        with suppress(OSError):
            running.stdin.close()  # the JVM exits at the end of its standard input
    try:
        running.wait(_END_TIMEOUT)
    except subprocess.TimeoutExpired:
        log.warning("JVM killed, it did not exit", pid=running.pid)
        running.kill()
        running.wait(_END_TIMEOUT)
