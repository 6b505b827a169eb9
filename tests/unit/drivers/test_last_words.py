"""What workers wrote goes to callers: no password is in it, whatever keeps it."""

import json

import httpx2
import pytest

from osrdyne.drivers.kubernetes.api import KubernetesApi
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.drivers.systemd import systemctl
from osrdyne.drivers.systemd.options import ManagerKind
from osrdyne.drivers.systemd.systemctl import Journal
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.driver_harness import AMQP_URI

SAID = f"no connection to {AMQP_URI} today"
MASKED = ("no connection to amqp://worker:***@broker.example:5672/ today",)


@pytest.mark.parametrize(
    ("output", "lines"),
    [(json.dumps({"MESSAGE": SAID}).encode(), MASKED), (b'{"MESSAGE": "last"}\n{"MESS', ("last",))],
    ids=["password", "truncated entry"],
)
async def test_journal_is_read_without_passwords_and_parts_of_entries(monkeypatch, output, lines):
    async def journalctl(*_arguments, timeout):
        return -9, output, b""

    monkeypatch.setattr(systemctl, "run_program", journalctl)
    journal = Journal(ManagerKind.SYSTEM, clock=VirtualClock())
    assert await journal.tail("unit", since=0.0, lines=5, ended=False) == lines


async def test_password_in_the_log_of_a_pod_is_masked(monkeypatch):
    class Client:
        def prepare_request(self, *_arguments, **_options):
            return None

    async def send(_api, _request):
        return httpx2.Response(200, content=SAID.encode())

    monkeypatch.setattr(KubernetesApi, "_open", lambda _: Client())
    monkeypatch.setattr(KubernetesApi, "_send_raw", send)
    api = KubernetesApi(KubernetesOptions(image="i"))
    assert await api.logs("pod", container="worker", lines=5, previous=False) == MASKED
