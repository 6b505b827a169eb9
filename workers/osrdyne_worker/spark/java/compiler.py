"""The priority of the JVM's second compiler (C2), whose threads compete with requests for the processors.

Java compiles for minutes after its start. C2 takes almost half of the processor time of the first hundred keys of a
process, to optimise code that is used later. With a lower priority its threads run while processors are idle.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

NICENESS = 10
"""Above that of the JVM: if all processors are busy, C2 gets about a tenth of the time that another thread gets."""
_NAME = "C2 CompilerThre"
"""The name of the threads on Linux, which has room for 15 characters. Threads that C2 starts later inherit the
priority of the thread that starts them."""


def lower_priority(pid: int, *, proc: Path = Path("/proc")) -> int:
    """Lower the priority of C2 in a JVM; the number of threads. None are changed on systems other than Linux."""
    changed = 0
    with suppress(OSError):  # the JVM has ended, or this is not Linux
        for thread in (proc / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread has ended
                if (thread / "comm").read_text(encoding="utf-8").startswith(_NAME):
                    number = int(thread.name)
                    os.setpriority(os.PRIO_PROCESS, number, min(19, os.getpriority(os.PRIO_PROCESS, number) + NICENESS))
                    changed += 1
    return changed
