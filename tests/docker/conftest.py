"""Images for tests, built once for a run from the checkout; the engine's cache makes the next run quick."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT = 1200.0
"""Seconds for a build with an empty cache on a busy machine: Java and Spark are downloaded."""


def docker(*arguments: str, timeout: float = 300.0) -> str:
    """What the command prints; it must succeed."""
    command = ["docker", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def containers_of(stack: str) -> list[str]:
    """Those of a daemon's stack, in any state."""
    return docker("ps", "-aq", "--filter", f"label=osrdyne.stack={stack}").split()


def remove_containers(stack: str) -> None:
    for identity in containers_of(stack):
        docker("rm", "-f", identity)


def build_image(dockerfile: str, tag: str) -> str:
    """Build from the checkout and return the tag."""
    docker("build", "--quiet", "--file", dockerfile, "--tag", tag, ".", timeout=BUILD_TIMEOUT)
    return tag


@pytest.fixture(scope="session", autouse=True)
def all_need_docker(docker_engine):
    """Also those that only build an image."""


@pytest.fixture(scope="session")
def conformance_image():
    return build_image("tests/docker/conformance.Dockerfile", "osrdyne-test/conformance")


@pytest.fixture(scope="session")
def controller_image():
    return build_image("deploy/images/controller.Dockerfile", "osrdyne-test/controller")


@pytest.fixture(scope="session")
def spark_worker_image():
    return build_image("deploy/images/spark-worker.Dockerfile", "osrdyne-test/spark-worker")
