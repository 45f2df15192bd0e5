"""The rules of the ledger's life, for Hypothesis: anything may happen to it, in any order.

The rule: what a rule does, it does through `_do`, so that a machine which runs the product beside the
model overrides one method. After every step the history checker judges the run so far, and the rows
keep what the database's CHECKs ask.
"""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar, assert_never

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.accept import Accepted
from service.domain import limits
from service.domain.delivery import Bury, DeadReason, State
from service.domain.ids import uuid7
from service.domain.outcome import Exchange, Phase
from service.ledger.accepting import NewDelivery
from service.ledger.attempting import Settlement
from service.ledger.operating import Done
from tests.model.core import after
from tests.model.ledger import ModelLedger
from tests.model.receivers import EXCHANGES, destinations
from tests.model.recording import Recorder, request
from tests.model.rows import STALE_SECONDS, T0, VISIBILITY_SECONDS, Claim, Delivery, Statements
from tests.model.stories import UNSENT_PAUSED, UNSENT_STOPPED, settlement_of, settlement_of_lost

Answered = TypeVar("Answered")

WORKERS: Final = ("w1", "w2", "w3")
DESTINATIONS_COUNT: Final = 2
BODIES: Final = (b'{"n":1.0}', b'{"n":2.0}')

# Whole and half seconds, so that Postgres and Python round nothing differently.
JITTERS: Final = st.sampled_from((0.0, 0.25, 0.5))
PICKS: Final = st.integers(0, 9)


class Deed(StrEnum):
    """What a person does to a delivery."""

    CANCEL = "cancel"
    RETRY = "retry"
    CONFIRM = "confirm"
    RESEND = "resend"
    GIVE_UP = "give_up"
    DISCARD = "discard"


DEEDS: Final = tuple(Deed)


@dataclass(slots=True)
class Flight:
    """An attempt in a worker's hands; `settlement` is None until its end is known to the worker."""

    claim: Claim
    worker: str
    settlement: Settlement | None = None


