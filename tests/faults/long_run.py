"""The long random run: `./run faults`. Its exit code is the history checker's word.

Five thousand deliveries to a receiver that fails one time in five, while API, workers and
dispatchers are killed every few seconds, Redis is emptied once and Postgres killed once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

from tests.faults import nemesis
from tests.faults.harness import BreakableServers, Stack, breakable_servers, migrated
from tests.faults.history import judge
from tests.faults.receiver import Receiver


def main(arguments: list[str]) -> int:
    """Run it; 0 when the checker accepts what happened and nothing but poison is dead."""
    parser = argparse.ArgumentParser(prog="./run faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="repeat a plan (its course depends on the machine too)")
    parser.add_argument("--deliveries", type=int, default=5_000)
    parser.add_argument("--seconds", type=float, default=240.0, help="for how long requests come and processes die")
    chosen = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    plan = nemesis.Plan(seed, chosen.seconds, chosen.deliveries, kill_every_seconds=(2.0, 5.0))
    folder = Path(tempfile.mkdtemp(prefix="hookledger-faults-"))
    with breakable_servers() as servers:
        template, api_key = migrated(servers)
        report, wrong = asyncio.run(_run(servers, servers.create_database(template), api_key, plan, folder))
    print(report)
    for sentence in wrong:
        print(sentence)
    print(f"{'Rejected' if wrong else 'Accepted'}. The processes' logs are in {folder}.")
    return 1 if wrong else 0


async def _run(
    servers: BreakableServers, database_url: str, api_key: str, plan: nemesis.Plan, folder: Path
) -> tuple[nemesis.Report, list[str]]:
    async with Receiver() as receiver:
        stack = Stack(servers, database_url, api_key, receiver, folder)
        try:
            report = await nemesis.run(stack, plan)
            wrong = [str(violation) for violation in judge(report.history)]
            wrong += await nemesis.left_wrong(stack, plan, report)
        finally:
            await stack.close()
    return report, wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
