"""The receiver: answers 200 after a given time and keeps when each delivery came. A process of its own.

    python -m bench.receiver COUNTER_FILE DELAY_MS

It prints its port. `GET /figures` tells what came since the last `GET /reset`. It reads fixed places of
requests it knows the form of, which makes it cheap; what it costs is part of its figures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from pathlib import Path
from typing import cast

import uvloop

from bench.counter import Counter
from bench.messages import read_payload
from bench.quantiles import CURVE, quantiles

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_LENGTH = b"content-length: "


class Figures:
    """What came."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.latencies_ms = array("d")
        self.seen = bytearray()
        self.repeated_count = 0
        self.cpu_seconds = time.process_time()
        self._counter.value = 0

    def note(self, number: int, at_ns: int, now_ns: int) -> None:
        """One request."""
        if number >= len(self.seen):
            self.seen.extend(bytes(max(number + 1 - len(self.seen), 65_536)))
        if self.seen[number]:
            self.repeated_count += 1
        else:
            self.seen[number] = 1
            self._counter.value += 1
        self.latencies_ms.append((now_ns - at_ns) / 1e6)

    def told(self) -> dict[str, object]:
        """All of it."""
        return {
            "requests_count": len(self.latencies_ms),
            "distinct_count": len(self.latencies_ms) - self.repeated_count,
            "repeated_count": self.repeated_count,
            "latency_ms": quantiles(self.latencies_ms),
            "curve_ms": quantiles(self.latencies_ms, CURVE),
            "cpu_seconds": time.process_time() - self.cpu_seconds,
        }


class Answers:
    """Answers after the delay, with one timer for all that fall due together."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Transport] = []

    def give(self, transport: asyncio.Transport) -> None:
        """Answer a request."""
        if not self._delay_seconds:
            transport.write(_OK)
            return
        if not self._waiting:
            self._loop.call_later(self._delay_seconds, self._give_all)
        self._waiting.append(transport)

    def _give_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.write(_OK)


class _Connection(asyncio.Protocol):
    def __init__(self, figures: Figures, answers: Answers) -> None:
        self._figures = figures
        self._answers = answers
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            self._buffer = buffer
            return
        if buffer.startswith(b"GET "):
            self._buffer = b""
            self._tell(buffer.split(b" ", 2)[1])
            return
        at = buffer[:end].lower().find(_LENGTH) + len(_LENGTH)
        length = int(buffer[at : buffer.find(b"\r", at)])
        if len(buffer) < end + 4 + length:
            self._buffer = buffer
            return
        self._buffer = b""
        number, at_ns = read_payload(buffer[end + 4 : end + 64])
        self._figures.note(number, at_ns, time.monotonic_ns())
        self._answers.give(self._transport)

    def _tell(self, path: bytes) -> None:
        if path == b"/reset":
            self._figures.reset()
        body = json.dumps(self._figures.told()).encode()
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


async def _receive(counter_file: Path, delay_ms: float) -> None:
    figures, answers = Figures(Counter(counter_file)), Answers(delay_ms / 1_000)
    server = await asyncio.get_running_loop().create_server(
        lambda: _Connection(figures, answers), "127.0.0.1", 0, backlog=4_096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_receive(Path(sys.argv[1]), float(sys.argv[2])))
