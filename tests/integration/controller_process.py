"""A controller in a process of its own, for tests that kill it: starts one worker, prints its instance id, and waits.

Arguments: state directory, and the worker's program as JSON.
"""

import asyncio
import json
import sys

from osrdyne.aio.clock import SystemClock
from osrdyne.drivers.base import DriverContext
from osrdyne.drivers.subprocess import SubprocessDriver
from osrdyne.drivers.subprocess.options import SubprocessOptions
from osrdyne.testing.driver_conformance import POOL, make_spec


async def main(state_directory: str, command: str) -> None:
    context = DriverContext(pool=POOL, stack="s", clock=SystemClock(), worker_command=tuple(json.loads(command)))
    driver = SubprocessDriver(SubprocessOptions(state_directory=state_directory), context)
    instance = await driver.start(make_spec())
    print(instance.instance_id, flush=True)
    await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
