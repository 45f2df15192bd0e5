"""The history checker: three logs in, violations out.

What the API answered, what the receiver saw and what the ledger holds are held against each other,
and against twelve invariants (I1 to I12). The rule: the checker believes none of the three by itself, and what
it finds is a value, one sentence each.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

FRESH_SECONDS: Final = 10.0  # a signature is made moments before the bytes go out; a paused worker sends none

_TERMINAL: Final = frozenset({"delivered", "dead", "cancelled"})
_SETTLED: Final = _TERMINAL | {"ambiguous"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One POST of a delivery. `status` None: no answer came. `delivery_id` as a 200 or 202 told it."""

    key: str
    destination_id: str
    body_sha256: str
    status: int | None
    delivery_id: str | None
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class Seen:
    """A delivery as a GET of a tenant's showed it, in the order of asking."""

    delivery_id: str
    state: str
    redrive_count: int
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request at the receiver. `answered` is the status that it wrote whole, or None.

    `witnessed`: the number of the latest committed claim while the request was still unanswered.
    """

    delivery_id: str
    attempt: int
    event_id: str
    at: dt.datetime
    body_sha256: str
    signed: bool
    timestamp: int
    answered: int | None
    retry_after_seconds: float = 0.0
    witnessed: int | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row of the ledger's attempts."""

    number: int
    scheduled_at: dt.datetime
    started_at: dt.datetime
    completed_at: dt.datetime
    trigger: str
    outcome: str
    late_outcome: str | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One row of the ledger's deliveries with its attempts, by number."""

    id: str
    tenant: str
    destination_id: str
    event_id: str
    body_sha256: str
    state: str
    attempt_count: int
    redrive_count: int
    created_at: dt.datetime
    next_attempt_at: dt.datetime
    deadline_at: dt.datetime
    completed_at: dt.datetime | None
    base_seconds: float
    cap_seconds: float
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """One run. `drained`: faults are over and the time to drain has passed. `gauges` must be zero then."""

    asked: tuple[Asked, ...]
    seen: tuple[Seen, ...]
    arrivals: tuple[Arrival, ...]
    deliveries: tuple[Delivery, ...]
    read_at: dt.datetime
    drained: bool
    gauges: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, of which delivery (or key), and how."""

    invariant: str
    subject: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.sentence}"


def judge(history: History) -> list[Violation]:
    """Every violation of I1 to I12; an empty list accepts the run."""
    found = [*_judge_answers(history), *_judge_identities(history), *_judge_drain(history)]
    arrivals: defaultdict[str, list[Arrival]] = defaultdict(list)
    for arrival in history.arrivals:
        arrivals[arrival.delivery_id].append(arrival)
    ledger = {delivery.id: delivery for delivery in history.deliveries}
    unknown = sorted(arrivals.keys() - ledger.keys())
    found += [Violation("I3", each, "the receiver saw a delivery that is not in the ledger") for each in unknown]
    seen: defaultdict[str, list[Seen]] = defaultdict(list)
    for sight in history.seen:
        seen[sight.delivery_id].append(sight)
    for delivery in history.deliveries:
        mine = sorted(arrivals[delivery.id], key=lambda arrival: arrival.at)
        found += _judge_numbers(delivery)
        found += _judge_intents(delivery, mine)
        found += _judge_outcomes(delivery, mine)
        found += _judge_ends(delivery, seen[delivery.id])
        found += _judge_bytes(delivery, mine)
        found += _judge_times(delivery, mine)
    return found


def _judge_answers(history: History) -> Iterator[Violation]:
    """I1: what was accepted is there and goes on. I11: it is the asking tenant's. I12: one key, one delivery."""
    ledger = {delivery.id: delivery for delivery in history.deliveries}
    told: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for asked in history.asked:
        if asked.delivery_id is None:
            continue
        told[asked.tenant, asked.key].add(asked.delivery_id)
        delivery = ledger.get(asked.delivery_id)
        if delivery is None:
            yield Violation("I1", asked.delivery_id, f"was answered with {asked.status} and is not in the ledger")
            continue
        if delivery.tenant != asked.tenant:
            yield Violation("I11", delivery.id, f"was told to {asked.tenant} and is {delivery.tenant}'s")
        if delivery.body_sha256 != asked.body_sha256:
            yield Violation("I8", delivery.id, "the ledger holds other bytes than were posted")
        if delivery.state not in _SETTLED and delivery.next_attempt_at > delivery.deadline_at:
            yield Violation("I1", delivery.id, "waits for an attempt after its deadline")
    for (_, key), ids in told.items():
        if len(ids) > 1:
            yield Violation("I12", key, f"one key was answered with {len(ids)} deliveries")
    for sight in history.seen:
        delivery = ledger.get(sight.delivery_id)
        if delivery is not None and delivery.tenant != sight.tenant:
            yield Violation("I11", sight.delivery_id, f"was shown to {sight.tenant} and is {delivery.tenant}'s")


