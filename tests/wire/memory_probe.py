"""A process of its own that sends many requests at once and prints what its memory peaked at.

python -m tests.wire.memory_probe CALM_URL BOMBS_URL COUNT TIMEOUT_SECONDS
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from pathlib import Path

import uvloop

from service.domain.address import AllowList
from service.egress.sender import HttpSender
from tests.wire.posting import post


def _peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # on Linux `ru_maxrss` starts from what the parent had: useless here
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def _main(calm_url: str, bombs_url: str, count: int, timeout_seconds: float) -> None:
    sender = HttpSender(AllowList.parse("127.0.0.0/8:*"))

    async def all_at_once(url: str) -> list[int]:
        requests = (post(url, timeout_seconds=timeout_seconds, pool_key=str(number)) for number in range(count))
        exchanges = await asyncio.gather(*(sender.send(request) for request in requests))
        return sorted({exchange.status_code or 0 for exchange in exchanges})

    await all_at_once(calm_url)
    before = _peak_bytes()
    statuses = await all_at_once(bombs_url)
    after = _peak_bytes()
    await sender.close()
    print(json.dumps({"statuses": statuses, "peak_bytes": after, "grown_bytes": after - before}))


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
