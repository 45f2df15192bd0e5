"""The bytes that the load sends and the receiver reads: fixed widths, so that neither has to parse.

A payload is `{"n":"<12 digits>","at":"<19 digits>","pad":"xxx…"}`: the delivery's number in its run, and the
nanosecond of the machine's monotonic clock (one for all processes) at which it was meant to be submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_OPENING: Final = b'{"n":"%012d","at":"%019d","pad":"'
_CLOSING: Final = b'"}'
_NUMBER: Final = slice(6, 18)
_AT: Final = slice(26, 45)
PAYLOAD_BYTES_MIN: Final = len(_OPENING % (0, 0)) + len(_CLOSING)

DELIVERIES_PATH: Final = "/deliveries"
BATCH_PATH: Final = "/deliveries/batch"


class Requests:
    """Renders the requests of one run. `key` is an API key, `run` keeps the runs' idempotency keys apart."""

    def __init__(
        self, *, key: str, run: str, destination_ids: Sequence[str], payload_bytes: int, batch_count: int
    ) -> None:
        self._run = run.encode()
        self._destinations = [f'{{"destination_id":"{each}","payload":'.encode() for each in destination_ids]
        pad = b"x" * (payload_bytes - PAYLOAD_BYTES_MIN)
        self._payload = _OPENING + pad + _CLOSING + b"}"
        self._batch_count = batch_count
        head = (
            f"POST {DELIVERIES_PATH if batch_count == 1 else BATCH_PATH} HTTP/1.1\r\nHost: hookledger\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        )
        self._head = head.encode()

    def render(self, number: int, at_ns: int) -> bytes:
        """The request that submits `number` and, in a batch, those after it."""
        if self._batch_count == 1:
            body = self._destinations[number % len(self._destinations)] + self._payload % (number, at_ns)
            return b"%bIdempotency-Key: %b-%012d\r\nContent-Length: %d\r\n\r\n%b" % (
                self._head, self._run, number, len(body), body,
            )  # fmt: skip
        items = b",".join(self._item(each, at_ns) for each in range(number, number + self._batch_count))
        body = b'{"deliveries":[' + items + b"]}"
        return b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body)

    def _item(self, number: int, at_ns: int) -> bytes:
        opened = self._destinations[number % len(self._destinations)]
        return b'{"idempotency_key":"%b-%012d",%b' % (self._run, number, opened[1:]) + self._payload % (number, at_ns)


def read_payload(body: memoryview | bytes) -> tuple[int, int]:
    """The number and the nanosecond of a payload. Raises ValueError for one of somebody else's."""
    return int(bytes(body[_NUMBER])), int(bytes(body[_AT]))
