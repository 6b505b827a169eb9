"""What workers wrote goes to callers: no password is in it, whatever keeps it."""

from __future__ import annotations

import json

import httpx2

from osrdyne.drivers.kubernetes.api import KubernetesApi
from osrdyne.drivers.kubernetes.options import KubernetesOptions
from osrdyne.drivers.systemd import systemctl
from osrdyne.drivers.systemd.options import ManagerKind
from osrdyne.drivers.systemd.systemctl import Journal
from osrdyne.testing.clock import VirtualClock
from osrdyne.testing.driver_harness import AMQP_URI

SAID = f"no connection to {AMQP_URI} today"
MASKED = ("no connection to amqp://worker:***@broker.example:5672/ today",)


async def test_password_in_the_journal_is_masked(monkeypatch):
    async def journalctl(*_arguments, timeout):
        return 0, json.dumps({"MESSAGE": SAID}).encode(), b""

    monkeypatch.setattr(systemctl, "run_program", journalctl)
    journal = Journal(ManagerKind.SYSTEM, clock=VirtualClock())
    assert await journal.tail("unit", since=0.0, lines=5, ended=False) == MASKED


async def test_truncated_entry_of_the_journal_is_left_out(monkeypatch):
    async def killed_journalctl(*_arguments, timeout):
        return -9, b'{"MESSAGE": "last"}\n{"MESS', b""

    monkeypatch.setattr(systemctl, "run_program", killed_journalctl)
    journal = Journal(ManagerKind.SYSTEM, clock=VirtualClock())
    assert await journal.tail("unit", since=0.0, lines=5, ended=False) == ("last",)


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
