"""A `Listener` on a free port, and a sender that writes to it byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from service.domain import signing
from service.listen import Listener, Received
from tests.accepting import turns

KEY = bytes(range(32))
SECRET = signing.new_secret(KEY)


@contextlib.asynccontextmanager
async def listening(
    answer: str = "200",
    *,
    secret: str | None = None,
    on_received: Callable[[Received], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Listener]:
    """Start it, and stop it afterwards."""
    listener = Listener(0, answer=answer, secret=secret, on_received=on_received, on_note=on_note)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.stop()
        await turns()


class Sender:
    """One connection to a listener, byte for byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, raw: bytes) -> bytes:
        """Write, and read one response with its body by content-length."""
        self.writer.write(raw)
        return await self.response()

    async def response(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), b": 0")
        return head + await self.reader.readexactly(int(length.split(b": ")[1]))

    async def status(self, raw: bytes) -> int:
        return int((await self.send(raw)).split(b" ")[1])

    async def rest(self) -> bytes:
        """Whatever comes until the other side closes."""
        return await self.reader.read()


@contextlib.asynccontextmanager
async def connected(listener: Listener) -> AsyncIterator[Sender]:
    """Open a connection to the listener."""
    host, port = listener.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Sender(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def post(body: bytes = b"{}", *lines: str, target: str = "/hook") -> bytes:
    head = [f"POST {target} HTTP/1.1", "host: receiver", f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


def signed(body: bytes, *, webhook_id: str = "dlv_1", key: bytes = KEY, age_seconds: int = 0) -> bytes:
    unix_seconds = int(time.time()) - age_seconds
    return post(
        body,
        f"webhook-id: {webhook_id}",
        f"webhook-timestamp: {unix_seconds}",
        f"webhook-signature: {signing.sign(webhook_id, unix_seconds, body, [key])}",
    )
