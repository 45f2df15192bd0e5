"""One connection to a receiver, and the exchange on it.

The rule this module keeps: the request is written once, and from the moment it is handed to the
transport some of it may have arrived. There is no way back to "not sent" and no second write.
"""

from __future__ import annotations

import asyncio
import select
from typing import cast

from service.domain.limits import TLS_WRITTEN_BYTES_MAX
from service.domain.outcome import Fault, Phase
from service.egress.faults import WireError
from service.egress.response import NotHttp, ResponseReader

_ONE_WRITE_BYTES_MAX = 64 * 1024  # up to here a copy is cheaper than a second write


class Connection(asyncio.Protocol):
    """Carries one exchange at a time. Made by the event loop, kept by the pool."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.made_at = loop.time()
        self.idle_until = 0.0
        self.reader: ResponseReader | None = None  # of the exchange under way
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._incoming = select.poll()
        self._over: asyncio.Future[None] | None = None
        self._is_tls = False
        self._request_bytes = 0

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport and watch its descriptor."""
        self._transport = cast("asyncio.Transport", transport)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        self._incoming.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Read on; bytes that nobody asked for end the connection."""
        reader = self.reader
        if reader is None:
            self.abort()
            return
        try:
            if reader.feed(data):
                self._end(None)
        except NotHttp as error:
            self._end(WireError(Phase.WRITTEN, Fault.GARBAGE, str(error)))
        except Exception as bug:  # the waiting exchange reports it; the event loop could only log it
            self._end(bug)

    def eof_received(self) -> None:
        """The receiver sends no more; returning nothing closes our side too."""
        self._ended("the receiver closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, for whatever reason."""
        self._transport = None
        self._ended("the connection was reset" if exc else "the receiver closed the connection")

    # What the pool and the transport call

    @property
    def alive(self) -> bool:
        """Whether an idle connection can still be written to: open, with nothing to read.

        Asks the kernel, because an end that has arrived may not have been reported yet.
        """
        return self._transport is not None and not self._transport.is_closing() and not self._incoming.poll(0)

    @property
    def reusable(self) -> bool:
        """Whether the last exchange left the connection fit for another."""
        return (
            self.reader is not None
            and self.reader.done
            and self.reader.reusable
            and self._transport is not None
            and not self._transport.is_closing()
            and self._transport.get_write_buffer_size() == 0
            and not self._may_be_unwritten(self.reader)
        )

    def _may_be_unwritten(self, reader: ResponseReader) -> bool:
        """Whether a part of the request may wait below TLS, where no buffer tells its size.

        An early refusal of a large request is such a case: the next request would stand in line behind the rest.
        """
        if not self._is_tls or self._request_bytes <= TLS_WRITTEN_BYTES_MAX:
            return False
        return reader.head is None or reader.head.status_code // 100 != 2

    async def exchange(self, head: bytes, body: bytes, deadline: float) -> ResponseReader:
        """Write the request, read the response. Raises WireError when no head arrives.

        The deadline is a timer rather than a cancelled task: nothing has to be told apart afterwards.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise WireError(Phase.NOT_SENT, Fault.CONNECT, "the connection ended before the request was written")
        self.reader = reader = ResponseReader()
        self._over = self._loop.create_future()
        self._request_bytes = len(head) + len(body)
        if len(body) <= _ONE_WRITE_BYTES_MAX:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        timer = self._loop.call_at(deadline, self._expire)
        try:
            await self._over
        finally:
            timer.cancel()
        return reader

    def rest(self) -> None:
        """The exchange is over; until the next one nothing may arrive."""
        self.reader = None
        self._over = None

    def close(self) -> None:
        """End an idle connection politely."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once, with whatever is still unwritten or unread."""
        if self._transport is not None:
            self._transport.abort()

    def shut_down(self) -> None:
        """End an exchange under way because this process stops."""
        self._cut("the sender stopped", Fault.SHUTDOWN)
        self.abort()

    def _expire(self) -> None:
        self._cut("the deadline passed", Fault.TIMEOUT)

    def _ended(self, how: str) -> None:
        """The receiver sends no more: to some responses that is the proper end."""
        if self.reader is None:
            self.abort()
        elif self.reader.feed_eof():
            self._end(None)
        else:
            self._cut(how, Fault.RESET)

    def _cut(self, how: str, fault: Fault) -> None:
        """End the exchange here: a head that arrived counts, anything less is a fault."""
        reader = self.reader
        if reader is not None and reader.head is not None:
            if not reader.done:
                reader.cut(f"{how} inside the response body")
            self._end(None)
        else:
            when = "inside the response head" if reader is not None and reader.started else "before an answer"
            self._end(WireError(Phase.WRITTEN, fault, f"{how} {when}"))

    def _end(self, error: Exception | None) -> None:
        if self._over is None or self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
