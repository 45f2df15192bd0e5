"""Standard Webhooks, the sender's side: what the specification asks of every attempt, row by row.

Each test quotes the row that it shows. Rows about the arithmetic are in tests/unit/test_signing.py and
tests/property/test_signing.py, those about rotation in tests/stories/test_secrets.py.
"""

from __future__ import annotations

import datetime as dt
import itertools
import re

import pytest
import standardwebhooks

from service.domain import limits, signing
from service.domain.outcome import Exchange, Fault, Outcome, Phase, classify
from service.domain.retry import RetryPolicy, backoff_seconds
from service.domain.signing import Verdict
from tests.world import TENANT, World, answered

SUGGESTED_SECONDS = [5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400]


async def failed_once_and_sent_again(world: World, first: Exchange) -> float:
    """Send one delivery twice; how many seconds the first answer made it wait."""
    destination = await world.destination()
    world.sender.script = [first, answered(200)]
    delivery_id = await world.accepted(destination.id)
    await world.work()
    row = await world.view(delivery_id)
    [attempt] = await world.attempts(delivery_id)
    wait_seconds = float((row["next_attempt_at"] - attempt["attempt_completed_at"]).total_seconds())
    world.clock.instant += dt.timedelta(seconds=wait_seconds)
    await world.let_pass(wait_seconds + 1)
    await world.dispatch()
    await world.work()
    return wait_seconds


async def test_the_id_is_stable_and_the_timestamp_is_that_of_the_attempt(world: World) -> None:
    """Row: `webhook-id` is stable over all attempts and must not contain `.`; `webhook-timestamp` is Unix seconds of
    **this** attempt; `webhook-signature` is a space-delimited list.
    """
    wait_seconds = await failed_once_and_sent_again(world, answered(503))
    first, second = (dict(request.headers) for request in world.sender.requests)
    assert first["webhook-id"] == second["webhook-id"]
    assert "." not in first["webhook-id"]
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) == int(wait_seconds)
    assert int(first["webhook-timestamp"]) == int(dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC).timestamp())
    assert first["webhook-signature"] != second["webhook-signature"]
    entry = r"v1a?,[A-Za-z0-9+/]+={0,2}"
    assert re.fullmatch(f"{entry}( {entry})*", first["webhook-signature"])


async def test_a_time_with_another_zone_is_signed_as_the_same_instant(world: World) -> None:
    """Row: traps, the reference Python library (1.1.0) signs a wrong timestamp when given an aware non-UTC time."""
    created = await world.destinations.create(TENANT, "k", {"name": "n", "url": "https://r.example/"}, None)
    utc = world.clock.instant
    world.clock.instant = utc.astimezone(dt.timezone(dt.timedelta(hours=5, minutes=30)))
    await world.accepted(created.destination.id)
    await world.work()
    headers = dict(world.sender.requests[0].headers)
    assert headers["webhook-timestamp"] == str(int(utc.timestamp()))
    key = signing.parse_secret(created.secret or "")
    assert key is not None
    assert headers["webhook-signature"] == signing.sign(
        headers["webhook-id"], int(utc.timestamp()), b'{"n":1.0}', [key]
    )
    # The trap is real: it signs the wall clock's figures as if they were UTC.
    library = standardwebhooks.Webhook(created.secret or "")
    assert library.sign(headers["webhook-id"], world.clock.instant, '{"n":1.0}') != headers["webhook-signature"]


@pytest.mark.parametrize("junk", ["", "v1,", "v1, v1a,", "\x00", "v1,é", "v1a,====", ", ,"])
def test_junk_is_a_verdict_and_a_bare_v1_never_verifies(junk: str) -> None:
    """Row: traps, its `verify` raises unrelated errors on junk; a bare `v1,` must never verify."""
    for keys in ([], [bytes(32)], [lambda signature, content: True]):
        assert signing.verify("m", "1", junk, b"", keys=keys, now_unix_seconds=1) is not Verdict.VALID


