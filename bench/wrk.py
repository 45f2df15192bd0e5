"""A closed loop by wrk, where the machine has it: cheaper than ours, so that less of the machine is the load's."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.load import Plan
from bench.messages import PAYLOAD_BYTES_MIN

_UNITS: Final = {"us": 0.001, "ms": 1.0, "s": 1_000.0, "m": 60_000.0}

_SCRIPT: Final = """
local number = 0
local headers = {{
  ["Authorization"] = "Bearer {key}",
  ["Content-Type"] = "application/json",
}}
local opening = '{{"destination_id":"{destination_id}","payload":{{"n":"'
local closing = '","at":"{at}","pad":"{pad}"}}}}'
function request()
  number = number + 1
  local digits = string.format("%012d", number)
  headers["Idempotency-Key"] = "{run}-" .. digits
  return wrk.format("POST", "/deliveries", headers, opening .. digits .. closing)
end
"""


def is_there() -> bool:
    """Whether this machine has it."""
    return shutil.which("wrk") is not None


def run(plan: Plan) -> dict[str, Any]:
    """Run the plan's closed loop for its seconds; the same figures as `bench.load` tells."""
    script = _SCRIPT.format(
        key=plan.key,
        destination_id=plan.destination_ids[0],
        at="0" * 19,
        pad="x" * (plan.payload_bytes - PAYLOAD_BYTES_MIN),
        run=plan.run,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deliveries.lua"
        path.write_text(script)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        output = subprocess.run(
            ["wrk", "-t1", f"-c{plan.connections}", f"-d{plan.seconds:g}s", "--latency", f"-s{path}",
             f"http://127.0.0.1:{plan.port}"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"the service refused requests: {output}")
    done = re.search(r"(\d+) requests in ([\d.]+)(us|ms|s|m)", output)
    assert done is not None, output
    count = int(done[1])
    shares = re.findall(r"^\s+(50|90|99)%\s+([\d.]+)(us|ms|s|m)$", output, re.MULTILINE)
    return {
        "seconds": float(done[2]) * _UNITS[done[3]] / 1_000,
        "requests_count": count,
        "accepted_count": count,
        "latency_ms": {f"p{share}": float(number) * _UNITS[unit] for share, number, unit in shares},
        "cpu_seconds": after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime,
        "by": "wrk",
    }
