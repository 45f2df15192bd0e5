"""A random run: producers that insist, a receiver that fails, and a nemesis that kills.

The rule this module keeps: a seed decides what is done, and it is printed first. What comes of it
depends on the machine too, so a seed repeats a plan and not a run.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.client import Destination, Producer
from tests.faults.harness import Stack, until
from tests.faults.history import judge
from tests.faults.receiver import HELD, OK, RESET, Reply, Request
from tests.faults.records import History

FLAKY_RATIO = 0.2
PRODUCERS = 8
DRAIN_SECONDS = 60.0  # a rescue, a few retries and their backoff, on a busy machine
DESTINATION = b'"timeout_seconds":1,"retry":{"base_seconds":0.2,"cap_seconds":2,"max_attempts":50}'


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how much, and by which seed."""

    seed: int
    seconds: float
    deliveries_count: int
    kill_every_seconds: tuple[float, float] = (2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Report:
    """What happened."""

    history: History
    kills: Counter[str]
    drained_seconds: float

    def __str__(self) -> str:
        deliveries = self.history.deliveries
        outcomes = Counter(attempt.outcome for delivery in deliveries for attempt in delivery.attempts)
        states = Counter(delivery.state for delivery in deliveries)
        answers = Counter(str(asked.status) for asked in self.history.asked)
        repeated = sum(count - 1 for count in Counter(each.delivery_id for each in self.history.arrivals).values())
        return (
            f"{len(deliveries)} deliveries {dict(states)}, attempts {dict(outcomes)}, answers {dict(answers)}, "
            f"killed {dict(self.kills)}; {len(self.history.arrivals)} requests, {repeated} of them repetitions, "
            f"drained {self.drained_seconds:.1f} s after the last fault; {len(judge(self.history))} violations"
        )


async def run(stack: Stack, plan: Plan) -> Report:
    """Everything, until it is drained. The history is for the caller to judge."""
    print(f"seed {plan.seed}: {plan.deliveries_count} deliveries over {plan.seconds:g} s")
    chance = random.Random(plan.seed)
    stack.receiver.decide = _flaky(random.Random(chance.random()))
    stack.receiver.witness = stack.witness
    await stack.start("api", "api", "worker", "worker", "dispatcher", "dispatcher")
    destinations = [await stack.destination(f"/flaky-{number}", DESTINATION) for number in range(3)]
    producing = asyncio.create_task(_produce(stack, destinations, plan))
    kills = await _torment(stack, chance, plan)
    last_fault = time.monotonic()
    await producing
    await stack.drained(seconds=DRAIN_SECONDS)
    drained_seconds = time.monotonic() - last_fault

    async def hints_taken() -> bool:
        return not await stack.hints_left()

    await until(hints_taken, "the last jobs in Redis to be taken")
    return Report(await stack.history(), kills, drained_seconds)


async def left_wrong(stack: Stack, plan: Plan, report: Report) -> list[str]:
    """What the checker does not judge: all were made, only poison is dead, no process ended by itself."""
    wrong = []
    if len(report.history.deliveries) != plan.deliveries_count:
        wrong.append(f"{len(report.history.deliveries)} deliveries of {plan.deliveries_count} are in the ledger")
    # A delivery that was under way at three kills in a row is poison, and nothing else may be dead.
    unlike = await stack.fetch(
        "SELECT state, dead_reason, count(*) FROM deliveries"
        " WHERE state <> 'delivered' AND dead_reason IS DISTINCT FROM 'poison' GROUP BY 1, 2"
    )
    wrong += [f"{row['count']} deliveries are {row['state']} ({row['dead_reason']})" for row in unlike]
    wrong += [
        f"a {process.role} ended by itself with {process.exit_code}: {process.log}"
        for process in stack.processes
        if process.exit_code not in (None, -9)
    ]
    return wrong


def _flaky(chance: random.Random) -> Callable[[Request], Reply]:
    """A receiver that fails one time in five: a 503, a reset, or silence until the sender gives up."""

    def decide(request: Request) -> Reply:
        return chance.choice([Reply(503), RESET, HELD]) if chance.random() < FLAKY_RATIO else OK

    return decide


async def _produce(stack: Stack, destinations: list[Destination], plan: Plan) -> None:
    """So many deliveries, spread over the time, each insisted on; some are looked at as they go."""
    started = time.monotonic()
    numbers = iter(range(plan.deliveries_count))

    async def serve(producer: Producer) -> None:
        for number in numbers:
            due = started + number * plan.seconds / plan.deliveries_count
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await producer.insist(destinations[number % len(destinations)], b'{"number":%d}' % number)

    await asyncio.gather(*(serve(stack.producer(connections_count=2)) for _ in range(PRODUCERS)))


async def _torment(stack: Stack, chance: random.Random, plan: Plan) -> Counter[str]:
    """Kill roles again and again; at a third of the time empty Redis, at two thirds kill Postgres."""
    kills: Counter[str] = Counter()
    specials = ["postgres", "redis"]
    started = time.monotonic()
    while (passed := time.monotonic() - started) < plan.seconds:
        await asyncio.sleep(chance.uniform(*plan.kill_every_seconds))
        if specials and passed > plan.seconds * (3 - len(specials)) / 3:
            special = specials.pop()
            kills[special] += 1
            await (stack.flush_redis() if special == "redis" else _restart_postgres(stack, chance))
            continue
        role = chance.choice(["api", "worker", "worker", "dispatcher"])
        victim = chance.choice(stack.living(role))
        victim.kill()
        kills[role] += 1
        stack.launch(role, port=victim.port or None)
    return kills


async def _restart_postgres(stack: Stack, chance: random.Random) -> None:
    stack.servers.kill_postgres()
    await asyncio.sleep(chance.uniform(0.2, 1.5))
    stack.servers.start_postgres()
