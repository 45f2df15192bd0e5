"""A whole system in one thread and no time: clients, workers, dispatchers, operators and faults on the model ledger.

The rule: everything that happens is drawn from one seed, so a run that was rejected can be run again
(`python -m tests.model SEED`). The actors do between two statements what the stories in service/ do; what
they await there, they yield here (frame.py).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from service.accept import Accepted
from service.domain import limits
from service.domain.delivery import Bury, DeadReason, State
from service.domain.outcome import Exchange
from service.errors import LedgerUnavailable
from service.ledger.operating import Done
from tests.faults.records import Violation
from tests.model.frame import Frame, Process, Steps
from tests.model.ledger import ModelLedger
from tests.model.receivers import BROKEN, SILENT, UNSENT, answered, destinations
from tests.model.recording import Recorder, request
from tests.model.rows import STALE_SECONDS, T0, VISIBILITY_SECONDS, Claim, Statements
from tests.model.stories import UNSENT_PAUSED, UNSENT_STOPPED, settlement_of, settlement_of_lost

FAULTS_MS: Final = 20_000  # then everything works again
DRAINED_WITHIN_MS: Final = 90_000  # after that; a pause, a lease, a released claim and a retry fit well

_BEAT_MS: Final = 3_000
_SETTLE_PAUSE_MS: Final = 250
_NEVER_STALE_SECONDS: Final = 86_400.0
_RETRY_AFTER_SECONDS: Final = 3
_OPEN: Final = (State.PENDING, State.DELIVERING)
_BODIES: Final = (b'{"n":1.0}', b'{"n":2.0}')
_POISON: Final = b'{"n":NaN}'  # ends the worker that takes it


class Simulation(Frame):
    """One run, on the model or a variant of it; in a `crowd`, so many times as much happens at once."""

    def __init__(
        self,
        seed: int,
        ledger: ModelLedger | None = None,
        *,
        crowd: int = 1,
        told: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(seed, ledger or ModelLedger(T0, destinations()), told)
        self.recorder = Recorder()
        self._crowd = crowd
        self._poison_event = self._dice.choice((None, None, None, None, 0, 1))
        self._workers: list[Process] = []
        self._dispatchers: list[Process] = []
        self._clients_waiting = 0
        self._hints_waiting = 0
        self._epoch = 0
        self._epoch_lost = False

    def run(self) -> list[Violation]:
        """From the first request to the drained end; answers what the history checker rejects."""
        self._begin()
        self._go_on()
        return self._judge()

    def _begin(self) -> None:
        dice = self._dice
        for _ in range(dice.randint(1, 3)):
            self._start_worker()
        for _ in range(dice.choice((1, 1, 1, 2))):
            self._start_dispatcher()
        for number in range(self._crowd * dice.randint(2, 4)):
            self._spawn(self._network, self._client(number), self._wait(0, 10_000))
        for _ in range(self._crowd * dice.randint(1, 4)):
            self._spawn(self._network, self._operator(), self._wait(3_000, FAULTS_MS))
        for _ in range(self._crowd * dice.randint(1, 5)):
            self._spawn(self._network, self._nemesis(), self._wait(500, FAULTS_MS))
        self._spawn(self._network, self._reader())
        self._spawn(self._network, self._peaceful_end(), FAULTS_MS)

    def _peaceful_end(self) -> Steps[None]:
        """Faults are over; wait until all is done, or the time for it is over too."""
        self._tell("faults are over")
        self._peace = True
        self._start_worker()
        while not self._is_drained() and self._now_ms < FAULTS_MS + DRAINED_WITHIN_MS:
            # Again and again: a statement that is still on its way may be a pause.
            self._do(lambda ledger: [ledger.resume(each) for each in self.model.destinations])
            yield 1_000
        self._over = True

    def _is_drained(self) -> bool:
        busy = self._clients_waiting or self._hints_waiting or any(each.alive and each.holds for each in self._workers)
        return not busy and not any(row.state in _OPEN for row in self.model.deliveries.values())

    def _judge(self) -> list[Violation]:
        self.recorder.look(self.model)
        gauges = {
            "hints": self._hints_waiting,
            "clients": self._clients_waiting,
            "in_flight": sum(len(each.holds) for each in self._workers if each.alive),
            "leases": sum(row.lease_until is not None for row in self.model.deliveries.values()),
            "open": sum(row.state in _OPEN for row in self.model.deliveries.values()),
        }
        return self.recorder.judge(self.model, gauges=gauges, drained=True)

    # The queue and the receiver

    def _hint(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Put a hint into the queue, which loses one in ten, and repeats one in ten."""
        roll = 0.5 if self._peace else self._dice.random()
        for _ in range(0 if roll < 0.1 else 2 if roll > 0.9 else 1):
            self._hints_waiting += 1
            slow = self._dice.random() < 0.2
            self._spawn(self._network, self._carry(delivery_ids, self._epoch), self._wait(0, 2_500 if slow else 20))

    def _carry(self, delivery_ids: Sequence[uuid.UUID], epoch: int) -> Steps[None]:
        self._hints_waiting -= 1
        alive = [worker for worker in self._workers if worker.alive and not worker.stopping]
        if epoch == self._epoch and alive:
            worker = self._dice.choice(alive)
            self._spawn(worker, self._deliver(worker, delivery_ids))
        yield from ()

    def _exchange(self, claim: Claim) -> Steps[Exchange]:
        """One request: what the receiver does with it, and what the sender sees of that."""
        roll = 0.0 if self._peace else self._dice.random()
        if roll < 0.35:
            return (yield from self._answer(claim, 200))
        if roll < 0.50:
            return (yield from self._answer(claim, 503))
        if roll < 0.55:
            return (yield from self._answer(claim, 429, str(_RETRY_AFTER_SECONDS)))
        if roll < 0.62:
            return (yield from self._answer(claim, 404))
        if roll < 0.63:
            return (yield from self._answer(claim, 410))
        if roll < 0.70:
            yield self._wait(0, 50)
            return UNSENT
        if roll < 0.80:  # the answer was written, and lost on its way
            self._arrive(claim, 200)
            yield self._wait(0, 1_000)
            return BROKEN
        self._arrive(claim, None)
        if roll < 0.90:
            yield self._wait(0, 1_000)
            return BROKEN
        yield int(claim.timeout_seconds * 1_000)
        return SILENT

    def _answer(self, claim: Claim, status_code: int, retry_after: str | None = None) -> Steps[Exchange]:
        self._arrive(claim, status_code, float(retry_after or 0))
        yield self._wait(1, 1_500)
        return answered(status_code, retry_after)

    def _arrive(self, claim: Claim, status_code: int | None, retry_after_seconds: float = 0.0) -> None:
        self._tell(f"the receiver sees {_name(claim.delivery_id)} attempt {claim.budget.number}, answers {status_code}")
        self.recorder.arrival(self.model, claim, status_code, retry_after_seconds)

    # Clients and operators

    def _client(self, number: int) -> Steps[None]:
        """Post until an answer comes: a new event, or somebody else's, in the same words or in others."""
        dice = self._dice
        event = number if dice.random() < 0.7 else dice.randrange(number + 1)
        destination_id = uuid.UUID(int=1 + event % 2)
        key = f"key-{event}" if dice.random() < 0.8 else f"key-{event}-{number}"
        body = _POISON if event == self._poison_event else _BODIES[dice.random() < 0.1]
        delay_seconds = 5.0 if dice.random() < 0.1 else None
        deadline_seconds = 8.0 if dice.random() < 0.1 else None
        self._clients_waiting += 1
        while True:
            new = request(
                self._new_id(),
                destination_id,
                f"evt-{event}",
                key=key,
                body=body,
                delay_seconds=delay_seconds,
                deadline_seconds=deadline_seconds,
            )
            try:
                answer = yield from self._call(lambda ledger, new=new: ledger.accept(new))  # type: ignore[misc]
            except LedgerUnavailable:
                answer = None
            if isinstance(answer, Accepted) and answer.row.hintable and dice.random() < 0.9:
                self._hint([new.id])
            if answer is not None and not self._peace and dice.random() < 0.1:
                answer = None  # the API died before it answered
            self.recorder.answer(new, answer)
            self._tell(f"POST {key} {new.event_id}: {type(answer).__name__} {_name(new.id)}")
            if answer is not None:
                break
            yield self._wait(100, 2_000)
        self._clients_waiting -= 1

    def _operator(self) -> Steps[None]:
        """One deed, on a delivery in whatever state it is by then."""
        dice = self._dice
        # Seldom one that has arrived: there is nothing to do about it.
        rows = [
            row for row in self.model.deliveries.values() if row.state is not State.DELIVERED or dice.random() < 0.2
        ]
        if not rows:
            return
        row = dice.choice(rows)
        roll = dice.random()
        try:
            if roll < 0.15:
                yield from self._pause_for_a_while(row.destination_id)
            elif row.state is State.AMBIGUOUS:
                yield from self._resolve(row.id)
            elif row.state is State.DEAD and roll < 0.85:
                redrive_id = self._new_id()
                yield from self._call(lambda ledger: ledger.start_redrive(redrive_id, list(self.model.deliveries)))
            elif row.state is State.DEAD:
                yield from self._call(lambda ledger: ledger.discard([row.id]))
            elif roll < 0.5:
                yield from self._call(lambda ledger: ledger.retry(row.id))
            else:
                yield from self._call(lambda ledger: ledger.cancel(row.id))
            self._tell(f"an operator saw {_name(row.id)} and acted; it is {row.state}")
        except LedgerUnavailable:
            return

    def _resolve(self, delivery_id: uuid.UUID) -> Steps[None]:
        """By the receiver's log, if it has the delivery; else send it again, or let it be."""
        if self.recorder.has_yes(delivery_id):
            yield from self._call(lambda ledger: self._confirm(ledger, delivery_id))
        elif self._dice.random() < 0.7:
            yield from self._call(lambda ledger: ledger.resend(delivery_id))
        else:
            yield from self._call(lambda ledger: ledger.give_up(delivery_id))

    def _confirm(self, ledger: Statements, delivery_id: uuid.UUID) -> None:
        if ledger.confirm(delivery_id) == Done():
            self.recorder.confirmed.add(delivery_id)

    def _pause_for_a_while(self, destination_id: uuid.UUID) -> Steps[None]:
        yield from self._call(lambda ledger: ledger.pause(destination_id))
        yield self._wait(500, 10_000)
        yield from self._call(lambda ledger: ledger.resume(destination_id))

    def _reader(self) -> Steps[None]:
        """Who looks now and then how things stand."""
        while True:
            yield 3_000
            self.recorder.look(self.model)

    # Workers, as in the story of delivering

    def _start_worker(self) -> None:
        worker = Process(f"worker-{len(self._workers) + 1}")
        self._workers.append(worker)
        self._spawn(worker, self._beat(worker))

    def _beat(self, worker: Process) -> Steps[None]:
        while not worker.stopping:
            with contextlib.suppress(LedgerUnavailable):
                yield from self._call(lambda ledger: ledger.beat(worker.name))
            yield _BEAT_MS

    def _deliver(self, worker: Process, delivery_ids: Sequence[uuid.UUID]) -> Steps[None]:
        asked_at_ms = self._now_ms
        try:
            claims = yield from self._call(lambda ledger: ledger.claim(delivery_ids, worker.name))
        except LedgerUnavailable:
            return
        for claim in claims:
            self._tell(f"{worker.name} claims {_name(claim.delivery_id)} attempt {claim.budget.number}")
            worker.holds.append(claim.delivery_id)
            self._wake_zombies(claim.delivery_id)
            self._spawn(worker, self._attempt(worker, claim, asked_at_ms))

    def _attempt(self, worker: Process, claim: Claim, asked_at_ms: int) -> Steps[None]:
        yield from self._crash_point(worker)
        if claim.body == _POISON:
            self._hurt(worker, 1.0)
            yield 1
        exchange = yield from self._send(worker, claim, asked_at_ms)
        settlement = settlement_of(
            claim,
            exchange,
            worker=worker.name,
            now=claim.claimed_at + timedelta(milliseconds=self._now_ms - asked_at_ms),
            jitter=self._jitter(),
        )
        yield from self._crash_point(worker)
        until_ms = asked_at_ms + int(claim.lease_seconds * 1_000)
        moved = yield from self._until(until_ms, lambda ledger: bool(ledger.settle([settlement])))
        if moved is False:
            yield from self._until(until_ms, lambda ledger: ledger.settle_late(settlement))
        elif moved and settlement.decision == Bury(DeadReason.GONE):
            yield from self._until(self._now_ms, lambda ledger: ledger.disable(claim.destination_id))
        worker.holds.remove(claim.delivery_id)
        self._tell(
            f"{worker.name} settles {_name(claim.delivery_id)} attempt {claim.budget.number}"
            f" as {settlement.outcome}, moved: {moved}"
        )

    def _send(self, worker: Process, claim: Claim, asked_at_ms: int) -> Steps[Exchange]:
        if worker.stopping:
            return UNSENT_STOPPED
        if self._now_ms - asked_at_ms > limits.CLAIM_YOUNG_SECONDS * 1_000:
            return UNSENT_PAUSED
        return (yield from self._exchange(claim))

    def _crash_point(self, worker: Process) -> Steps[None]:
        """Between two steps of an attempt, where a fault does most."""
        roll = self._dice.random()
        if roll < 0.03 and not self._peace:
            self._hurt(worker, self._dice.random())
        yield self._wait(1, 20)

    def _until(self, until_ms: int, operation: Callable[[Statements], bool]) -> Steps[bool | None]:
        while True:
            try:
                return (yield from self._call(operation))
            except LedgerUnavailable:
                if self._now_ms > until_ms:
                    return None
            yield _SETTLE_PAUSE_MS

    # Dispatchers, as in the story of dispatching

    def _start_dispatcher(self) -> None:
        dispatcher = Process(f"dispatcher-{len(self._dispatchers) + 1}")
        self._dispatchers.append(dispatcher)
        self._spawn(dispatcher, self._dispatch())

    def _dispatch(self) -> Steps[None]:
        back_at_ms = -int(STALE_SECONDS * 1_000)
        was_up = True
        while True:
            yield self._wait(400, 2_000)
            away = not was_up or self._now_ms - back_at_ms < STALE_SECONDS * 1_000
            try:
                yield from self._pass(_NEVER_STALE_SECONDS if away else STALE_SECONDS)
            except LedgerUnavailable:
                was_up = False
                continue
            if not was_up:
                was_up, back_at_ms = True, self._now_ms

    def _pass(self, stale_seconds: float) -> Steps[None]:
        if self._epoch_lost:
            yield from self._call(lambda ledger: ledger.wake_hinted())
            self._epoch_lost = False
        due = yield from self._call(lambda ledger: ledger.take_due(VISIBILITY_SECONDS))
        if due.to_park:
            yield from self._call(lambda ledger: ledger.park(due.to_park))
        if due.to_hint:
            self._hint(due.to_hint)
        lost = yield from self._call(lambda ledger: ledger.find_lost(stale_seconds))
        if lost:
            batch = [settlement_of_lost(each, now=self.model.now, jitter=self._jitter()) for each in lost]
            moved = yield from self._call(lambda ledger: ledger.settle(batch))
            self._tell(f"a dispatcher rescues {[_name(each) for each in moved]}")
        if any(each.gated for each in self.model.destinations.values()):
            yield from self._call(lambda ledger: ledger.admit())
        if self.model.redrives:
            yield from self._call(lambda ledger: ledger.redrive(100))

    # Faults

    def _nemesis(self) -> Steps[None]:
        """One fault: a process is killed, stopped or paused, or the queue loses all it holds."""
        dice = self._dice
        roll = dice.random()
        if roll < 0.2:
            self._tell("the queue is emptied")
            self._epoch += 1
            self._epoch_lost = True
        elif roll < 0.4:
            victim = dice.choice(self._dispatchers)
            self._kill(victim)
            self._start_dispatcher()
        else:
            self._hurt(dice.choice(self._workers), dice.random())
        yield from ()

    def _hurt(self, worker: Process, roll: float) -> None:
        """Pause a worker, tell it to stop, or kill it; another one is started before long."""
        if roll < 0.5:
            self._pause(worker, 1_000, 40_000)
        elif roll < 0.7:
            self._tell(f"{worker.name} is told to stop")
            worker.stopping = True
        else:
            self._kill(worker)
        self._spawn(self._network, self._replace(), self._wait(100, 3_000))

    def _wake_zombies(self, delivery_id: uuid.UUID) -> None:
        """Let who is paused with this very delivery go on when it is most unwelcome."""
        for worker in self._workers:
            if worker.paused and delivery_id in worker.holds and self._dice.random() < 0.7:
                self._spawn(self._network, self._wake(worker), self._wait(0, 1_000))

    def _replace(self) -> Steps[None]:
        self._start_worker()
        yield from ()


def _name(delivery_id: uuid.UUID) -> str:
    return delivery_id.hex[-4:]
