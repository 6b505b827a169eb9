"""What is promised of the images in `deploy/images`: no root, a health check, the installed package and no checkout."""

import json

import pytest

from tests.docker.conftest import docker

pytestmark = pytest.mark.timeout(1500)  # a build with an empty cache


@pytest.fixture(params=["controller_image", "spark_worker_image"], ids=["controller", "spark-worker"])
def image(request):
    return request.getfixturevalue(request.param)


def inside(image, *command):
    """The output of a command in the image, with the image's own user and entry point."""
    return docker("run", "--rm", "--network", "none", "--entrypoint", command[0], image, *command[1:])


def test_image_has_a_numbered_user_a_health_check_the_installed_package_and_no_checkout(image):
    config = json.loads(docker("inspect", image))[0]["Config"]
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"][0] in {"CMD", "CMD-SHELL"}
    where = "import osrdyne, osrdyne_worker; print(osrdyne.__file__, osrdyne_worker.__file__)"
    packages = "/opt/osrdyne/lib/python3.11/site-packages"
    expected = f"{packages}/osrdyne/__init__.py {packages}/osrdyne_worker/__init__.py"
    assert inside(image, "python", "-c", where) == expected
    assert inside(image, "sh", "-c", "ls -d /src /wheels 2>/dev/null || true") == ""


def test_daemon_has_the_drivers_that_need_no_host(controller_image):
    load = (
        "from osrdyne.drivers.registry import load_driver_class as load; load('docker'); load('kubernetes'); print(1)"
    )
    assert inside(controller_image, "python", "-c", load) == "1"


def test_worker_has_java_and_may_write_where_it_is(spark_worker_image):
    assert 'version "17.' in inside(spark_worker_image, "sh", "-c", "touch here && $JAVA_HOME/bin/java -version 2>&1")


def test_worker_image_has_an_archive_that_its_user_may_read(spark_worker_image):
    find = "from osrdyne_worker.spark.java.archive import find_archive; archive = find_archive({})"
    found = inside(spark_worker_image, "python", "-c", f"{find}; print(archive, len(archive.open('rb').read(9)))")
    assert found.startswith("/opt/osrdyne/share/osrdyne/class-data/")
    assert found.endswith(".jsa 9")