def _judge_identities(history: History) -> Iterator[Violation]:
    """I2: one delivery per identity, and none that nobody asked for."""
    asked = {(each.tenant, each.destination_id, each.key) for each in history.asked}
    identities = Counter((delivery.destination_id, delivery.event_id) for delivery in history.deliveries)
    for delivery in history.deliveries:
        if identities[delivery.destination_id, delivery.event_id] > 1:
            yield Violation("I2", delivery.id, f"is not the only delivery of {delivery.event_id}")
        if (delivery.tenant, delivery.destination_id, delivery.event_id) not in asked:
            yield Violation("I2", delivery.id, "nobody asked for it")
    by_event = {arrival.event_id: arrival.delivery_id for arrival in history.arrivals}
    for arrival in history.arrivals:
        if by_event[arrival.event_id] != arrival.delivery_id:
            yield Violation("I2", arrival.delivery_id, f"the receiver saw {arrival.event_id} under another id too")


def _judge_drain(history: History) -> Iterator[Violation]:
    """I10: once faults are over and time has passed, nothing is due, under way or held anywhere."""
    if not history.drained:
        return
    for delivery in history.deliveries:
        if delivery.state == "delivering":
            yield Violation("I10", delivery.id, "is still under way after everything drained")
        if delivery.state == "pending" and delivery.next_attempt_at <= history.read_at:
            yield Violation("I10", delivery.id, "is still due after everything drained")
    for name, count in history.gauges.items():
        if count:
            yield Violation("I10", name, f"stands at {count} after everything drained")


def _judge_numbers(delivery: Delivery) -> Iterator[Violation]:
    """I7: attempts are numbered 1 to n; the one under way has no row yet."""
    numbers = [attempt.number for attempt in delivery.attempts]
    if numbers != list(range(1, len(numbers) + 1)):
        yield Violation("I7", delivery.id, f"its attempts are numbered {numbers}")
    if len(numbers) != delivery.attempt_count - (delivery.state == "delivering"):
        yield Violation("I7", delivery.id, f"claims {delivery.attempt_count} attempts and has {len(numbers)}")


