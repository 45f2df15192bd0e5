"""The history checker: three logs in, violations out.

What the API answered, what the receiver saw and what the ledger holds are held against each other,
and against twelve invariants (I1 to I12). The rule: the checker believes none of the three by itself, and what
it finds is a value, one sentence each.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from tests.faults.records import Arrival, Delivery, History, Seen, Violation

OWN_FAULT_SECONDS: Final = 30.0  # what was not sent by a fault of the sender's own waits no longer
FRESH_SECONDS: Final = 10.0  # a signature is made moments before the bytes go out; a paused worker sends none

_TERMINAL: Final = frozenset({"delivered", "dead", "cancelled"})
_SETTLED: Final = _TERMINAL | {"ambiguous"}
_STATES: Final = _SETTLED | {"pending", "delivering"}
_GAUGES: Final = ("hints", "leases")

_RESPONDED: Final = frozenset({"success", "retryable", "throttled", "redirect", "rejected", "gone"})
_UNSENT: Final = frozenset({"not_sent", "blocked"})
_DOUBTFUL: Final = frozenset({"retryable", "throttled", "redirect", "rejected", "not_sent", "unknown"})
# What the last attempt of a dead delivery came to. The other reasons may come whatever was attempted before.
_LAST_OUTCOMES: Final = {
    "rejected": frozenset({"rejected"}),
    "gone": frozenset({"gone"}),
    "blocked": frozenset({"blocked"}),
    "exhausted": _DOUBTFUL,
    "poison": frozenset({"unknown"}),
    "given_up": frozenset({"unknown"}),
}
_OTHER_REASONS: Final = frozenset({"deadline", "disabled"})


def judge(history: History) -> list[Violation]:
    """Every violation of I1 to I12; an empty list accepts the run."""
    found = [*_judge_answers(history), *_judge_keys(history), *_judge_identities(history), *_judge_drain(history)]
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
        found += _judge_row(delivery)
        found += _judge_numbers(delivery)
        found += _judge_intents(delivery, mine)
        found += _judge_claims(delivery, mine)
        found += _judge_answers_got(delivery, mine)
        found += _judge_successes(delivery, mine)
        found += _judge_rounds(delivery)
        found += _judge_sights(delivery, seen[delivery.id])
        found += _judge_held(delivery, seen[delivery.id])
        found += _judge_bytes(delivery, mine)
        found += _judge_times(delivery, mine)
    return found


def _judge_answers(history: History) -> Iterator[Violation]:
    """I1: what was accepted is there, I8: to the byte. I2: it is what was asked for. I11: it is the tenant's."""
    ledger = {delivery.id: delivery for delivery in history.deliveries}
    for asked in history.asked:
        if asked.delivery_id is None:
            if asked.status in (200, 202):
                yield Violation("I1", asked.key, f"was answered with {asked.status} and no delivery's id")
            continue
        delivery = ledger.get(asked.delivery_id)
        if delivery is None:
            yield Violation("I1", asked.delivery_id, f"was answered with {asked.status} and is not in the ledger")
            continue
        if delivery.tenant != asked.tenant:
            yield Violation("I11", delivery.id, f"was told to {asked.tenant} and is {delivery.tenant}'s")
        elif delivery.identity != asked.identity:
            yield Violation("I2", delivery.id, f"was told for {asked.identity} and is {delivery.identity}")
        if delivery.body_sha256 != asked.body_sha256:
            yield Violation("I8", delivery.id, "the ledger holds other bytes than were posted")
    for sight in history.seen:
        delivery = ledger.get(sight.delivery_id)
        if delivery is None:
            yield Violation("I1", sight.delivery_id, "was shown and is not in the ledger")
        elif delivery.tenant != sight.tenant:
            yield Violation("I11", sight.delivery_id, f"was shown to {sight.tenant} and is {delivery.tenant}'s")


def _judge_keys(history: History) -> Iterator[Violation]:
    """I12: one key, one delivery, which is new to the client once at most."""
    told: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for asked in history.asked:
        if asked.delivery_id is not None:
            told[asked.tenant, asked.key].add(asked.delivery_id)
    accepted = Counter((asked.tenant, asked.key) for asked in history.asked if asked.status == 202)
    for (_, key), count in accepted.items():
        if count > 1:
            yield Violation("I12", key, f"one key was answered {count} times as if it were new")
    for (_, key), ids in told.items():
        if len(ids) > 1:
            yield Violation("I12", key, f"one key was answered with {len(ids)} deliveries")


