"""The load: a process of its own that submits deliveries and tells how it went, as JSON.

    python -m bench.load < plan.json

Closed loop: each connection sends its next request when it has its answer; with a window, not before fewer
than so many of the accepted are still to be received. Open loop: requests are due at times drawn beforehand
and their latency counts from then, whether or not a connection was free: a service that stalls is charged
for all that came due meanwhile (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time
from array import array
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import uvloop

from bench.counter import Counter
from bench.messages import Requests
from bench.quantiles import CURVE, quantiles

_WINDOW_SECONDS = 0.001  # between two looks at what has been received
_PATIENCE_SECONDS = 30.0  # for the last answers


@dataclass(frozen=True, slots=True)
class Plan:
    """What to submit. Ends after `seconds` or `requests_count`, whichever is given and comes first."""

    port: int
    key: str
    run: str
    destination_ids: list[str]
    payload_bytes: int = 1_000
    batch_count: int = 1
    connections: int = 8
    first_number: int = 0
    seconds: float | None = None
    requests_count: int | None = None
    rate_per_second: float | None = None  # open loop; None: closed
    window_count: int | None = None
    counter_file: str | None = None
    seed: int = 1

    @property
    def success_status(self) -> int:
        """What the answer to a request of this plan should be: a batch is answered 200, with a status for each item."""
        return 202 if self.batch_count == 1 else 200

    def as_json(self) -> str:
        """For the process's standard input."""
        return json.dumps(asdict(self))


