"""Requests for the wire tests to send."""

from __future__ import annotations

from collections.abc import Sequence

from service.ports import OutboundRequest

HEADERS = (("Webhook-Id", "msg_1"), ("Content-Type", "application/json"))


def post(
    url: str,
    body: bytes = b'{"a":1}',
    *,
    headers: Sequence[tuple[str, str]] = HEADERS,
    timeout_seconds: float = 20.0,
    pool_key: str = "destination",
) -> OutboundRequest:
    """A request to this URL."""
    return OutboundRequest(url, headers, body, timeout_seconds, pool_key)
