"""A standalone cluster of Spark on this host, from the wheel of PySpark, which has no start scripts."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyspark

from osrdyne.client import AsyncClient
from tests.acceptance.daemon_process import DaemonProcess, free_port, until

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
PATIENCE = 240.0
EXECUTOR = "CoarseGrainedExecutorBackend"


class StandaloneCluster:
    """A master, and one worker with two cores. The master keeps its port when it is started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._master: subprocess.Popen[bytes] | None = None
        self._worker: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self.start_master()
        work = self.directory / "work"
        self._worker = self._run(
            "worker", "worker.Worker", "--cores", "2", "--memory", "2g", "--work-dir", str(work), self.url
        )
        await self._until_logged("worker", "Successfully registered with master")

    async def start_master(self) -> None:
        self._master = self._run("master", "master.Master", "--port", str(self.port))
        await self._until_logged("master", "New state: ALIVE")

    def kill_master(self) -> None:
        assert self._master is not None
        self._master.kill()
        self._master.wait()

    def executors(self) -> list[psutil.Process]:
        """The JVMs of executors that run now."""
        assert self._worker is not None
        return list(self._executors(psutil.Process(self._worker.pid)))

    def _executors(self, worker: psutil.Process) -> Iterator[psutil.Process]:
        for process in worker.children(recursive=True):
            try:
                if any(EXECUTOR in argument for argument in process.cmdline()):
                    yield process
            except psutil.NoSuchProcess:
                continue

    def close(self) -> None:
        """End both, and the executors."""
        processes = [process for process in (self._worker, self._master) if process is not None]
        executors = self.executors() if self._worker is not None and self._worker.poll() is None else []
        for process in processes:
            process.kill()
            process.wait()
        for executor in executors:
            if executor.is_running():
                executor.kill()

    def _run(self, name: str, java_class: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self.directory / f"{name}.log"
        log.unlink(missing_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen(
                [
                    str(SPARK_CLASS),
                    f"org.apache.spark.deploy.{java_class}",
                    *("--host", "127.0.0.1", "--webui-port", "0"),
                    *arguments,
                ],
                env={
                    **os.environ,
                    "SPARK_HOME": str(SPARK_CLASS.parents[1]),
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "SPARK_DAEMON_MEMORY": "256m",
                    # The REST server would take port 6066 of the host.
                    "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    async def _until_logged(self, name: str, text: str) -> None:
        log = self.directory / f"{name}.log"
        await until(lambda: text in log.read_text(errors="replace"), f"{name} logs {text!r}", timeout=PATIENCE)


async def pid_of_task(directory: Path, number: int) -> int:
    """The process of a task of `/hold`, once it runs."""
    file = directory / str(number)
    await until(lambda: file.exists() and file.read_text(), f"task {number} runs", timeout=PATIENCE)
    return int(await asyncio.to_thread(file.read_text))


async def use_master(daemon: DaemonProcess, master: str) -> AsyncClient:
    """Start a daemon whose workers run on this master; a client of it."""
    daemon.write_settings(worker={"spark_master": master})
    await daemon.start()
    return daemon.client(default_timeout=2 * PATIENCE)
