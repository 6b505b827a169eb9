"""Starts of units: the floor is `StartUnit` of as many instances of the same template at once, over D-Bus.

systemd is that of a container, as for its tests. The figures are taken inside of it, by the daemon's own user, who is
let start units by the shipped polkit rule: `run` starts the container, and this module again as a program in it.
"""

import asyncio
import json
import secrets
import subprocess
import time
from dataclasses import astuple
from functools import partial
from pathlib import Path

import uvloop
from dbus_fast import BusType, Message, MessageType
from dbus_fast.aio import MessageBus

from osrdyne.drivers.systemd import SystemdDriver
from osrdyne.drivers.systemd.options import BusChoice, SystemdOptions
from tests.benchmarks.figures import Figure, Round
from tests.benchmarks.starts import COMMAND, GROUPS, NotMeasuredError, has_docker_engine, measure, starts_figure
from tests.docker.systemd_container import SOURCE, SystemdContainer

ROUNDS = 3
SYSTEMD = "org.freedesktop.systemd1"
MANAGER = f"{SYSTEMD}.Manager"
TEMPLATE = "osrdyne-worker-bench"
FILES = Path("/run/osrdyne")
INSTALL = f"""
set -e
cd /etc/systemd/system
sed 's|^ExecStart=.*|ExecStart=/usr/bin/{" ".join(COMMAND)}|' osrdyne-worker@.service > {TEMPLATE}@.service
systemctl daemon-reload
install -d -m 700 -o osrdyne {FILES}
"""


async def run() -> Figure:
    if not await asyncio.to_thread(has_docker_engine):
        raise NotMeasuredError("no Docker engine, and so no container with systemd: starts of units are not measured")
    rounds = await asyncio.to_thread(_measure_in_container)
    return starts_figure("systemd", rounds, at_least=0.5)


def _measure_in_container() -> list[Round]:
    container = SystemdContainer()
    try:
        container.start()
        container.run("bash", "-c", INSTALL)
        printed = container.run(
            "env", "-C", SOURCE, f"PYTHONPATH={SOURCE}", "PYTHONDONTWRITEBYTECODE=1", "/opt/osrdyne/bin/python",
            "-m", "tests.benchmarks.starts_systemd", user="osrdyne", timeout=300.0,
        )  # fmt: skip
    finally:
        container.close()
    return [Round(*one) for one in json.loads(printed)]


# --- inside the container


async def _measure() -> list[Round]:
    options = SystemdOptions(template=TEMPLATE, bus=BusChoice.DBUS)
    return await measure(partial(SystemdDriver, options), _bare, rounds=ROUNDS)


async def _bare() -> float:
    """Seconds. The units read files of variables and their standard input from files, which are there before."""
    instances = [f"bare-{secrets.token_hex(4)}-{number}" for number in range(GROUPS)]
    files = [FILES / f"{instance}{suffix}" for instance in instances for suffix in (".env", ".uri")]
    for file in files:
        file.touch(mode=0o600)
    units = [f"{TEMPLATE}@{instance}.service" for instance in instances]
    began = time.perf_counter()
    bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
    await _start_units(bus, units)
    took = time.perf_counter() - began
    bus.disconnect()
    await asyncio.to_thread(subprocess.run, ["systemctl", "stop", *units], check=True, timeout=120)
    for file in files:
        file.unlink()
    return took


async def _start_units(bus: MessageBus, units: list[str]) -> None:
    """Ask for all of them and wait until systemd has reported the end of each job."""
    waiting, all_ended = set(units), asyncio.Event()

    def note(message: Message) -> None:
        if message.member == "JobRemoved" and message.body[3] == "done":
            waiting.discard(message.body[2])
            if not waiting:
                all_ended.set()

    async def call(name: str, member: str, signature: str = "", *body: str, interface: str = "") -> None:
        message = Message(
            name, f"/{name.replace('.', '/')}", interface or name, member, signature=signature, body=[*body]
        )
        reply = await bus.call(message)
        assert reply is not None and reply.message_type is MessageType.METHOD_RETURN, reply

    bus.add_message_handler(note)
    await call("org.freedesktop.DBus", "AddMatch", "s", f"type='signal',interface='{MANAGER}',member='JobRemoved'")
    systemd = partial(call, SYSTEMD, interface=MANAGER)
    await systemd("Subscribe")
    await asyncio.gather(*(systemd("StartUnit", "ss", unit, "replace") for unit in units))
    async with asyncio.timeout(120):
        await all_ended.wait()


if __name__ == "__main__":
    print(json.dumps([astuple(one) for one in uvloop.run(_measure())]))