class Load:
    """The state of one run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._requests = Requests(
            key=plan.key,
            run=plan.run,
            destination_ids=plan.destination_ids,
            payload_bytes=plan.payload_bytes,
            batch_count=plan.batch_count,
        )
        self._next = plan.first_number
        self._sent_count = 0
        self._received = Counter(Path(plan.counter_file)) if plan.counter_file else None
        self._received_at_start = self._received.value if self._received else 0
        self._free: deque[_Connection] = deque()
        self._due_ns: deque[int] = deque()  # open loop: requests that are due and have no connection yet
        self._started_ns = time.monotonic_ns()
        self._until_ns = self._started_ns + int(plan.seconds * 1e9) if plan.seconds else None
        self._paced_out = plan.rate_per_second is None
        self.latencies_ms = array("d")
        self.statuses: Tally[int] = Tally()
        self.ended = asyncio.Event()
        self.in_flight_count = 0

    def ready(self, connection: _Connection) -> None:
        """The connection has nothing to do: give it its next request, or let it wait for one."""
        if self.plan.rate_per_second is not None:
            if self._due_ns:
                self._send(connection, self._due_ns.popleft())
            else:
                self._free.append(connection)
                self._end_if_done()
        elif self._may_send_more():
            if self._window_is_open():
                self._send(connection, time.monotonic_ns())
            else:
                self._free.append(connection)
        else:
            self._end_if_done()

    def come_due(self, at_ns: int) -> None:
        """Open loop: a request's time has come."""
        if self._free:
            self._send(self._free.popleft(), at_ns)
        else:
            self._due_ns.append(at_ns)

    def paced_out(self) -> None:
        """Open loop: there are no more to come."""
        self._paced_out = True
        self._end_if_done()

    def look_at_window(self) -> None:
        """Closed loop: let those that wait for the window go on."""
        while self._free and self._may_send_more() and self._window_is_open():
            self._send(self._free.popleft(), time.monotonic_ns())
        self._end_if_done()

    def answered(self, status: int, at_ns: int) -> None:
        """An answer is complete."""
        self.in_flight_count -= 1
        self.statuses[status] += 1
        self.latencies_ms.append((time.monotonic_ns() - at_ns) / 1e6)

    def _send(self, connection: _Connection, at_ns: int) -> None:
        number = self._next
        self._next += self.plan.batch_count
        self._sent_count += 1
        self.in_flight_count += 1
        connection.send(self._requests.render(number, at_ns), at_ns)

    def _may_send_more(self) -> bool:
        if self.plan.requests_count is not None and self._sent_count >= self.plan.requests_count:
            return False
        return self._until_ns is None or time.monotonic_ns() < self._until_ns

    def _window_is_open(self) -> bool:
        if self._received is None or self.plan.window_count is None:
            return True
        received = self._received.value - self._received_at_start
        return self._sent_count * self.plan.batch_count - received < self.plan.window_count

    def _end_if_done(self) -> None:
        more = not self._paced_out or bool(self._due_ns)
        if self.plan.rate_per_second is None:
            more = self._may_send_more()
        if not more and not self.in_flight_count:
            self.ended.set()

    def told(self, connect_count: int) -> dict[str, object]:
        """How it went."""
        seconds = (time.monotonic_ns() - self._started_ns) / 1e9
        received = self._received.value - self._received_at_start if self._received else 0
        return {
            "seconds": seconds,
            "requests_count": len(self.latencies_ms),
            "accepted_count": self.statuses[self.plan.success_status] * self.plan.batch_count,
            "statuses": dict(self.statuses),
            "received_count": received,
            "latency_ms": quantiles(self.latencies_ms),
            "curve_ms": quantiles(self.latencies_ms, CURVE),
            "connections": connect_count,
            "cpu_seconds": time.process_time(),
        }


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = b""
        self._missing_count = 0  # bytes of the answer's body that are still to come
        self._status = 0
        self._at_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes, at_ns: int) -> None:
        self._at_ns = at_ns
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._missing_count:
            self._missing_count -= len(data)
        else:
            data = self._buffer + data if self._buffer else data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                return
            self._buffer = b""
            self._status = int(data[9:12])
            at = data.find(b"content-length: ", 0, end) + 16
            self._missing_count = end + 4 + int(data[at : data.find(b"\r", at)]) - len(data)
        if not self._missing_count:
            self._load.answered(self._status, self._at_ns)
            self._load.ready(self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._load.ended.is_set():
            self._load.statuses[0] += 1
            self._load.ended.set()


def _pace(load: Load, loop: asyncio.AbstractEventLoop, call: Callable[..., object]) -> None:
    """Open loop, in a thread: sleep until each drawn time (an event loop's timers are a millisecond coarse)."""
    dice = random.Random(load.plan.seed)
    assert load.plan.rate_per_second is not None
    due_ns = time.monotonic_ns()
    sent_count = 0
    until_ns = due_ns + int((load.plan.seconds or 1e9) * 1e9)
    while sent_count != load.plan.requests_count:
        due_ns += int(dice.expovariate(load.plan.rate_per_second) * 1e9)
        if due_ns > until_ns:
            break
        ahead_ns = due_ns - time.monotonic_ns()
        if ahead_ns > 0:
            time.sleep(ahead_ns / 1e9)
        call(load.come_due, due_ns)
        sent_count += 1
    call(load.paced_out)


async def _run(plan: Plan) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    load = Load(plan)
    connections = [
        (await loop.create_connection(lambda: _Connection(load), "127.0.0.1", plan.port))[1]
        for _ in range(plan.connections)
    ]
    for connection in connections:
        load.ready(connection)
    if plan.rate_per_second is not None:
        threading.Thread(target=_pace, args=(load, loop, loop.call_soon_threadsafe), daemon=True).start()
    watching = loop.create_task(_watch_window(load)) if plan.window_count is not None else None
    patience = _PATIENCE_SECONDS + (plan.seconds or 600.0)
    async with asyncio.timeout(patience):
        await load.ended.wait()
    if watching is not None:
        watching.cancel()
    return load.told(len(connections))


async def _watch_window(load: Load) -> None:
    while not load.ended.is_set():
        load.look_at_window()
        await asyncio.sleep(_WINDOW_SECONDS)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(_run(Plan(**json.load(sys.stdin))))))
