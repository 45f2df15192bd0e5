"""Compares outbound HTTP engines on one receiver in one run, and prints a Markdown table.

    python bench/engine.py [--seconds 3] [--rounds 3] [--in-flight 100] [--body-bytes 2048]

Each engine runs in a process of its own on uvloop and posts the same body with the same headers over
kept-alive connections to one receiver in another process. Rounds are interleaved and the median is
shown. CPU is the sending process's own, divided by the requests it completed; where the machine has
fewer free cores than two, requests/s suffer from the receiver's share, CPU per request does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import aiohttp
import httpx
import uvloop

from service.domain.address import AllowList, UrlProblem, parse_url
from service.egress.guard import Guard, SystemResolver, tls_context
from service.egress.sender import HttpSender
from service.egress.transport import ROUTE, Route, WireTransport
from service.ports import OutboundRequest

Post = Callable[[], Awaitable[int]]
Engine = Callable[[str, bytes], Post]

HEADERS = (
    ("User-Agent", "Hookledger/0.1"),
    ("Content-Type", "application/json"),
    ("Webhook-Id", "msg_2KWPBgLlAfxdpx2AI54pPJ85f4W"),
    ("Webhook-Timestamp", "1674087231"),
    ("Webhook-Signature", "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4="),
)
RESPONSE = (
    b"HTTP/1.1 200 OK\r\nServer: receiver\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\n"
    b"Content-Type: application/json\r\nContent-Length: 11\r\n\r\n"
    b'{"ok":true}'
)
TIMEOUT_SECONDS = 30.0
ALLOW = AllowList.parse("127.0.0.0/8:*")


def httpx_as_it_comes(url: str, body: bytes) -> Post:
    """`httpx.AsyncClient()` with nothing set but the timeout."""
    client = httpx.AsyncClient(timeout=TIMEOUT_SECONDS)

    async def post() -> int:
        return (await client.post(url, content=body, headers=list(HEADERS))).status_code

    return post


def httpx_over_our_transport(url: str, body: bytes) -> Post:
    """`httpx.AsyncClient` with the service's transport: what the client itself costs."""
    transport = WireTransport(Guard(ALLOW, tls_context(), SystemResolver()))
    client = httpx.AsyncClient(transport=transport, trust_env=False)
    parsed = parse_url(url)
    assert not isinstance(parsed, UrlProblem)

    async def post() -> int:
        route = Route(parsed, "bench", asyncio.get_running_loop().time() + TIMEOUT_SECONDS)
        response = await client.post(url, content=body, headers=list(HEADERS), extensions={ROUTE: route})
        return response.status_code

    return post


def _aiohttp_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
        trust_env=False,
        auto_decompress=False,
    )


def aiohttp_alone(url: str, body: bytes) -> Post:
    """An aiohttp session without the guard, the phases or httpx's objects."""
    session = _aiohttp_session()

    async def post() -> int:
        async with session.post(url, data=body, headers=HEADERS, allow_redirects=False) as response:
            await response.content.read(1_024)
            return response.status

    return post


def aiohttp_behind_httpx(url: str, body: bytes) -> Post:
    """An aiohttp session behind httpx's transport interface, called directly: the other candidate."""
    session = _aiohttp_session()
    headers = [(name.encode(), value.encode()) for name, value in HEADERS]

    async def post() -> int:
        request = httpx.Request("POST", url, headers=headers, content=body)
        sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.raw}
        async with session.request(
            request.method, str(request.url), data=await request.aread(), headers=sent, allow_redirects=False
        ) as answer:
            excerpt = await answer.content.read(1_024)
        response = httpx.Response(
            answer.status, headers=list(answer.raw_headers), stream=httpx.ByteStream(excerpt), request=request
        )
        return response.status_code

    return post


def our_sender(url: str, body: bytes) -> Post:
    """`HttpSender.send`: everything an attempt pays for, checks and guard included."""
    sender = HttpSender(ALLOW)

    async def post() -> int:
        request = OutboundRequest(url, HEADERS, body, TIMEOUT_SECONDS, "bench")
        return (await sender.send(request)).status_code or 0

    return post


ENGINES: dict[str, tuple[str, Engine]] = {
    "httpx": ("`httpx.AsyncClient()` as it comes", httpx_as_it_comes),
    "httpx-ours": ("`httpx.AsyncClient` over our transport", httpx_over_our_transport),
    "aiohttp-httpx": ("`httpx.Request` → own transport on aiohttp", aiohttp_behind_httpx),
    "aiohttp": ("aiohttp alone", aiohttp_alone),
    "ours": ("**`HttpSender.send`** (`httpx.Request` → our transport)", our_sender),
}


class _Receiving(asyncio.Protocol):
    """Answers each whole request; requests of one run are all of one size."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.buffer = b""
        self.size = 0

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.size:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            self.size = end + 4 + int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        if len(self.buffer) >= self.size:
            self.buffer = self.buffer[self.size :]
            self.size = 0
            self.transport.write(RESPONSE)


async def _receive() -> None:
    server = await asyncio.get_running_loop().create_server(_Receiving, "127.0.0.1", 0, backlog=1_024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _measure(engine: Engine, url: str, seconds: float, in_flight: int, body: bytes) -> dict[str, float]:
    """Requests/s and CPU µs per request of one engine, after a warm-up of a tenth of the time."""
    post = engine(url, body)

    async def run(until: float) -> int:
        done = 0

        async def sending() -> None:
            nonlocal done
            while time.perf_counter() < until:
                assert await post() == 200
                done += 1

        await asyncio.gather(*(sending() for _ in range(in_flight)))
        return done

    await run(time.perf_counter() + seconds / 10)
    started, cpu = time.perf_counter(), time.process_time()
    done = await run(started + seconds)
    return {
        "requests_per_second": done / (time.perf_counter() - started),
        "cpu_us": (time.process_time() - cpu) / done * 1e6,
    }


def _run_one(name: str, url: str, options: argparse.Namespace) -> dict[str, float]:
    arguments = ["--engine", name, "--url", url, "--seconds", str(options.seconds)]
    arguments += ["--in-flight", str(options.in_flight), "--body-bytes", str(options.body_bytes)]
    output = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(output.stdout)
    return result


def _compare(options: argparse.Namespace) -> None:
    receiver = subprocess.Popen([sys.executable, __file__, "--receive"], stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    url = f"http://127.0.0.1:{int(receiver.stdout.readline())}/hooks/orders?token=abc"
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    try:
        for _ in range(options.rounds):
            for name in ENGINES:
                results[name].append(_run_one(name, url, options))
    finally:
        receiver.terminate()
        receiver.wait()
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    base = medians["httpx"]["requests_per_second"]
    print(f"| engine, {options.body_bytes} B POST, keep-alive, {options.in_flight} in flight, uvloop ", end="")
    print("| requests/s | against httpx | CPU per request |\n| --- | ---: | ---: | ---: |")
    for name, (title, _) in ENGINES.items():
        rate, cpu = medians[name]["requests_per_second"], medians[name]["cpu_us"]
        print(f"| {title} | {rate:,.0f} | {rate / base:.1f}x | {cpu:,.0f} µs |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare outbound HTTP engines.")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=100)
    parser.add_argument("--body-bytes", type=int, default=2_048)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.receive:
        uvloop.run(_receive())
    elif options.engine:
        engine = ENGINES[options.engine][1]
        body = b"x" * options.body_bytes
        print(json.dumps(uvloop.run(_measure(engine, options.url, options.seconds, options.in_flight, body))))
    else:
        _compare(options)


if __name__ == "__main__":
    main()
