"""A real HDFS with one NameNode and one DataNode, from the jars of PySpark and one jar of Hadoop from Maven."""

import json
import subprocess
import time
import urllib.request
from pathlib import Path
from xml.sax.saxutils import escape

from remote_files import JARS, hadoop_version, maven

from osrdyne.dev.rabbitmq.node_files import free_ports

START_TIMEOUT = 240.0
JVM = ("java", "-Xmx256m", "-XX:TieredStopAtLevel=1")


def server_jar(cache: Path) -> Path:
    """The jar with Hadoop's servers, of PySpark's version."""
    version = hadoop_version()
    jar = cache / f"hadoop-client-minicluster-{version}.jar"
    if not jar.exists():
        artifact = f"-Dartifact=org.apache.hadoop:hadoop-client-minicluster:{version}"
        maven("copy", artifact, f"-DoutputDirectory={cache}")
    return jar


class Hdfs:
    """`address` is its URL. Data and logs are in `directory`."""

    def __init__(self, directory: Path, *, cache: Path) -> None:
        self._directory = directory
        self._rpc, self._http = free_ports(2)
        self.address = f"hdfs://127.0.0.1:{self._rpc}"
        self._class_path = f"{directory}:{server_jar(cache)}:{JARS}/*"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._write("core-site.xml", {"fs.defaultFS": self.address})
        self._write(
            "hdfs-site.xml",
            {
                "dfs.replication": "1",
                "dfs.namenode.name.dir": str(directory / "name"),
                "dfs.datanode.data.dir": str(directory / "data"),
                "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
                "dfs.datanode.address": "127.0.0.1:0",
                "dfs.datanode.http.address": "127.0.0.1:0",
                "dfs.datanode.ipc.address": "127.0.0.1:0",
                "dfs.namenode.datanode.registration.ip-hostname-check": "false",
                "dfs.permissions.enabled": "false",
            },
        )

    def start(self) -> None:
        """Start both servers and wait until the DataNode has registered."""
        name_node, data_node = (
            f"org.apache.hadoop.hdfs.server.{name}" for name in ("namenode.NameNode", "datanode.DataNode")
        )
        subprocess.run(self._command(name_node, "-format", "-nonInteractive"), check=True, timeout=START_TIMEOUT)
        for server in (name_node, data_node):
            with (self._directory / f"{server}.log").open("wb") as log:
                self._processes.append(subprocess.Popen(self._command(server), stdout=log, stderr=log))
        end = time.monotonic() + START_TIMEOUT
        while not self._has_data_node():
            assert time.monotonic() < end, f"HDFS did not start; see {self._directory}"
            assert all(process.poll() is None for process in self._processes), f"HDFS ended; see {self._directory}"
            time.sleep(0.2)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _has_data_node(self) -> bool:
        url = f"http://127.0.0.1:{self._http}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                beans = json.load(answer)["beans"]
        except OSError:
            return False
        return bool(beans) and beans[0]["NumLiveDataNodes"] == 1

    def _command(self, *arguments: str) -> list[str]:
        return [*JVM, "-cp", self._class_path, *arguments]

    def _write(self, name: str, properties: dict[str, str]) -> None:
        lines = "".join(
            f"<property><name>{key}</name><value>{escape(value)}</value></property>"
            for key, value in properties.items()
        )
        (self._directory / name).write_text(f"<configuration>{lines}</configuration>", encoding="utf-8")
