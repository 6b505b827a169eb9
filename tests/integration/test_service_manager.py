"""What a service manager receives, on a socket like systemd's."""

import secrets
import socket

import pytest

from osrdyne.daemon.daemon import Service, notify_service_manager

pytestmark = pytest.mark.one_rabbitmq


def test_service_manager_is_notified(tmp_path):
    for name in (str(tmp_path / "notify"), f"@osrdyne-test-{secrets.token_hex(4)}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
            listening.bind(name.replace("@", "\0", 1))
            listening.settimeout(60)
            notify_service_manager(Service.READY, {"NOTIFY_SOCKET": name})
            assert listening.recv(100) == b"READY=1"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/nowhere"}, {"NOTIFY_SOCKET": "vsock:2:1"}], ids=str)
def test_without_a_manager_that_listens_nothing_happens(environment):
    notify_service_manager(Service.STOPPING, environment)
