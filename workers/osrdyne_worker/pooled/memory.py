"""The memory of this process and its children (Spark's JVM, Python processes of functions), and of what limits it: the
host and the cgroups of the process. From `/proc` and `/sys/fs/cgroup`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from osrdyne.protocol.pooled import HOST_SCOPE, MemoryLimit

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def process_memory(root: int | None = None, *, proc: Path = PROC) -> tuple[int | None, int | None]:
    """RSS and PSS in bytes of a process and all its descendants; None if the system does not provide them."""
    tree = _tree(os.getpid() if root is None else root, proc)
    rss = [size for pid in tree if (size := _field(proc / str(pid) / "status", "VmRSS")) is not None]
    pss = [size for pid in tree if (size := _field(proc / str(pid) / "smaps_rollup", "Pss")) is not None]
    return sum(rss) if rss else None, sum(pss) if pss else None


def memory_limit(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryLimit | None:
    """The host or the cgroup with the largest used share; None if the system provides neither.

    The file cache that the kernel can reclaim counts as free: the kernel drops it before it kills a process.
    """
    host = _host_memory(proc)
    total = None if host is None else host.total
    limits = [*([] if host is None else [host]), *_cgroup_limits(proc, cgroups, host=total)]
    return max(limits, key=lambda limit: limit.share, default=None)


def _host_memory(proc: Path) -> MemoryLimit | None:
    fields = _pairs(proc / "meminfo", unit=1024)
    total, available = fields.get("MemTotal:"), fields.get("MemAvailable:")
    if not total or available is None:
        return None
    return MemoryLimit(max(0, total - available), total, f"{HOST_SCOPE}{_boot_id(proc)}")


def _cgroup_limits(proc: Path, cgroups: Path, *, host: int | None) -> Iterator[MemoryLimit]:
    """The limits of the process's cgroup and of its parents, without those above the memory of the host."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            root, limit_name, used_name, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name = cgroups / "memory", "memory.limit_in_bytes"
            used_name, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        for group in _with_parents(root, path):
            total, used = _number(group / limit_name), _number(group / used_name)
            if total is None or used is None or total <= 0 or (host is not None and total >= host):
                continue
            reclaimable = _pairs(group / "memory.stat").get(cache, 0)
            scope = f"cgroup {_boot_id(proc)} {_identity(group)}"
            yield MemoryLimit(max(0, used - reclaimable), total, scope)


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    """The directory of a cgroup and those of its parents. In a container only the root may be visible, under which the
    container's own cgroup is mounted."""
    relative = PurePosixPath(path.lstrip("/"))
    for part in (relative, *relative.parents):
        if ".." not in part.parts:
            yield root / part


def _identity(group: Path) -> str:
    """Distinguish the cgroups of two containers, each of which sees its own cgroup as the root."""
    try:
        status = group.stat()
    except OSError:
        return str(group)
    return f"{status.st_dev}:{status.st_ino}"


def _boot_id(proc: Path) -> str:
    return _text(proc / "sys" / "kernel" / "random" / "boot_id").strip() or "-"


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None  # `max`: no limit


def _pairs(file: Path, *, unit: int = 1) -> Mapping[str, int]:
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) * unit for row in rows if len(row) >= 2 and row[1].isdecimal()}


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