def _judge_identities(history: History) -> Iterator[Violation]:
    """I2: one delivery per identity, and none that nobody asked for."""
    asked = {each.identity for each in history.asked}
    identities = Counter((delivery.destination_id, delivery.event_id) for delivery in history.deliveries)
    for delivery in history.deliveries:
        if identities[delivery.destination_id, delivery.event_id] > 1:
            yield Violation("I2", delivery.id, f"is not the only delivery of {delivery.event_id}")
        if delivery.identity not in asked:
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
    for name in _GAUGES:
        if name not in history.gauges:
            yield Violation("I10", name, "was not looked at")
    for name, count in history.gauges.items():
        if count:
            yield Violation("I10", name, f"stands at {count} after everything drained")


def _judge_row(delivery: Delivery) -> Iterator[Violation]:
    """I1: it stands in a known state that its row, its attempts and its time bear out."""
    state, reason = delivery.state, delivery.dead_reason
    last = delivery.attempts[-1].outcome if delivery.attempts else None
    if state not in _STATES:
        yield Violation("I1", delivery.id, f"is {state}, which is no state")
    if state in ("pending", "delivering") and delivery.next_attempt_at > delivery.deadline_at:
        yield Violation("I1", delivery.id, "waits for an attempt after its deadline")
    if state in _TERMINAL and delivery.completed_at is None:
        yield Violation("I1", delivery.id, f"is {state} since no time")
    if state in ("pending", "delivering") and delivery.completed_at is not None:
        yield Violation("I1", delivery.id, f"is {state} and has ended")
    if state == "ambiguous" and last != "unknown":
        yield Violation("I1", delivery.id, f"is ambiguous after {last}")
    if (state == "dead") != (reason is not None):
        yield Violation("I1", delivery.id, f"is {state} for the reason {reason}")
    elif reason is not None and reason not in _OTHER_REASONS and last not in _LAST_OUTCOMES.get(reason, ()):
        yield Violation("I1", delivery.id, f"is dead as {reason} after {last}")
    ended_early = delivery.completed_at is not None and delivery.completed_at < delivery.deadline_at
    if reason == "deadline" and last is None and ended_early:
        yield Violation("I1", delivery.id, "is dead by its deadline, unattempted, before it")


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
        for outcome in (attempt.outcome, attempt.late_outcome) if attempt is not None else ():
            if outcome in _UNSENT:
                yield Violation("I3", delivery.id, f"{what} came, and the ledger says {outcome}")
        if arrival.witnessed is not None and arrival.witnessed < arrival.attempt:
            yield Violation("I3", delivery.id, f"{what} came while its claim was not committed")


