"""The memory of this process and its children (Spark's JVM, Python processes of functions), from `/proc`."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def process_memory(root: int | None = None, *, proc: Path = PROC) -> tuple[int | None, int | None]:
    """RSS and PSS in bytes of a process and all its descendants; None if the system does not provide them."""
    tree = _tree(os.getpid() if root is None else root, proc)
    rss = [size for pid in tree if (size := _field(proc / str(pid) / "status", "VmRSS")) is not None]
    pss = [size for pid in tree if (size := _field(proc / str(pid) / "smaps_rollup", "Pss")) is not None]
    return sum(rss) if rss else None, sum(pss) if pss else None


def _tree(root: int, proc: Path) -> list[int]:
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for task in _listed(proc / str(pid) / "task"):
            waiting += [int(child) for child in _text(task / "children").split()]
    return found


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:  # the process has ended, or the system has no /proc
        return []


def _field(file: Path, name: str) -> int | None:
    for line in _text(file).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
