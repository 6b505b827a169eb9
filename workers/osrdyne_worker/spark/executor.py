"""The command `osrdyne-spark-executor`, which an executor pod on Kubernetes runs in a worker image.

Spark's own images start executors in their entry point; a worker image has no such entry point. Spark describes the
executor in the variables `SPARK_…` of the pod. Source: docs/reference/workers/clusters.md.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
_JAVA_OPTION = re.compile(r"SPARK_JAVA_OPT_(\d+)\Z")
_ARGUMENTS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
INVALID_ENVIRONMENT = 2


def java_command(variables: Mapping[str, str], *, java: str, jars: Path) -> list[str]:
    """The command of the executor's JVM. Raises KeyError with the variable that is missing."""
    memory = variables["SPARK_EXECUTOR_MEMORY"]
    numbered = [(int(match[1]), name) for name in variables if (match := _JAVA_OPTION.match(name)) is not None]
    options = [variables[name] for _, name in sorted(numbered)]
    extra = [path for name in ("SPARK_EXTRA_CLASSPATH", "SPARK_CLASSPATH") if (path := variables.get(name))]
    classes = ":".join([*extra, str(jars / "*")])
    arguments = [word for option, name in _ARGUMENTS.items() for word in (option, variables[name])]
    return [java, *options, f"-Xms{memory}", f"-Xmx{memory}", "-cp", classes, BACKEND, *arguments]


def main() -> NoReturn:
    """Replace this process by the executor's JVM, so that it receives the signals of Kubernetes."""
    import pyspark

    home = Path(pyspark.__file__).parent
    java_home = os.environ.get("JAVA_HOME")
    java = str(Path(java_home) / "bin" / "java") if java_home else shutil.which("java")
    if java is None:
        sys.stderr.write("osrdyne-spark-executor: no Java was found: set JAVA_HOME in the image.\n")
        sys.exit(INVALID_ENVIRONMENT)
    try:
        command = java_command(os.environ, java=java, jars=home / "jars")
    except KeyError as error:
        sys.stderr.write(
            f"osrdyne-spark-executor: the environment variable {error.args[0]} is missing; Spark sets it in the pods "
            "of its executors.\n"
        )
        sys.exit(INVALID_ENVIRONMENT)
    # Python tasks use the Python interpreter of this image.
    environment = {"PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(home), **os.environ}
    os.execve(java, command, environment)


if __name__ == "__main__":
    main()