def _judge_intents(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I3: each request has an attempt that was committed before it. I4: no attempt made two requests."""
    by_number = {attempt.number: attempt for attempt in delivery.attempts}
    under_way = delivery.attempt_count if delivery.state == "delivering" else None
    times = Counter(arrival.attempt for arrival in arrivals)
    for number, count in times.items():
        if count > 1:
            yield Violation("I4", delivery.id, f"attempt {number} made {count} requests")
    for arrival in arrivals:
        attempt = by_number.get(arrival.attempt)
        what = f"the request of attempt {arrival.attempt}"
        if attempt is None:
            if arrival.attempt != under_way:
                yield Violation("I3", delivery.id, f"{what} has no attempt in the ledger")
        elif attempt.started_at > arrival.at:
            yield Violation("I3", delivery.id, f"{what} came before its claim")
        elif attempt.outcome in ("not_sent", "blocked"):
            yield Violation("I3", delivery.id, f"{what} came, and the ledger says {attempt.outcome}")
        if arrival.witnessed is not None and arrival.witnessed < arrival.attempt:
            yield Violation("I3", delivery.id, f"{what} came while its claim was not committed")


def _judge_outcomes(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I5: delivered is a 2xx that the receiver wrote; such a 2xx is never recorded as a failure."""
    by_number = {attempt.number: attempt for attempt in delivery.attempts}
    yes = {arrival.attempt for arrival in arrivals if arrival.answered is not None and 200 <= arrival.answered < 300}
    for number in yes & by_number.keys():
        if by_number[number].outcome not in ("success", "unknown"):
            yield Violation(
                "I5", delivery.id, f"attempt {number} got a 2xx and is recorded {by_number[number].outcome}"
            )
    for attempt in delivery.attempts:
        if "success" in (attempt.outcome, attempt.late_outcome) and attempt.number not in yes:
            yield Violation("I5", delivery.id, f"attempt {attempt.number} is a success that the receiver never gave")
    last = delivery.attempts[-1] if delivery.attempts else None
    if delivery.state == "delivered" and (last is None or "success" not in (last.outcome, last.late_outcome)):
        yield Violation("I5", delivery.id, "is delivered without an attempt that succeeded")


def _judge_ends(delivery: Delivery, seen: list[Seen]) -> Iterator[Violation]:
    """I6: what has ended stays so, redrive aside."""
    redriven = False
    ended = False
    for attempt in delivery.attempts:
        redriven = redriven or attempt.trigger != "schedule"
        if ended and attempt.trigger == "schedule":
            yield Violation("I6", delivery.id, f"attempt {attempt.number} was made after a success")
        ended = attempt.outcome == "success"
    if redriven and not delivery.redrive_count and all(attempt.trigger != "manual" for attempt in delivery.attempts):
        yield Violation("I6", delivery.id, "has a redrive's attempt and was never redriven")
    if ended and delivery.state != "delivered":
        yield Violation("I6", delivery.id, f"succeeded, and is {delivery.state}")
    sights = [(sight.state, sight.redrive_count) for sight in seen]
    sights.append((delivery.state, delivery.redrive_count))
    for (state, redrives), (later, later_redrives) in itertools.pairwise(sights):
        absorbed = state in ("delivered", "cancelled") or (state == "dead" and redrives == later_redrives)
        discarded = (state, later) == ("dead", "cancelled")
        if absorbed and later != state and not discarded:
            yield Violation("I6", delivery.id, f"was seen {state} and then {later}")


def _judge_bytes(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I8: the same bytes each time, under a fresh timestamp and a signature that holds."""
    for arrival in arrivals:
        what = f"the request of attempt {arrival.attempt}"
        if arrival.body_sha256 != delivery.body_sha256:
            yield Violation("I8", delivery.id, f"{what} brought other bytes")
        if arrival.event_id != delivery.event_id:
            yield Violation("I8", delivery.id, f"{what} named another event")
        if not arrival.signed:
            yield Violation("I8", delivery.id, f"{what} bears a signature that does not hold")
        age_seconds = arrival.at.timestamp() - arrival.timestamp
        if not 0 <= age_seconds <= FRESH_SECONDS:
            yield Violation("I8", delivery.id, f"{what} is dated {age_seconds:.1f} s before it came")


def _judge_times(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I9: no attempt before its time, however the time was set; nothing after the end."""
    by_number = {attempt.number: attempt for attempt in delivery.attempts}
    charged = 0  # attempts that the schedule counts, at least: a redrive begins anew, and what was not sent may be free
    for attempt in delivery.attempts:
        charged_before = charged
        charged = (0 if attempt.trigger == "redrive" else charged) + (attempt.outcome != "not_sent")
        if attempt.started_at < attempt.scheduled_at:
            yield Violation("I9", delivery.id, f"attempt {attempt.number} was claimed before it was due")
        before = by_number.get(attempt.number - 1)
        # A redrive and an operator set their own time; what was released unsent is due when it is.
        if before is None or attempt.trigger != "schedule" or before.outcome == "not_sent":
            continue
        least_seconds = min(delivery.cap_seconds, delivery.base_seconds * 2.0 ** (charged_before - 1)) / 2
        waited_seconds = (attempt.started_at - before.completed_at).total_seconds()
        if waited_seconds < least_seconds:
            yield Violation("I9", delivery.id, f"attempt {attempt.number} came {waited_seconds:.3f} s after the last")
    for arrival in arrivals:
        this, after = by_number.get(arrival.attempt), by_number.get(arrival.attempt + 1)
        # An answer that the ledger calls unknown was not read, and neither was what it asked for.
        if this is None or this.outcome == "unknown" or after is None or after.trigger != "schedule":
            continue
        if (after.started_at - arrival.at).total_seconds() < arrival.retry_after_seconds:
            yield Violation("I9", delivery.id, f"attempt {after.number} came before the asked Retry-After")
    if delivery.completed_at is not None:
        for arrival in arrivals:
            if arrival.at > delivery.completed_at:
                yield Violation("I9", delivery.id, f"a request came after it was {delivery.state}")
