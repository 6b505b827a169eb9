"""The priority of the JVM's second compiler, on real threads of this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from osrdyne_worker.spark.java import compiler


def test_priority_of_the_second_compiler_alone_is_lowered() -> None:
    ended = threading.Event()
    named = threading.Event()
    numbers: dict[str, int] = {}

    def run(name: str) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name, encoding="utf-8")
        numbers[name] = threading.get_native_id()
        if len(numbers) == 2:
            named.set()
        ended.wait(60)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("C2 CompilerThre", "C1 CompilerThre")]
    for thread in threads:
        thread.start()
    try:
        assert named.wait(60)
        before = os.getpriority(os.PRIO_PROCESS, numbers["C1 CompilerThre"])
        assert compiler.lower_priority(os.getpid()) == 1
        assert os.getpriority(os.PRIO_PROCESS, numbers["C1 CompilerThre"]) == before
        assert os.getpriority(os.PRIO_PROCESS, numbers["C2 CompilerThre"]) == min(19, before + compiler.NICENESS)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_process_that_has_ended_is_no_error(tmp_path: Path) -> None:
    assert compiler.lower_priority(1, proc=tmp_path) == 0
