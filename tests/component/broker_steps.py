"""What happens at a command on a broker in memory: it waits, fails, or is noted. One of these at a time."""

import asyncio
from collections.abc import Callable

from osrdyne.testing.fakes.broker import Command, FakeBroker
from osrdyne.testing.fakes.stack import Stack

Step = tuple[str, str, bool]
"""The name of a command, its target, and whether it has taken effect."""


def hold(broker: FakeBroker, *steps: Step) -> asyncio.Event:
    """Let these commands wait until the event is set."""
    go_on = asyncio.Event()

    async def wait(command: Command) -> None:
        if command in steps:
            await go_on.wait()

    broker.hook = wait
    return go_on


def refuse(
    broker: FakeBroker,
    error: Exception,
    *steps: Step,
    times: int | None = None,
    when: Callable[[], bool] = lambda: True,
) -> None:
    """Let these commands fail, the first `times` of them or all."""
    failed = 0

    async def fail(command: Command) -> None:
        nonlocal failed
        if command in steps and when() and (times is None or failed < times):
            failed += 1
            raise error

    broker.hook = fail


def fail_in_turn(broker: FakeBroker, step: Step, *faults: Exception | None) -> None:
    """Let the next commands of this kind fail, each with its fault; those without one succeed."""
    left = list(faults)

    async def fail(command: Command) -> None:
        if command == step and left and (fault := left.pop(0)) is not None:
            raise fault

    broker.hook = fail


def note(broker: FakeBroker, *steps: Step) -> list[Step]:
    """The commands of these from now on, in their order."""
    noted: list[Step] = []

    async def take(command: Command) -> None:
        if command in steps:
            noted.append(command)

    broker.hook = take
    return noted


def kill_within(stack: Stack) -> None:
    """Kill the leader at one of its own commands: it cannot be waited for."""
    stack.killed = True
    stack.task.cancel()
    for connection in stack.connections:
        connection.cut()
