"""Looking at real processes, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PATIENCE_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Sighting:
    """A process as it was seen; a later one with the same number is another."""

    pid: int
    began: str

    @property
    def alive(self) -> bool:
        """Whether that process still runs. A dead one that nobody has reaped yet does not."""
        return sight(self.pid) == self


def sight(pid: int) -> Sighting | None:
    """The process with this pid, if it runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else Sighting(pid, fields[19])


def family(pid: int) -> set[Sighting]:
    """The process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue  # it went while we looked
        parents.setdefault(parent, []).append(int(folder.name))
    found: set[Sighting] = set()
    to_visit = [pid]
    while to_visit:
        each = to_visit.pop()
        to_visit.extend(parents.get(each, []))
        if (sighting := sight(each)) is not None:
            found.add(sighting)
    return found


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE_SECONDS) -> None:
    """Return as soon as the condition holds; fail, naming what was waited for, when it never does."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {seconds:g} s in vain: {what}"
        time.sleep(POLL_SECONDS)


def wait_until_gone(processes: set[Sighting]) -> None:
    """Return when none of the processes runs any more."""
    wait_until(lambda: not any(each.alive for each in processes), f"the end of {processes}")