@pytest.mark.parametrize("status_code", range(200, 600))
def test_2xx_alone_is_success(status_code: int) -> None:
    """Row: 2xx is success, everything else fails, 3xx is not followed, 410 disables the destination."""
    outcome = classify(answered(status_code), {})
    assert (outcome is Outcome.SUCCESS) == (200 <= status_code < 300)
    assert (outcome is Outcome.REDIRECT) == (300 <= status_code < 400)
    assert (outcome is Outcome.GONE) == (status_code == 410)


def test_a_timeout_is_no_success() -> None:
    """Row: everything else fails. No answer in time, before or after the request was written."""
    assert classify(Exchange(Phase.WRITTEN, 1, fault=Fault.TIMEOUT), {}) is not Outcome.SUCCESS
    assert classify(Exchange(Phase.NOT_SENT, 1, fault=Fault.TIMEOUT), {}) is not Outcome.SUCCESS


async def test_a_410_disables_the_destination(world: World) -> None:
    """Row: 410 disables the destination."""
    destination = await world.destination()
    world.sender.script = [answered(410)]
    await world.accepted(destination.id)
    await world.work()
    found = await world.destinations.find(TENANT, destination.id)
    assert found is not None
    assert (found.state, found.disabled_reason) == ("disabled", "the receiver answered 410 Gone")


@pytest.mark.parametrize("status_code", [429, 502, 504])
async def test_an_answer_that_asks_to_slow_down_is_waited_for(world: World, status_code: int) -> None:
    """Row: 429/502/504 ask to slow down. The wait is the backoff, which doubles each time."""
    assert await failed_once_and_sent_again(world, answered(status_code)) > 2
    waits = [backoff_seconds(RetryPolicy(), number, 0.5) for number in range(1, 12)]
    assert all(later >= 1.9 * earlier for earlier, later in itertools.pairwise(waits))


@pytest.mark.parametrize("status_code", [429, 503])
async def test_a_retry_after_is_honoured(world: World, status_code: int) -> None:
    """Row: `Retry-After` is honoured. Nothing is sent before the asked time."""
    assert await failed_once_and_sent_again(world, answered(status_code, retry_after="120")) >= 120


async def test_the_total_timeout_is_15_to_30_seconds_unless_told_otherwise(world: World) -> None:
    """Row: total timeout 15 to 30 s."""
    assert 15 <= limits.TIMEOUT_SECONDS_DEFAULT <= 30
    await world.accepted((await world.destination()).id)
    await world.accepted((await world.destination(timeout_seconds=30.0)).id)
    await world.work()
    assert sorted(request.timeout_seconds for request in world.sender.requests) == [15.0, 30.0]


async def test_the_suggested_schedule_can_be_set_and_is_followed_with_jitter(world: World) -> None:
    """Row: suggested schedule 0, 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h, with jitter."""
    made = await world.destination(schedule_seconds=[float(wait) for wait in SUGGESTED_SECONDS])
    policy = RetryPolicy(schedule_seconds=tuple(made.schedule_seconds or ()))
    for jitter in (0.0, 0.5, 0.999):
        waits = [backoff_seconds(policy, number, jitter) for number in range(1, len(SUGGESTED_SECONDS) + 1)]
        assert all(
            asked <= wait <= 1.1 * asked and (wait > asked) == (jitter > 0)
            for asked, wait in zip(SUGGESTED_SECONDS, waits, strict=True)
        )


async def test_a_lasting_failure_ends_where_an_operator_sees_it(world: World) -> None:
    """Row: after lasting failure, disable and tell someone by another channel. It shows in the dead-letter queue."""
    destination = await world.destination(attempts_max=1, owner="team-grades")
    world.sender.script = [answered(503)]
    delivery_id = await world.accepted(destination.id)
    await world.work()
    row = await world.view(delivery_id)
    assert (row["state"], row["dead_reason"]) == ("dead", "exhausted")
