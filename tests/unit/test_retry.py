"""When the next attempt is due, and when there is none."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections import Counter

import pytest

from service.domain import limits
from service.domain.delivery import Bury, Complete, DeadReason, Hold, OnAmbiguous, Release, RetryAfter
from service.domain.outcome import Exchange, Fault, Outcome, Phase, classify
from service.domain.retry import Budget, RetryPolicy, backoff_seconds, decide, decide_lost, parse_retry_after

NOW = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)
FAR = NOW + dt.timedelta(days=30)


def judged(
    exchange: Exchange,
    *,
    policy: RetryPolicy | None = None,
    budget: Budget | None = None,
    rules: dict[str, str] | None = None,
    jitter: float = 0.0,
) -> object:
    """The decision about an exchange."""
    return decide(
        classify(exchange, rules or {}),
        exchange,
        policy or RetryPolicy(),
        budget or Budget(number=1, attempts_max=18, deadline_at=FAR),
        now=NOW,
        wall_now=NOW,
        jitter=jitter,
    )


def answer(status_code: int, retry_after: str | None = None) -> Exchange:
    return Exchange(Phase.RESPONDED, 1, status_code=status_code, retry_after=retry_after)


STATUSES = {
    200: (Outcome.SUCCESS, Complete()),
    204: (Outcome.SUCCESS, Complete()),
    299: (Outcome.SUCCESS, Complete()),
    301: (Outcome.REDIRECT, RetryAfter(5.0)),
    302: (Outcome.REDIRECT, RetryAfter(5.0)),
    303: (Outcome.REDIRECT, RetryAfter(5.0)),
    307: (Outcome.REDIRECT, RetryAfter(5.0)),
    308: (Outcome.REDIRECT, RetryAfter(5.0)),
    400: (Outcome.REJECTED, Bury(DeadReason.REJECTED)),
    401: (Outcome.REJECTED, Bury(DeadReason.REJECTED)),
    403: (Outcome.REJECTED, Bury(DeadReason.REJECTED)),
    404: (Outcome.REJECTED, Bury(DeadReason.REJECTED)),
    408: (Outcome.RETRYABLE, RetryAfter(5.0)),
    409: (Outcome.REJECTED, Bury(DeadReason.REJECTED)),
    410: (Outcome.GONE, Bury(DeadReason.GONE)),
    422: (Outcome.REJECTED, Bury(DeadReason.REJECTED)),
    425: (Outcome.RETRYABLE, RetryAfter(5.0)),
    429: (Outcome.THROTTLED, RetryAfter(5.0)),
    500: (Outcome.RETRYABLE, RetryAfter(5.0)),
    501: (Outcome.RETRYABLE, RetryAfter(5.0)),
    502: (Outcome.RETRYABLE, RetryAfter(5.0)),
    503: (Outcome.RETRYABLE, RetryAfter(5.0)),
    504: (Outcome.RETRYABLE, RetryAfter(5.0)),
    599: (Outcome.RETRYABLE, RetryAfter(5.0)),
    99: (Outcome.REJECTED, RetryAfter(5.0)),
    101: (Outcome.REJECTED, RetryAfter(5.0)),
    600: (Outcome.REJECTED, RetryAfter(5.0)),
    999: (Outcome.REJECTED, RetryAfter(5.0)),
}


@pytest.mark.parametrize("status_code", STATUSES)
def test_a_status_has_its_class_and_its_consequence(status_code: int) -> None:
    exchange = answer(status_code)
    assert (classify(exchange, {}), judged(exchange)) == STATUSES[status_code]


@pytest.mark.parametrize(
    ("rule", "decision"),
    [
        ("success", Complete()),
        ("retryable", RetryAfter(5.0)),
        ("throttled", RetryAfter(5.0)),
        ("gone", Bury(DeadReason.GONE)),
        ("rejected", Bury(DeadReason.REJECTED)),
    ],
)
@pytest.mark.parametrize("status_code", [200, 301, 404, 410, 500])
def test_a_destinations_rule_overrides_any_status(status_code: int, rule: str, decision: object) -> None:
    assert judged(answer(status_code), rules={str(status_code): rule}) == decision


def test_what_was_not_sent_is_retried_and_what_is_blocked_is_dead() -> None:
    for fault in (Fault.DNS, Fault.REFUSED, Fault.CONNECT, Fault.CONNECT_TIMEOUT, Fault.TLS):
        assert judged(Exchange(Phase.NOT_SENT, 1, fault=fault)) == RetryAfter(5.0)
    assert judged(Exchange(Phase.NOT_SENT, 1, fault=Fault.BLOCKED)) == Bury(DeadReason.BLOCKED)


def test_our_own_faults_are_released_uncharged_unless_the_request_went_out() -> None:
    assert judged(Exchange(Phase.NOT_SENT, 1, fault=Fault.SHUTDOWN)) == Release(0.0)
    assert judged(Exchange(Phase.NOT_SENT, 1, fault=Fault.INTERNAL)) == Release(30.0)
    assert judged(Exchange(Phase.NOT_SENT, 1, fault=Fault.PROXY)) == Release(30.0)
    assert judged(Exchange(Phase.WRITTEN, 1, fault=Fault.SHUTDOWN)) == RetryAfter(5.0)


@pytest.mark.parametrize(("left_seconds", "delay_seconds"), [(100, 30.0), (10, 5.0), (-1, 0.0)])
def test_a_release_leaves_time_for_another_attempt_before_the_deadline(
    left_seconds: float, delay_seconds: float
) -> None:
    exchange = Exchange(Phase.NOT_SENT, 1, fault=Fault.INTERNAL)
    budget = Budget(1, 18, NOW + dt.timedelta(seconds=left_seconds))
    assert judged(exchange, budget=budget) == Release(delay_seconds)


def test_what_faults_of_our_own_held_up_does_not_come_back_all_at_once() -> None:
    exchange = Exchange(Phase.NOT_SENT, 1, fault=Fault.PROXY)
    assert [judged(exchange, jitter=jitter) for jitter in (0.0, 0.5)] == [Release(30.0), Release(22.5)]


def test_an_unknown_outcome_follows_the_destinations_policy() -> None:
    unknown = Exchange(Phase.WRITTEN, 1, fault=Fault.RESET)
    assert judged(unknown) == RetryAfter(5.0)
    assert judged(unknown, policy=RetryPolicy(on_ambiguous=OnAmbiguous.HOLD)) == Hold()


def test_the_last_attempt_and_the_deadline_end_it_whichever_comes_first() -> None:
    last = Budget(number=3, attempts_max=3, deadline_at=FAR)
    late = Budget(number=1, attempts_max=3, deadline_at=NOW + dt.timedelta(seconds=4))
    assert judged(answer(503), budget=last) == Bury(DeadReason.EXHAUSTED)
    assert judged(answer(503), budget=late) == Bury(DeadReason.DEADLINE)


def test_a_lost_worker_means_unknown_and_the_third_in_a_row_means_poison() -> None:
    def lost(crashed_claims: int, policy: RetryPolicy | None = None) -> object:
        budget = Budget(number=5, attempts_max=18, deadline_at=FAR, crashed_claims=crashed_claims)
        return decide_lost(policy or RetryPolicy(), budget, now=NOW, jitter=0.0)

    assert lost(0) == RetryAfter(80.0)
    assert lost(1) == RetryAfter(80.0)
    assert lost(2) == Bury(DeadReason.POISON)
    assert lost(0, RetryPolicy(on_ambiguous=OnAmbiguous.HOLD)) == Hold()


def test_delays_rise_whatever_the_dice_say_until_the_cap() -> None:
    policy = RetryPolicy(base_seconds=5, cap_seconds=100)
    slowest_then_fastest = [
        (backoff_seconds(policy, n, 0.0), backoff_seconds(policy, n + 1, 0.999999)) for n in range(1, 5)
    ]
    assert all(slow < fast for slow, fast in slowest_then_fastest)
    assert [backoff_seconds(policy, number, 0.0) for number in range(1, 8)] == [5, 10, 20, 40, 80, 100, 100]


@pytest.mark.parametrize("number", [1, 47, 1024, 1_000_000])
def test_no_attempt_number_overflows_the_delay(number: int) -> None:
    assert 0 < backoff_seconds(RetryPolicy(), number, 0.5) <= 43_200


def test_a_schedule_is_followed_and_its_last_delay_repeats() -> None:
    policy = RetryPolicy(schedule_seconds=(1.0, 60.0))
    assert [backoff_seconds(policy, number, 0.0) for number in (1, 2, 3)] == [1.0, 60.0, 60.0]
    assert backoff_seconds(policy, 2, 0.5) == pytest.approx(63.0)


def test_the_longer_of_retry_after_and_the_own_backoff_holds_and_never_less_than_asked() -> None:
    for jitter in (0.0, 0.3, 0.999):
        asked_more = judged(answer(429, "120"), policy=RetryPolicy(base_seconds=30), jitter=jitter)
        asked_less = judged(answer(503, "5"), policy=RetryPolicy(schedule_seconds=(300.0,)), jitter=jitter)
        assert isinstance(asked_more, RetryAfter)
        assert 120 <= asked_more.delay_seconds <= 132
        assert isinstance(asked_less, RetryAfter)
        assert asked_less.delay_seconds >= 300


@pytest.mark.parametrize(
    "raw",
    ["0", "-1", "1.5", "1e3", "1e300", "inf", "nan", "²", "٣", "1_000", "soon", "", " ", "60, 120", "ÿ", "Mon",
     "Mon, 30 Nov 99999 12:01:00 GMT", "Mon, 30 Nov 2026 11:59:00 GMT", "Sun Nov  6 08:49:37 1994", "x" * 5000],
)  # fmt: skip
def test_a_retry_after_that_asks_nothing_is_no_wish(raw: str) -> None:
    assert parse_retry_after(raw, NOW) is None


@pytest.mark.parametrize("raw", ["9999999999", "9" * 15, "9" * 5000, "86401", "Mon, 30 Nov 2099 12:01:00 GMT"])
def test_a_retry_after_beyond_a_day_is_capped(raw: str) -> None:
    assert parse_retry_after(raw, NOW) == limits.RETRY_AFTER_SECONDS_MAX


@pytest.mark.parametrize(
    "raw",
    ["60", " 60 ", "060", "Mon, 30 Nov 2026 12:01:00 GMT", "Monday, 30-Nov-26 12:01:00 GMT",
     "Mon Nov 30 12:01:00 2026", "Mon, 30 Nov 2026 12:01:00 -0000", "Mon, 30 Nov 2026 13:01:00 +0100"],
)  # fmt: skip
def test_a_retry_after_is_read_in_each_of_its_forms(raw: str) -> None:
    assert parse_retry_after(raw, NOW) == 60.0


def test_attempts_of_a_crowd_are_spread_over_half_of_every_delay() -> None:
    delays = sorted(backoff_seconds(RetryPolicy(), 5, n / 1000) for n in range(1000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(delays)]
    assert delays[-1] - delays[0] == pytest.approx(40.0, rel=0.01)
    assert max(gaps) < 0.05


def test_2000_deliveries_to_a_receiver_that_was_down_for_10_minutes_arrive_spread() -> None:
    """No second sees more than three times the mean: of many such outages, because in one of them
    three arrivals a second are so few that chance alone makes twelve of some second."""
    outages, crowd, down_seconds = 20, 2_000, 600
    arrivals: Counter[int] = Counter()
    for seed in range(outages):
        dice = random.Random(seed)
        for _ in range(crowd):
            at, number = 0.0, 0
            while at < down_seconds:
                number += 1
                at += backoff_seconds(RetryPolicy(), number, dice.random())
            arrivals[int(at)] += 1
    mean = crowd / (max(arrivals) + 1 - min(arrivals))
    most = max(arrivals.values()) / outages
    print(f"arrivals per second: {mean:.1f} in the mean, {most:.1f} in the busiest second")
    assert most <= 3 * mean
