"""The demo receiver of `hookledger listen`: it shows what a receiver sees and answers as told.

The rule it keeps: everything that arrives is junk until shown otherwise. No request can stop the
listener, grow it without bound, or write to the terminal anything but printable characters.
"""

from __future__ import annotations

import asyncio
import io
import signal
import sys

from rich.console import Console

from service.listen.receiver import Listener, Received
from service.listen.view import View

__all__ = ["Listener", "Received", "run"]


def run(port: int, secret: str | None, answer: str, host: str = "127.0.0.1") -> int:
    """Print each request until SIGINT or SIGTERM, then return 0. Raises StartError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Whatever a body holds, a terminal of any encoding shows it in some form.
        sys.stdout.reconfigure(errors="backslashreplace")
    stopping = asyncio.Event()
    view = View(Console(highlight=False, soft_wrap=True), on_unread=stopping.set)
    listener = Listener(port, secret=secret, answer=answer, host=host, on_received=view.received, on_note=view.note)
    return asyncio.run(_run(listener, view, stopping))


async def _run(listener: Listener, view: View, stopping: asyncio.Event) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    await listener.start()
    try:
        view.heading(listener.url, listener.script, checks=listener.checks_signatures)
        await stopping.wait()
    finally:
        await listener.stop()
    view.farewell(listener.received_count)
    return 0
