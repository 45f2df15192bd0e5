"""The names of log events, each written in one place. An event has one name and one meaning."""

from __future__ import annotations

from typing import Final

ATTEMPT_SETTLED: Final = "attempt.settled"
ATTEMPT_FENCED: Final = "attempt.fenced"  # a zombie's settlement changed nothing
ATTEMPT_UNSENT: Final = "attempt.unsent"  # the claim was no longer young when the first byte was due
ATTEMPT_NOT_SETTLED: Final = "attempt.not_settled"  # the ledger stayed away until the lease ended
SETTLE_RETRIED: Final = "settle.retried"
SECRET_UNREADABLE: Final = "secret.unreadable"  # noqa: S105 — the name of an event
DELIVERY_DUPLICATE: Final = "delivery.duplicate"
DELIVERY_EXPIRED: Final = "delivery.expired"
DESTINATION_DISABLED: Final = "destination.disabled"
CLAIM_FAILED: Final = "claim.failed"
HEARTBEAT_MISSED: Final = "heartbeat.missed"
LEDGER_DOWN: Final = "ledger.down"
LEDGER_BACK: Final = "ledger.back"
DISPATCH_HINTED: Final = "dispatch.hinted"
RESCUE_REFUSED: Final = "claim.rescue_refused"
CLAIM_REFUSED: Final = "claim.refused"
STEP_REFUSED: Final = "dispatch.step_refused"
CLAIM_RESCUED: Final = "claim.rescued"
BROKER_LOST: Final = "broker.lost"  # Redis lost its contents: everything due is hinted again
QUEUE_DOWN: Final = "queue.down"
QUEUE_BACK: Final = "queue.back"
QUEUE_EVICTS: Final = "queue.evicts"  # Redis may drop hints under memory pressure; set noeviction
REDRIVE_STEPPED: Final = "redrive.stepped"
PARTITIONS_MADE: Final = "partitions.made"
PARTITIONS_REFUSED: Final = "partitions.refused"  # the role may not create tables
TALLIES_REFUSED: Final = "tallies.refused"  # counts were dropped: a right is missing, or a bug
REQUEST_FAILED: Final = "request.failed"
STARTED: Final = "process.started"
STOPPING: Final = "process.stopping"
STOPPED: Final = "process.stopped"
