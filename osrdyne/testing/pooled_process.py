"""A simulated pooled process in an operating system process, for the conformance suite of drivers that start processes.

Run as `python -m osrdyne.testing.pooled_process`. It receives questions from a socket in the directory
`PLAYED_NETWORK`, and sends its reports to the sockets of all links there: see `SocketNetwork`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from osrdyne.aio.clock import SystemClock
from osrdyne.protocol.activity import report_from_wire
from osrdyne.protocol.control import Generation, control_from_wire
from osrdyne.protocol.environment import WorkerEnvironment
from osrdyne.protocol.names import WorkerId
from osrdyne.protocol.pooled import ProcessState, Question, process_state_of, question_of_control, question_to_control
from osrdyne.testing.played_process import CUT_OFF, PlayedProcess

DIRECTORY_VARIABLE = "PLAYED_NETWORK"
MAX_DATAGRAM = 2**20
_LIFETIME = 600.0  # Seconds after which a process ends that a failed test has left.


class SocketNetwork:
    """The directory of the sockets. A datagram to a socket that does not exist is lost, as messages may be."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def bind(self, name: str) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bound.setblocking(False)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_DATAGRAM)
        bound.bind(str(self.directory / name))
        (self.directory / name).chmod(0o777)  # the processes may have another user than the tests
        return bound

    def send(self, sender: socket.socket, name: str, value: object) -> None:
        with suppress(FileNotFoundError, ConnectionRefusedError, BlockingIOError, PermissionError):
            sender.sendto(json.dumps(value).encode(), str(self.directory / name))

    def links(self) -> list[str]:
        return [path.name for path in self.directory.glob("link-*")]

    def ask(self, sender: socket.socket, process: WorkerId, question: Question, generation: Generation) -> None:
        self.send(sender, process, question_to_control(question, generation).wire_body().decode())

    def report(self, sender: socket.socket, process: WorkerId, state: ProcessState) -> None:
        report = state.to_report(process)
        for link in self.links():
            self.send(sender, link, [report.key, report.wire_headers(), report.wire_body().decode()])


def read_report(datagram: bytes) -> tuple[WorkerId, ProcessState]:
    key, headers, body = json.loads(datagram)
    report = report_from_wire(routing_key=key, headers=headers, body=body.encode())
    assert report is not None
    return WorkerId(report.worker_id), process_state_of(report)


async def main() -> None:
    environment = WorkerEnvironment.from_variables(os.environ)
    name, network = environment.worker_id, SocketNetwork(Path(os.environ[DIRECTORY_VARIABLE]))
    bound = network.bind(name)
    process = PlayedProcess(name, SystemClock(), lambda state: network.report(bound, name, state))
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        with suppress(BlockingIOError):
            while datagram := bound.recv(MAX_DATAGRAM):
                _execute(process, json.loads(datagram))

    loop.add_reader(bound, read)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    process.begin()
    print("process ready", flush=True)  # noqa: T201 - its output is what the suite reads
    with suppress(TimeoutError):
        async with asyncio.timeout(_LIFETIME):
            await ended.wait()


def _execute(process: PlayedProcess, value: object) -> None:
    """Execute a control message, or end a worker: `{"kill": worker id}`."""
    if isinstance(value, dict):
        process.end_worker(WorkerId(value["kill"]), CUT_OFF)
        return
    message = control_from_wire(str(value).encode())
    question = None if message is None else question_of_control(message)
    if message is not None and question is not None:
        process.take(question, message.generation)


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
