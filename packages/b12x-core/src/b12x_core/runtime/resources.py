"""What may be used to compile: cores and memory that this process is allowed, not what the machine has."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

WORKER_BYTES = 1 << 30
"""Memory that one worker is counted with. The largest kernels peak at about 600 MiB."""


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The control groups that limit this process by "memory" or "cpu", each with those around it."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # in a container the path may be that of the host: then only the top exists
        own = top / path.lstrip("/")
        found += [folder for folder in (own, *own.parents) if folder.is_relative_to(top) and folder.is_dir()]
    return found


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed; what is unknown limits nothing."""
    limits = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    for folder in _cgroup_folders(root, "memory"):
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, current = _number(folder / most), _number(folder / used)
            if limit is not None and current is not None:
                limits.append(limit - current + _file_cache(folder / "memory.stat"))
    return max(min(limits, default=1 << 62), 0)


def _file_cache(stat: Path) -> int:
    """Bytes that count as used but are given back when they are needed."""
    try:
        fields = dict(line.split(" ", 1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: at least 1."""
    limits = [len(os.sched_getaffinity(0))]
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
        if quota is not None and period is not None and quota > 0:
            limits.append(quota // period)
    return max(min(limits), 1)


def worker_limit(kernels: int) -> int:
    """How many workers may compile `kernels` kernels at once: at least 1."""
    return max(1, min(kernels, cores(), available_memory() // WORKER_BYTES))