def _judge_claims(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I3: a request is begun under its own claim, and attempts come one after the other.

    What an unknown attempt sent may be on the wire for longer than its claim lasts, not begun later.
    """
    by_number = {attempt.number: attempt for attempt in delivery.attempts}
    for before, attempt in itertools.pairwise(delivery.attempts):
        if attempt.started_at < before.completed_at:
            yield Violation("I3", delivery.id, f"attempt {attempt.number} was claimed while the last was under way")
    for attempt in delivery.attempts:
        if attempt.completed_at < attempt.started_at:
            yield Violation("I3", delivery.id, f"attempt {attempt.number} was completed before it was claimed")
        if attempt.started_at >= delivery.deadline_at:  # what moves a deadline moves it beyond its own moment
            yield Violation("I9", delivery.id, f"attempt {attempt.number} was claimed after the deadline")
    for arrival in arrivals:
        this, after = by_number.get(arrival.attempt), by_number.get(arrival.attempt + 1)
        what = f"the request of attempt {arrival.attempt}"
        if after is not None and arrival.timestamp > after.started_at.timestamp():
            yield Violation("I3", delivery.id, f"{what} was begun under the claim of a later one")
        if this is None or this.outcome == "unknown":
            continue
        if arrival.at > this.completed_at:
            yield Violation("I3", delivery.id, f"{what} came after it was settled as {this.outcome}")
        if arrival.witnessed is not None and arrival.witnessed > arrival.attempt:
            yield Violation("I3", delivery.id, f"{what} was unanswered while attempt {arrival.witnessed} was claimed")


def _judge_answers_got(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I5: an answer on record is the one that the receiver wrote."""
    answered: defaultdict[int, set[int | None]] = defaultdict(set)
    for arrival in arrivals:
        answered[arrival.attempt].add(arrival.answered)
    for attempt in delivery.attempts:
        responded = attempt.outcome in _RESPONDED
        what = f"attempt {attempt.number}"
        if responded != (attempt.status_code is not None):
            yield Violation("I5", delivery.id, f"{what} is {attempt.outcome} by the status {attempt.status_code}")
        if responded and attempt.status_code not in answered[attempt.number]:
            yield Violation(
                "I5", delivery.id, f"{what} is on record with {attempt.status_code}, which the receiver never gave"
            )
        if attempt.late_outcome in _RESPONDED and not answered[attempt.number] - {None}:
            yield Violation("I5", delivery.id, f"{what} is {attempt.late_outcome} by an answer that was never given")


def _judge_successes(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I5: delivered is a 2xx that the receiver wrote; such a 2xx is never recorded as a failure."""
    yes = {arrival.attempt for arrival in arrivals if arrival.answered is not None and 200 <= arrival.answered < 300}
    for attempt in delivery.attempts:
        if attempt.number in yes:
            if attempt.outcome not in ("success", "unknown"):
                yield Violation(
                    "I5", delivery.id, f"attempt {attempt.number} got a 2xx and is recorded {attempt.outcome}"
                )
            if attempt.late_outcome not in (None, "success", "unknown"):
                yield Violation(
                    "I5", delivery.id, f"attempt {attempt.number} got a 2xx and is late a {attempt.late_outcome}"
                )
        elif "success" in (attempt.outcome, attempt.late_outcome):
            yield Violation("I5", delivery.id, f"attempt {attempt.number} is a success that the receiver never gave")
    last = delivery.attempts[-1].outcome if delivery.attempts else None
    # A late success, of whichever attempt, ends the doubt about the last one.
    late = last == "unknown" and any(attempt.late_outcome == "success" for attempt in delivery.attempts)
    if delivery.state == "delivered" and last != "success" and not late:
        yield Violation("I5", delivery.id, "is delivered without an attempt that succeeded")


def _judge_rounds(delivery: Delivery) -> Iterator[Violation]:
    """I6: nothing follows a success, and after any other end an attempt takes a redrive, one each."""
    rounds_count = 0
    for before, after in itertools.pairwise((None, *delivery.attempts)):
        if after is None:
            continue
        ended = before is not None and before.is_final
        # A person may have hastened the redrive's attempt, which is then of their making.
        rounds_count += after.trigger == "redrive" or ended
        if ended and after.trigger == "schedule":
            yield Violation("I6", delivery.id, f"attempt {after.number} was made after the end, without a redrive")
        if before is not None and before.outcome == "success":
            yield Violation("I6", delivery.id, f"attempt {after.number} was made after a success")
    if rounds_count > delivery.redrive_count:
        yield Violation(
            "I6", delivery.id, f"its attempts tell of {rounds_count} redrives, and it had {delivery.redrive_count}"
        )
    if any(attempt.outcome == "success" for attempt in delivery.attempts) and delivery.state != "delivered":
        yield Violation("I6", delivery.id, f"succeeded, and is {delivery.state}")


def _judge_sights(delivery: Delivery, seen: list[Seen]) -> Iterator[Violation]:
    """I6: what was seen to have ended stays so, redrive aside."""
    sights = [(sight.state, sight.redrive_count) for sight in seen]
    sights.append((delivery.state, delivery.redrive_count))
    for (state, redrives), (later, later_redrives) in itertools.pairwise(sights):
        absorbed = state in ("delivered", "cancelled") or (state == "dead" and redrives == later_redrives)
        discarded = (state, later) == ("dead", "cancelled")
        if absorbed and later != state and not discarded:
            yield Violation("I6", delivery.id, f"was seen {state} and then {later}")
        if later_redrives < redrives:
            yield Violation("I6", delivery.id, f"was seen redriven {redrives} times and then {later_redrives}")
    for state in {sight.state for sight in seen} - _STATES:
        yield Violation("I1", delivery.id, f"was seen {state}, which is no state")


def _judge_held(delivery: Delivery, seen: list[Seen]) -> Iterator[Violation]:
    """I6: what was seen ambiguous went on by a person's word, or by a late success.

    Which attempt was in doubt is not seen; it is one that no scheduled attempt followed.
    """
    if all(sight.state != "ambiguous" for sight in seen):
        return
    for number, attempt in enumerate(delivery.attempts, start=1):
        if attempt.outcome != "unknown":
            continue
        if number < len(delivery.attempts):
            went_on = delivery.attempts[number].trigger != "schedule"
        else:
            resent = delivery.next_trigger != "schedule" or delivery.dead_reason == "given_up"
            # Given up and then discarded, it bears no trace; that it is rightly delivered, I5 says.
            went_on = resent or delivery.state in ("ambiguous", "delivered", "cancelled")
        if went_on:
            return
    yield Violation("I6", delivery.id, f"was seen ambiguous, and is {delivery.state} by nobody's word")


def _judge_bytes(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I8: the same bytes each time, under a fresh timestamp and a signature that holds."""
    claimed_at = {attempt.number: attempt.started_at for attempt in delivery.attempts}
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
        # The header has whole seconds.
        if arrival.attempt in claimed_at and arrival.timestamp < math.floor(claimed_at[arrival.attempt].timestamp()):
            yield Violation("I8", delivery.id, f"{what} is dated before its claim")


def _judge_times(delivery: Delivery, arrivals: list[Arrival]) -> Iterator[Violation]:
    """I9: no attempt before its time, however the time was set; nothing after the end. I1: nor far beyond it."""
    yield from _judge_delays(delivery)
    by_number = {attempt.number: attempt for attempt in delivery.attempts}
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
    last = delivery.attempts[-1] if delivery.attempts else None
    if last is None or delivery.state != "pending" or delivery.next_trigger != "schedule" or not delivery.base_seconds:
        return
    asked_seconds = max((each.retry_after_seconds for each in arrivals if each.attempt == last.number), default=0.0)
    most_seconds = max(delivery.cap_seconds, OWN_FAULT_SECONDS if last.outcome == "not_sent" else asked_seconds * 1.1)
    waits_seconds = (delivery.next_attempt_at - last.completed_at).total_seconds()
    if waits_seconds > most_seconds + 0.001:
        yield Violation("I1", delivery.id, f"is to wait for {waits_seconds:g} s, and {most_seconds:g} s is the most")


def _judge_delays(delivery: Delivery) -> Iterator[Violation]:
    """I9: no claim before it was due, and none before the least of its delay was over."""
    round_began = max((each.number for each in delivery.attempts if each.trigger == "redrive"), default=1)
    # Attempts that were released unsent are free, and due when they say; which ones, the ledger does not tell.
    none_released = delivery.uncharged_count == round_began - 1
    charged = 0  # attempts that the schedule counts, at least: a redrive begins anew
    for before, attempt in itertools.pairwise((None, *delivery.attempts)):
        if attempt is None:
            continue
        if attempt.started_at < attempt.scheduled_at:
            yield Violation("I9", delivery.id, f"attempt {attempt.number} was claimed before it was due")
        if attempt.trigger == "redrive":
            charged = 0
        free = before is None or (before.outcome == "not_sent" and not (none_released and before.number >= round_began))
        # A redrive and an operator set their own time.
        if before is not None and not free and attempt.trigger == "schedule":
            least_seconds = min(delivery.cap_seconds, delivery.base_seconds * 2.0 ** (charged - 1)) / 2
            waited_seconds = (attempt.started_at - before.completed_at).total_seconds()
            if waited_seconds < least_seconds:
                yield Violation(
                    "I9", delivery.id, f"attempt {attempt.number} came {waited_seconds:.3f} s after the last"
                )
        charged += attempt.outcome != "not_sent" or (none_released and attempt.number >= round_began)
