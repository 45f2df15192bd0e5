"""Each row of "Postgres" that test_lost_servers.py does not have: it answers late, wrongly, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import asyncpg
import pytest

from service.domain.ids import Prefix, parse_typeid
from service.queue.arq_queue import ArqQueue
from service.telemetry import events
from tests.faults.client import Answer, Destination, Producer, new_key
from tests.faults.harness import Stack, assert_accepted, until
from tests.faults.history import judge
from tests.faults.proxy import Fault
from tests.faults.receiver import HELD, OK, Reply
from tests.servers import name_of

pytestmark = [pytest.mark.slow]

QUICK_RETRY = b'"retry":{"base_seconds":0.1}'
SHORT_LEASE = b'"timeout_seconds":1,"retry":{"base_seconds":0.1}'
FLOWS_AGAIN_WITHIN_SECONDS = 5
ACCEPT = b"INSERT INTO idempotency_keys"
CLAIM = b"SET state = 'delivering'"
SETTLE = b"INSERT INTO attempts"


def outcomes(view: dict[str, Any]) -> list[str]:
    return [attempt["outcome"] for attempt in view["attempts"]]


async def test_an_accept_cut_before_or_after_its_commit_converges_when_it_is_repeated(stack: Stack) -> None:
    """The connection is cut before and after COMMIT took effect: accept, and the start of a redrive."""
    proxy = await stack.postgres_proxy()
    await stack.start("api", DATABASE_URL=proxy.url)
    stack.receiver.scripts["/dead"] = [Reply(404), OK]
    destination = await stack.destination("/dead")
    producer = stack.producer()
    for fault, repeated in ((Fault.CUT_BEFORE, 202), (Fault.CUT_AFTER, 200)):
        proxy.on(ACCEPT, fault)
        key = new_key()
        answer = await producer.post(destination, key=key)
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
        assert (await producer.post(destination, key=key)).status == repeated
    await stack.start("worker", "dispatcher")
    await stack.drained()
    ids = [letter["delivery_id"] for letter in (await stack.call("GET", "/dlq")).json["items"]]
    assert len(ids) == 2
    for fault, repeated in ((Fault.CUT_BEFORE, 202), (Fault.CUT_AFTER, 200)):
        delivery_id = ids.pop()
        body = json.dumps({"delivery_ids": [delivery_id], "reason": "mended"}).encode()
        proxy.on(b"COMMIT;", fault)  # not BEGIN ISOLATION LEVEL READ COMMITTED;
        key = new_key()
        answer = await stack.connect().request("POST", "/dlq/redrive", body, key)
        assert answer.status == 503
        assert (await stack.connect().request("POST", "/dlq/redrive", body, key)).status == repeated
        await stack.reached(delivery_id, "delivered")
    history = await stack.judged()
    assert len(history.arrivals) == 4
    assert {(each.state, each.redrive_count) for each in history.deliveries} == {("delivered", 1)}


async def test_a_claim_or_settle_cut_before_or_after_its_commit_is_never_made_twice(stack: Stack) -> None:
    """The connection is cut before and after COMMIT took effect: claim and settle.

    A claim of which the worker never heard is not sent: its lease ends, and the attempt is unknown.
    """
    proxy = await stack.postgres_proxy()
    stack.receiver.witness = stack.witness
    await stack.start("api", "dispatcher")
    [worker] = await stack.start("worker", DATABASE_URL=proxy.url)
    cases = [
        (CLAIM, Fault.CUT_BEFORE, ["success"]),
        (SETTLE, Fault.CUT_BEFORE, ["success"]),
        (SETTLE, Fault.CUT_AFTER, ["success"]),
        (CLAIM, Fault.CUT_AFTER, ["unknown", "success"]),
    ]
    for number, (statement, fault, expected) in enumerate(cases):
        destination = await stack.destination(f"/{number}", SHORT_LEASE)
        struck = proxy.on(statement, fault)
        view = await stack.reached(await stack.producer().accepted(destination), "delivered")
        assert struck.is_set()
        assert (statement, fault, outcomes(view)) == (statement, fault, expected)
        assert len(stack.receiver.at(f"/{number}")) == 1
    await stack.judged()
    assert worker.exit_code is None


async def test_a_database_that_fails_now_and_then_loses_nothing_and_every_repetition_is_explained(
    stack: Stack,
) -> None:
    """Calls fail at random: timeout, done-but-reported-failed, not done, serialization failure.

    One call in a hundred, and one in ten of those that write: a group commit makes few of many deliveries.
    """
    seed = int(os.environ.get("PROXY_SEED") or random.SystemRandom().randrange(10**6))
    print(f"seed {seed}")
    chance = random.Random(seed)
    faults: Counter[str] = Counter()

    def decide(asks: bytes) -> Fault | None:
        writes = any(statement in asks for statement in (ACCEPT, CLAIM, SETTLE))
        if chance.random() >= (0.1 if writes else 0.01):
            return None
        fault = chance.choice(list(Fault))
        faults[f"{fault.name} of {'a write' if writes else 'another'}"] += 1
        return fault

    proxy = await stack.postgres_proxy()
    roles = await stack.start(
        "api", "worker", "dispatcher", DATABASE_URL=proxy.url, DATABASE_STATEMENT_TIMEOUT_SECONDS="0.5"
    )
    stack.receiver.witness = stack.witness
    destination = await stack.destination("/hook", SHORT_LEASE)
    proxy.decide = decide
    producers = [stack.producer() for _ in range(8)]
    await asyncio.gather(*(insist(producer, destination, 40) for producer in producers))
    proxy.heal()
    print(dict(faults))
    assert faults.total() >= 5
    history = await stack.judged()
    assert len(history.deliveries) == 320
    assert {delivery.state for delivery in history.deliveries} == {"delivered"}
    assert [role.exit_code for role in roles] == [None] * 3


async def insist(producer: Producer, destination: Destination, count: int) -> None:
    for _ in range(count):
        await producer.insist(destination)


async def test_restarts_under_load_cost_503s_and_seconds_and_lose_nothing(stack: Stack) -> None:
    """Restarts: fast, immediate, and one backend killed."""
    roles = await stack.start("api", "worker", "dispatcher")
    destination = await stack.destination("/hook", QUICK_RETRY)
    answers: list[Answer] = []
    stop = asyncio.Event()
    producer = stack.producer(connections_count=4)

    async def post_on() -> None:
        while not stop.is_set():
            answers.append(await producer.post(destination))

    def accepted() -> int:
        return sum(answer.status == 202 for answer in answers)

    posting = [asyncio.create_task(post_on()) for _ in range(4)]
    for how in ("fast", "immediate", "one backend"):
        before = accepted()
        await until(lambda before=before: accepted() >= before + 100, "accepted deliveries")  # type: ignore[misc]
        if how == "one backend":
            [backend] = await stack.fetch(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'hookledger-worker' LIMIT 1"
            )
            stack.servers.kill_backend(backend["pid"])
            refused = len(answers) - accepted()
            await until(lambda refused=refused: len(answers) - accepted() > refused, "a 503")  # type: ignore[misc]
        else:
            stack.servers.stop_postgres(immediate=how == "immediate")
            stack.servers.start_postgres()
        before = accepted()
        seconds = await until(lambda before=before: accepted() > before, "an accepted delivery")  # type: ignore[misc]
        print(f"accepting again {seconds:.1f} s after Postgres was back ({how})")
        assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    stop.set()
    await asyncio.gather(*posting)
    assert {answer.status for answer in answers} == {202, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status == 503)
    await stack.judged()
    assert [role.exit_code for role in roles] == [None] * 3


async def test_while_every_connection_is_held_the_answer_is_503_and_no_attempt_is_charged(stack: Stack) -> None:
    """All pool connections held: 503 within the acquire timeout, not ready, no attempt charged."""
    await stack.start("api", "dispatcher")
    [held, worker] = await stack.start(
        "api", "worker", DATABASE_POOL_CONNECTIONS_MAX="2", DATABASE_ACQUIRE_TIMEOUT_SECONDS="0.5"
    )
    first, second = await stack.destination("/first"), await stack.destination("/second")
    producer = stack.producer()
    async with locked(stack, "deliveries"):
        looking = [
            asyncio.create_task(stack.connect(held.port).request("GET", "/deliveries?limit=1")) for _ in range(2)
        ]
        queue = ArqQueue(stack.servers.redis_url)
        ready = stack.connect(held.port)

        async def not_ready() -> bool:
            return (await ready.request("GET", "/readyz")).status == 503

        await until(not_ready, "readiness to go")
        started = time.monotonic()
        answer = await producer.post(first, over=stack.connect(held.port))
        seconds = time.monotonic() - started
        print(f"answered {answer.status} after {seconds:.2f} s, the acquire timeout being 0.5 s")
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
        assert not any(look.done() for look in looking), "the connections were free again"
        # Claims of rows that are not there wait for the lock like any other, and hold the worker's connections.
        for _ in range(4):
            await queue.hint([uuid.uuid4()])
        await queue.close()
        await until(lambda: worker.said(events.CLAIM_FAILED), "a claim that finds no connection")
    await asyncio.gather(*looking)
    delivery_ids = [await producer.accepted(destination) for destination in (first, second)]
    for delivery_id in delivery_ids:
        assert outcomes(await stack.reached(delivery_id, "delivered")) == ["success"]
    await stack.judged()


@contextlib.asynccontextmanager
async def locked(stack: Stack, table: str) -> AsyncIterator[None]:
    """A long lock, as of a migration gone wrong."""
    connection = await asyncpg.connect(stack.database_url)
    try:
        async with connection.transaction():
            await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def read_only(stack: Stack) -> AsyncIterator[None]:
    """Every session is read-only at once, and no longer so afterwards."""
    reload = "SELECT pg_reload_conf()"
    await stack.command("ALTER SYSTEM SET default_transaction_read_only = on", reload)
    try:
        yield
    finally:
        await stack.command("ALTER SYSTEM RESET default_transaction_read_only", reload)


@contextlib.asynccontextmanager
async def disk_full(stack: Stack) -> AsyncIterator[None]:
    """Every write is refused as on a full disk (53100): by triggers, since a test may not mount a small disk."""
    tables = ("idempotency_keys", "delivery_identities", "payloads", "deliveries", "attempts", "workers")
    connection = await asyncpg.connect(stack.database_url)
    await connection.execute(
        "CREATE FUNCTION disk_full() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$"
    )
    for table in tables:
        await connection.execute(
            f"CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION disk_full()"
        )
    yield
    for table in tables:
        await connection.execute(f"DROP TRIGGER full_disk ON {table}")
    await connection.close()


Trouble = Callable[[Stack], AbstractAsyncContextManager[None]]


@pytest.mark.parametrize(
    "trouble",
    [read_only, disk_full, lambda stack: locked(stack, "deliveries")],
    ids=["read-only", "disk full", "long lock and statement_timeout"],
)
async def test_a_ledger_that_takes_no_writes_costs_503s_sends_nothing_and_recovers_by_itself(
    stack: Stack, trouble: Trouble
) -> None:
    """Read-only, disk full, statement_timeout, a long lock: no 202 without a durable row, no send without its intent.

    While it lasts, answers come for what is under way, retries grow due, hints are given, and producers post.
    """
    stack.receiver.witness = stack.witness
    stack.receiver.scripts["/held"] = [HELD]
    stack.receiver.scripts["/again"] = [Reply(503), OK]
    roles = await stack.start("api", "worker", "dispatcher", DATABASE_STATEMENT_TIMEOUT_SECONDS="1")
    _, worker, dispatcher = roles
    held = await stack.destination("/held")
    again = await stack.destination("/again", b'"retry":{"schedule_seconds":[4]}')
    producer = stack.producer(connections_count=4)
    held_ids, again_ids = await producer.many(held, 10), await producer.many(again, 10)
    await stack.receiver.wait_for("/held", 10)
    await stack.receiver.wait_for("/again", 10)
    await until(lambda: worker.log.read_text().count(events.ATTEMPT_SETTLED) >= 10, "the outcomes of /again")
    queue = ArqQueue(stack.servers.redis_url)
    answers: list[Answer] = []
    async with trouble(stack):
        since = time.monotonic()
        stack.receiver.release()
        numbers = [parse_typeid(Prefix.DELIVERY, delivery_id) for delivery_id in again_ids]
        await until(lambda: worker.said(events.SETTLE_RETRIED), "the worker to miss the ledger at an outcome")
        await until(lambda: dispatcher.said(events.LEDGER_DOWN), "the dispatcher to miss the ledger")
        await until(lambda: time.monotonic() - since > 4.5, "the retries to be due")
        await queue.hint([number for number in numbers if number is not None])
        answers += [await producer.post(held) for _ in range(3)]
        await until(lambda: worker.said(events.CLAIM_FAILED), "a claim that cannot be written")
        assert len(stack.receiver.at("/again")) == 10, "a request was made whose claim could not be written"
    await queue.close()
    assert {answer.status for answer in answers} == {503}
    assert all("retry-after" in answer.headers for answer in answers)
    for delivery_id in held_ids:
        assert outcomes(await stack.reached(delivery_id, "delivered")) == ["success"]
    for delivery_id in again_ids:
        assert outcomes(await stack.reached(delivery_id, "delivered")) == ["retryable", "success"]
    history = await stack.judged()
    assert len(history.deliveries) == 20
    assert [role.exit_code for role in roles] == [None] * 3


async def test_connections_that_stay_read_only_are_replaced_when_the_ledger_is_writable_again(stack: Stack) -> None:
    """Read-only, as after a failover: the connections made meanwhile go to what may not be written, and stay open."""
    database = name_of(stack.database_url)
    roles = await stack.start("api", "worker", "dispatcher")
    destination = await stack.destination("/hook")
    producer = stack.producer()
    end_sessions = (
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE datname = '{database}' AND application_name LIKE 'hookledger-%'"
    )
    await stack.command(f"ALTER DATABASE {database} SET default_transaction_read_only = on", end_sessions)
    await until(lambda: roles[2].said(events.LEDGER_DOWN), "the dispatcher to miss the ledger")

    async def refused() -> bool:
        return (await producer.post(destination)).status == 503

    await until(refused, "the first refusal")
    for _ in range(20):
        assert await refused()
    await stack.command(f"ALTER DATABASE {database} RESET default_transaction_read_only")

    async def taken() -> bool:
        return (await producer.post(destination)).status == 202

    await until(taken, "the first accepted delivery", seconds=FLOWS_AGAIN_WITHIN_SECONDS)
    await stack.judged()


async def test_an_outcome_that_cannot_be_written_until_its_lease_ends_is_unknown_and_not_dead(stack: Stack) -> None:
    """Outcome cannot be written after a 2xx: never DLQ, never a blind resend. The worker alone is cut off."""
    proxy = await stack.postgres_proxy()
    await stack.start("api", "dispatcher")
    [worker] = await stack.start("worker", DATABASE_URL=proxy.url)
    stack.receiver.witness = stack.witness
    stack.receiver.scripts["/retry"] = stack.receiver.scripts["/hold"] = [HELD, OK]
    fields = b'"timeout_seconds":2,"retry":{"base_seconds":0.1,"max_attempts":2}'
    delivery_ids = {}
    for policy in ("retry", "hold"):
        destination = await stack.destination(f"/{policy}", fields + b',"on_ambiguous":"%s"' % policy.encode())
        delivery_ids[policy] = await stack.producer().accepted(destination)
        await stack.receiver.wait_for(f"/{policy}", 1)
    await proxy.refuse()
    proxy.cut()
    stack.receiver.release()
    await until(lambda: worker.said(events.SETTLE_RETRIED), "the worker to miss the ledger")
    held = await stack.reached(delivery_ids["hold"], "ambiguous")
    assert outcomes(held) == ["unknown"]
    await until(lambda: worker.log.read_text().count(events.ATTEMPT_NOT_SETTLED) >= 2, "the end of both leases")
    assert len(stack.receiver.at("/retry")) == len(stack.receiver.at("/hold")) == 1
    await proxy.accept()
    view = await stack.reached(delivery_ids["retry"], "delivered")
    assert outcomes(view) == ["unknown", "success"]
    assert (await stack.view(delivery_ids["hold"]))["state"] == "ambiguous"
    assert len(stack.receiver.at("/hold")) == 1, "it was sent blindly again"
    assert_accepted(judge(await stack.history(drained=False)))  # what is ambiguous waits for a person
    assert worker.exit_code is None
