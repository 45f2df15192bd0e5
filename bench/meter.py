"""What processes cost, read from /proc: CPU seconds and memory, by role."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the processes and all below them, those that have ended included."""
    children = _children()
    return sum(_cpu_seconds(pid, children) for pid in pids)


def _cpu_seconds(pid: int, children: Mapping[int, Sequence[int]]) -> float:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return 0.0  # gone: its parent counts it
    # After the name, which may hold anything: utime, stime, and those of the children that were waited for.
    ticks = sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS_PER_SECOND + sum(_cpu_seconds(child, children) for child in children.get(pid, ()))


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    return children


def memory_mb(pid: int, field: str = "VmRSS") -> float:
    """A process's resident memory now (`VmRSS`), or at its peak (`VmHWM`), in MB of 10^6 bytes."""
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1_024 / 1e6
    raise ValueError(f"no {field} of {pid}")


def forget_peak(pid: int) -> None:
    """Let `VmHWM` begin anew."""
    (_PROC / str(pid) / "clear_refs").write_text("5")


def own_pid() -> int:
    """This process."""
    return os.getpid()