class LedgerMachine(RuleBasedStateMachine):
    """The model, with its clients, workers, dispatchers, operators and faults."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ModelLedger(T0, destinations())
        self.recorder = Recorder()
        self.requests: list[NewDelivery] = []
        self.ids: list[uuid.UUID] = []
        self.flights: list[Flight] = []
        self.hints: list[uuid.UUID] = []
        self.to_park: list[uuid.UUID] = []
        self._numbers = itertools.count(1)

    def _do(self, operation: Callable[[Statements], Answered]) -> Answered:
        """Do it to the model."""
        return operation(self.model)

    # clients

    @initialize()
    def begin(self) -> None:
        for pick in range(2 * DESTINATIONS_COUNT):
            self.submit(pick, None)

    @rule(pick=PICKS, delay=st.sampled_from((None, None, 30.0, 300.0)))
    def submit(self, pick: int, delay: float | None) -> None:
        number = next(self._numbers)
        destination_id = uuid.UUID(int=1 + pick % DESTINATIONS_COUNT)
        self._accept(
            request(
                self._new_id(),
                destination_id,
                f"evt-{number}",
                key=f"key-{number}",
                body=BODIES[0],
                delay_seconds=delay,
            )
        )

    @precondition(lambda self: self.requests)
    @rule(pick=PICKS, other_key=st.booleans(), other_body=st.booleans())
    def resubmit(self, pick: int, other_key: bool, other_body: bool) -> None:
        first = _pick(self.requests, pick)
        self._accept(
            request(
                self._new_id(),
                first.destination_id,
                first.event_id,
                key=f"key-{next(self._numbers)}" if other_key else first.key,
                body=BODIES[1] if other_body else first.body,
            )
        )

    def _accept(self, new: NewDelivery) -> None:
        answer = self._do(lambda ledger: ledger.accept(new))
        self.recorder.answer(new, answer)
        self.requests.append(new)
        if isinstance(answer, Accepted):
            self.ids.append(new.id)
            self.hints += [new.id] * answer.row.hintable

    # workers

    @precondition(lambda self: self.ids)
    @rule(picks=st.lists(PICKS, min_size=1, max_size=3), worker=st.sampled_from(WORKERS))
    def claim(self, picks: list[int], worker: str) -> None:
        """By any hint: a fresh one, a repeated one, one of long ago."""
        self._claim([_pick(self.ids, pick) for pick in picks], worker)

    @precondition(lambda self: self.hints)
    @rule(worker=st.sampled_from(WORKERS))
    def claim_what_is_hinted(self, worker: str) -> None:
        taken, self.hints = self.hints, []
        self._claim(taken, worker)

    def _claim(self, delivery_ids: list[uuid.UUID], worker: str) -> None:
        claims = self._do(lambda ledger: ledger.claim(delivery_ids, worker))
        self.flights += [Flight(claim, worker) for claim in claims]

    @precondition(lambda self: self._waiting())
    @rule(pick=PICKS, worker=st.sampled_from(WORKERS), exchange=st.sampled_from(EXCHANGES), jitter=JITTERS)
    def attempt(self, pick: int, worker: str, exchange: Exchange, jitter: float) -> None:
        """One attempt as most of them are: when it is due, and nothing comes in between."""
        delivery = _pick(self._waiting(), pick)
        self._wait_until(delivery.next_attempt_at)
        before = len(self.flights)
        self._claim([delivery.id], worker)
        for flight in self.flights[before:]:
            self._send(flight, exchange, jitter)
            self._settle(flight)

    @precondition(lambda self: self._waiting())
    @rule(pick=PICKS, worker=st.sampled_from(WORKERS))
    def claim_when_due(self, pick: int, worker: str) -> None:
        delivery = _pick(self._waiting(), pick)
        self._wait_until(delivery.next_attempt_at)
        self._claim([delivery.id], worker)

    @precondition(lambda self: self._open_flights())
    @rule(pick=PICKS, exchange=st.sampled_from(EXCHANGES), jitter=JITTERS)
    def send(self, pick: int, exchange: Exchange, jitter: float) -> None:
        """The request, and what the worker will know of it; a worker that was paused sends nothing."""
        self._send(_pick(self._open_flights(), pick), exchange, jitter)

    def _send(self, flight: Flight, exchange: Exchange, jitter: float) -> None:
        claim = flight.claim
        age_seconds = (self.model.now - claim.claimed_at).total_seconds()
        if age_seconds > limits.CLAIM_YOUNG_SECONDS:
            exchange = UNSENT_PAUSED
        elif exchange.phase is not Phase.NOT_SENT:
            self.recorder.arrival(self.model, claim, exchange.status_code, float(exchange.retry_after or 0))
        self._learn(flight, exchange, jitter)

    @precondition(lambda self: self._open_flights())
    @rule(pick=PICKS, jitter=JITTERS)
    def stop_before_sending(self, pick: int, jitter: float) -> None:
        self._learn(_pick(self._open_flights(), pick), UNSENT_STOPPED, jitter)

    def _learn(self, flight: Flight, exchange: Exchange, jitter: float) -> None:
        flight.settlement = settlement_of(
            flight.claim, exchange, worker=flight.worker, now=self.model.now, jitter=jitter
        )

    @precondition(lambda self: self._known_flights())
    @rule(pick=PICKS)
    def settle(self, pick: int) -> None:
        """In time, as a zombie, or once more because the answer to the first time was lost."""
        self._settle(_pick(self._known_flights(), pick))

    def _settle(self, flight: Flight) -> None:
        settlement = flight.settlement
        assert settlement is not None, "only what is known is settled"
        moved = self._do(lambda ledger: ledger.settle([settlement]))
        if not moved:
            self._do(lambda ledger: ledger.settle_late(settlement))
        elif settlement.decision == Bury(DeadReason.GONE):
            self._do(lambda ledger: ledger.disable(flight.claim.destination_id))

    @rule(worker=st.sampled_from(WORKERS))
    def crash(self, worker: str) -> None:
        self.flights = [flight for flight in self.flights if flight.worker != worker]

    def _open_flights(self) -> list[Flight]:
        return [flight for flight in self.flights if flight.settlement is None]

    def _known_flights(self) -> list[Flight]:
        return [flight for flight in self.flights if flight.settlement is not None]

    def _waiting(self) -> list[Delivery]:
        return self._in(State.PENDING)

    def _in(self, state: State) -> list[Delivery]:
        return [row for row in self.model.deliveries.values() if row.state is state]

    @precondition(lambda self: self._open_flights())
    @rule(jitter=JITTERS, seconds=st.sampled_from((11.0, 40.0)))
    def outlive_a_claim(self, jitter: float, seconds: float) -> None:
        """Every worker is paused beyond its heartbeat or its lease; a dispatcher runs; they go on."""
        self.let_pass(seconds)
        self.rescue(jitter, twice=False)

    @precondition(lambda self: self._known_flights())
    @rule(jitter=JITTERS, pick=PICKS)
    def settle_too_late(self, jitter: float, pick: int) -> None:
        """Paused after the answer came, and before it was settled."""
        flight = _pick(self._known_flights(), pick)
        self.let_pass(40.0)
        self.rescue(jitter, twice=False)
        self._settle(flight)

    # time, Redis

    @rule(seconds=st.sampled_from((0.5, 2.0, 6.0, 11.0, 30.0, 90.0)))
    def let_pass(self, seconds: float) -> None:
        """To the end of a delay, of a claim's youth, of a heartbeat, of a lease, of a deadline."""
        self._do(lambda ledger: ledger.let_pass(seconds))

    def _wait_until(self, at: dt.datetime) -> None:
        if at > self.model.now:
            self.let_pass((at - self.model.now).total_seconds())

    def lose_redis(self) -> None:
        self.hints = []
        self._do(lambda ledger: ledger.wake_hinted())

    # dispatchers

    @rule()
    def dispatch(self) -> None:
        """One whole pass."""
        self.take_due()
        self.park()
        self.rescue(jitter=0.0, twice=False)
        self.admit()
        self.redrive()

    @rule(
        step=st.sampled_from(("lose_redis", "take_due", "sort_out", "park", "admit", "redrive_one", "redrive")),
        worker=st.sampled_from(WORKERS),
    )
    def keep_house(self, step: str, worker: str) -> None:
        """One step of a pass alone, so that anything may come in between; and a heartbeat."""
        self._do(lambda ledger: ledger.beat(worker))
        getattr(self, step)()

    def take_due(self) -> None:
        due = self._do(lambda ledger: ledger.take_due(VISIBILITY_SECONDS))
        self.hints += due.to_hint
        self.to_park += due.to_park

    def sort_out(self) -> None:
        self.to_park += self._do(lambda ledger: ledger.take_unsendable()).to_park

    def park(self) -> None:
        taken, self.to_park = self.to_park, []
        self._do(lambda ledger: ledger.park(taken))

    @rule(jitter=JITTERS, twice=st.booleans())
    def rescue(self, jitter: float, twice: bool) -> None:
        """By one dispatcher, or by two that found the same."""
        lost = self._do(lambda ledger: ledger.find_lost(STALE_SECONDS))
        batch = [settlement_of_lost(each, now=self.model.now, jitter=jitter) for each in lost]
        for _ in range(1 + twice):
            self._do(lambda ledger: ledger.settle(batch))

    def admit(self) -> None:
        self._do(lambda ledger: ledger.admit())

    def redrive(self) -> None:
        self._do(lambda ledger: ledger.redrive(100))

    def redrive_one(self) -> None:
        self._do(lambda ledger: ledger.redrive(1))

    # operators

    @precondition(lambda self: self.ids)
    @rule(pick=PICKS, deed=st.sampled_from(DEEDS))
    def operate(self, pick: int, deed: Deed) -> None:
        """On a delivery in whatever state: most are refused."""
        self._operate(_pick(self.ids, pick), deed)

    @precondition(lambda self: self._in(State.AMBIGUOUS))
    @rule(pick=PICKS, deed=st.sampled_from((Deed.CONFIRM, Deed.RESEND, Deed.GIVE_UP)))
    def resolve(self, pick: int, deed: Deed) -> None:
        self._operate(_pick(self._in(State.AMBIGUOUS), pick).id, deed)

    def _operate(self, delivery_id: uuid.UUID, deed: Deed) -> None:
        match deed:
            case Deed.CANCEL:
                self._do(lambda ledger: ledger.cancel(delivery_id))
            case Deed.RETRY:
                self._do(lambda ledger: ledger.retry(delivery_id))
            case Deed.CONFIRM:
                if self._do(lambda ledger: ledger.confirm(delivery_id)) == Done():
                    self.recorder.confirmed.add(delivery_id)
            case Deed.RESEND:
                self._do(lambda ledger: ledger.resend(delivery_id))
            case Deed.GIVE_UP:
                self._do(lambda ledger: ledger.give_up(delivery_id))
            case Deed.DISCARD:
                self._do(lambda ledger: ledger.discard([delivery_id]))
            case _:
                assert_never(deed)

    @precondition(lambda self: self._in(State.DEAD))
    @rule()
    def redrive_all(self) -> None:
        redrive_id = self._new_id()
        self._do(lambda ledger: ledger.start_redrive(redrive_id, self.ids))

    @rule(pick=PICKS, move=st.sampled_from(("pause", "pause", "resume", "enable", "disable")))
    def change_destination(self, pick: int, move: str) -> None:
        destination_id = uuid.UUID(int=1 + pick % DESTINATIONS_COUNT)
        self._do(lambda ledger: getattr(ledger, move)(destination_id))

    @invariant()
    def the_history_checker_accepts_the_run(self) -> None:
        self.recorder.look(self.model)
        found = self.recorder.judge(self.model, gauges={}, drained=False)
        assert [each for each in found if each.invariant != "I1" or not self._is_about_to_expire(each.subject)] == []

    def _is_about_to_expire(self, subject: str) -> bool:
        """It waits beyond its deadline, after a retry by hand or an outcome written late, and ends when it wakes."""
        row = self.model.deliveries.get(uuid.UUID(subject))
        return row is not None and row.wake_at is not None and row.wake_at <= self.model.now + after(30.0)

    @invariant()
    def the_rows_keep_the_checks_of_the_database(self) -> None:
        for row in self.model.deliveries.values():
            assert (row.state is State.PENDING) == (row.wake_at is not None)
            assert (row.state is State.DELIVERING) == (row.lease_until is not None)
            assert (row.state is State.DEAD) == (row.dead_reason is not None)
            ended = row.state in (State.DELIVERED, State.DEAD, State.CANCELLED)
            assert ended == (row.completed_at is not None)

    def _new_id(self) -> uuid.UUID:
        return uuid7(int(T0.timestamp() * 1000), next(self._numbers))


Item = TypeVar("Item")


def _pick(items: list[Item], pick: int) -> Item:
    return items[pick % len(items)]
