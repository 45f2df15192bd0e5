"""A count that one process keeps and others read, in a mapped file: no system call on either side."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_FORMAT = struct.Struct("=q")


class Counter:
    """One 64-bit number. There is one writer; a read may be a moment old."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FORMAT.size)

    @property
    def value(self) -> int:
        """The count now."""
        count: int = _FORMAT.unpack_from(self._map)[0]
        return count

    @value.setter
    def value(self, count: int) -> None:
        _FORMAT.pack_into(self._map, 0, count)
