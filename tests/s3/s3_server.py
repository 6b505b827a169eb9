"""A server of the S3 protocol (moto, with a user whose signatures it checks), and the jars of S3A from Maven."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from remote_files import hadoop_version, maven

from osrdyne.dev.rabbitmq.node_files import free_ports

SERVER = "moto[server]==5.2.5"
START_TIMEOUT = 120.0
BUCKET = "reports"
PROJECT = """<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>tests</groupId><artifactId>s3</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.hadoop</groupId><artifactId>hadoop-aws</artifactId><version>{version}</version>
  </dependency></dependencies>
</project>
"""
# Run by the Python of the server, which has boto3: a bucket, and a user who may do everything in S3.
PREPARE = """
import json, sys, boto3
options = dict(endpoint_url=sys.argv[1], region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
boto3.client("s3", **options).create_bucket(Bucket=sys.argv[2])
iam = boto3.client("iam", **options)
iam.create_user(UserName="osrdyne")
policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
iam.put_user_policy(UserName="osrdyne", PolicyName="s3", PolicyDocument=json.dumps(policy))
print(json.dumps(iam.create_access_key(UserName="osrdyne")["AccessKey"], default=str))
"""


def s3a_jars(cache: Path) -> str:
    """The class path of `hadoop-aws` of PySpark's version, and of what it needs: 690 MB, fetched once."""
    version = hadoop_version()
    directory = cache / f"jars-{version}"
    complete = directory / "complete"
    if not complete.exists():
        directory.mkdir(parents=True, exist_ok=True)
        project = directory / "pom.xml"
        project.write_text(PROJECT.format(version=version), encoding="utf-8")
        maven("copy-dependencies", "-f", str(project), "-DincludeScope=runtime", f"-DoutputDirectory={directory}")
        complete.touch()
    return f"{directory}/*"


def server_python(cache: Path) -> Path:
    """The Python of an environment with the server alone: its packages are no business of osrdyne's."""
    environment = cache / "venv"
    python = environment / "bin" / "python"
    complete = environment / SERVER
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True, timeout=300)
        subprocess.run([python, "-m", "pip", "install", "--quiet", SERVER], check=True, timeout=600)
        complete.touch()
    return python


@dataclass
class S3Server:
    """`address` is its URL; `access_key` and `secret_key` belong to its user. The log is in `directory`."""

    directory: Path
    cache: Path
    address: str = ""
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the server, create the user and the bucket, and let it check each signature from then on."""
        python = server_python(self.cache)
        [port] = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        with (self.directory / "moto.log").open("wb") as log:
            self._process = subprocess.Popen(
                [python.with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)],
                stdout=log,
                stderr=log,
                # Until then everybody may do everything.
                env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "1000000"},
            )
        end = time.monotonic() + START_TIMEOUT
        while not self._answers():
            assert time.monotonic() < end, f"the server did not start; see {self.directory}"
            assert self._process.poll() is None, f"the server ended; see {self.directory}"
            time.sleep(0.1)
        prepared = subprocess.run(
            [python, "-c", PREPARE, self.address, BUCKET], check=True, timeout=120, stdout=subprocess.PIPE
        )
        key = json.loads(prepared.stdout)
        self.access_key, self.secret_key = key["AccessKeyId"], key["SecretAccessKey"]
        plain = {"Content-Type": "text/plain"}
        reset = urllib.request.Request(f"{self.address}/moto-api/reset-auth", data=b"0", headers=plain)
        urllib.request.urlopen(reset, timeout=10).close()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.address}/moto-api/data.json", timeout=10).close()
        except OSError:
            return False
        return True
