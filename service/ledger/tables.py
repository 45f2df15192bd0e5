"""The ledger's tables. Hot rows are small; what never changes is written once, elsewhere.

* A delivery's uniqueness lives in two small tables (`delivery_identities`, `idempotency_keys`), so
  that the big ones can be partitioned by the time in their UUIDv7 id.
* `deliveries` is rewritten by every claim and settle, so it carries no index but its key and partial
  ones; the indexes that lists need stand on `payloads`, whose rows never change.
* No partial index names `state`: with statistics taken while nothing was open, such an index is
  chosen for a claim or settle *by id* and walked whole. Each names a column that a by-id statement
  does not mention (`wake_at`, `lease_until`, `dead_reason`, `completed_at`).
* No foreign keys between the partitioned tables, nor from them to `destinations`: the accept
  statement joins the destination it writes, and a share lock per delivery on one destination row
  would make every accept for it queue.
"""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlmodel import Field, SQLModel

from service.domain.delivery import DeadReason, State
from service.domain.outcome import Outcome

NAMING = {
    "pk": "pk_%(table_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
}
SQLModel.metadata.naming_convention = NAMING

PARTITIONED = ("deliveries", "payloads", "attempts")

NOW = sa.text("now()")
_UUID = pg.UUID(as_uuid=True)
_AT = sa.TIMESTAMP(timezone=True)


def _one_of(column: str, values: type[State] | type[Outcome] | type[DeadReason]) -> str:
    return f"{column} IN ({', '.join(repr(value.value) for value in values)})"


class Destination(SQLModel, table=True):
    """Where deliveries go."""

    __tablename__ = "destinations"
    __table_args__ = (
        sa.CheckConstraint("state IN ('active', 'paused', 'disabled')", name="state"),
        sa.CheckConstraint("(state = 'disabled') = (disabled_reason IS NOT NULL)", name="disabled_reason"),
        sa.CheckConstraint("on_ambiguous IN ('retry', 'hold')", name="on_ambiguous"),
        sa.Index("uq_destinations_ad_hoc", "tenant", "url", unique=True, postgresql_where=sa.text("ad_hoc")),
        sa.Index("ix_destinations_tenant_id", "tenant", "id"),
        sa.Index("ix_destinations_gated", "id", postgresql_where=sa.text("gated")),
    )

    id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    tenant: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    name: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    url: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    owner: str | None = Field(sa_column=sa.Column(sa.Text))
    state: str = Field(sa_column=sa.Column(sa.Text, nullable=False, server_default=sa.text("'active'")))
    disabled_reason: str | None = Field(sa_column=sa.Column(sa.Text))
    # Made for a bare `url` in a delivery; its URL is its identity and cannot change.
    ad_hoc: bool = Field(sa_column=sa.Column(sa.Boolean, nullable=False, server_default=sa.false()))
    # Whether parked deliveries may exist; the dispatcher admits them and takes the mark off.
    gated: bool = Field(sa_column=sa.Column(sa.Boolean, nullable=False, server_default=sa.false()))
    headers: dict[str, str] = Field(sa_column=sa.Column(pg.JSONB, nullable=False, server_default=sa.text("'{}'")))
    timeout_seconds: float = Field(sa_column=sa.Column(sa.Double, nullable=False))
    attempts_max: int = Field(sa_column=sa.Column(sa.Integer, nullable=False))
    deadline_seconds: int = Field(sa_column=sa.Column(sa.Integer, nullable=False))
    schedule_seconds: list[float] | None = Field(sa_column=sa.Column(pg.ARRAY(sa.Double)))
    base_seconds: float = Field(sa_column=sa.Column(sa.Double, nullable=False))
    cap_seconds: float = Field(sa_column=sa.Column(sa.Double, nullable=False))
    on_ambiguous: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    response_rules: dict[str, str] = Field(
        sa_column=sa.Column(pg.JSONB, nullable=False, server_default=sa.text("'{}'"))
    )
    created_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
    updated_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))


class DestinationSecret(SQLModel, table=True):
    """A signing secret, encrypted. Several overlap during a rotation, until `expires_at`.

    `public_key` tells the kinds apart: with it the row holds the seed of a `v1a` pair, else a `v1` secret.
    """

    __tablename__ = "destination_secrets"
    __table_args__ = (
        sa.ForeignKeyConstraint(["destination_id"], ["destinations.id"], ondelete="CASCADE"),
        sa.Index("ix_destination_secrets_destination_id", "destination_id"),
    )

    id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    destination_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, nullable=False))
    ciphertext: bytes = Field(sa_column=sa.Column(sa.LargeBinary, nullable=False))
    created_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
    expires_at: dt.datetime | None = Field(sa_column=sa.Column(_AT))
    public_key: str | None = Field(sa_column=sa.Column(sa.Text))


class DeliveryIdentity(SQLModel, table=True):
    """One event for one destination: the identity that no retry, crash or redrive makes twice."""

    __tablename__ = "delivery_identities"

    destination_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    event_id: str = Field(sa_column=sa.Column(sa.Text, primary_key=True))
    delivery_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, nullable=False))
    payload_sha256: bytes = Field(sa_column=sa.Column(sa.LargeBinary, nullable=False))


class IdempotencyKey(SQLModel, table=True):
    """What a client's key stood for. It points at the identity, not at the delivery: docs/adr/0003."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (sa.Index("ix_idempotency_keys_expires_at", "expires_at"),)

    tenant: str = Field(sa_column=sa.Column(sa.Text, primary_key=True))
    key: str = Field(sa_column=sa.Column(sa.Text, primary_key=True))
    fingerprint: bytes = Field(sa_column=sa.Column(sa.LargeBinary, nullable=False))
    destination_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, nullable=False))
    event_id: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    expires_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False))


class Payload(SQLModel, table=True):
    """What is sent, to the byte, and what is known of it from the start. Written once."""

    __tablename__ = "payloads"
    __table_args__ = (
        sa.Index("ix_payloads_tenant_delivery_id", "tenant", "delivery_id"),
        sa.Index("ix_payloads_destination_id_delivery_id", "destination_id", "delivery_id"),
        sa.Index(
            "ix_payloads_event_type",
            "tenant",
            "event_type",
            "delivery_id",
            postgresql_where=sa.text("event_type IS NOT NULL"),
        ),
        sa.Index(
            "ix_payloads_metadata",
            "metadata",
            postgresql_using="gin",
            postgresql_ops={"metadata": "jsonb_path_ops"},
            postgresql_where=sa.text("metadata IS NOT NULL"),
        ),
        {"postgresql_partition_by": "RANGE (delivery_id)"},
    )

    delivery_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    destination_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, nullable=False))
    tenant: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    event_id: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    event_type: str | None = Field(sa_column=sa.Column(sa.Text))
    content_type: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    headers: dict[str, str] | None = Field(sa_column=sa.Column(pg.JSONB))
    # `metadata` is a name that SQLModel keeps for itself.
    metadata_: dict[str, str] | None = Field(sa_column=sa.Column("metadata", pg.JSONB))
    body_sha256: bytes = Field(sa_column=sa.Column(sa.LargeBinary, nullable=False))
    body: bytes = Field(sa_column=sa.Column(sa.LargeBinary, nullable=False))


class Delivery(SQLModel, table=True):
    """The state machine of one delivery. Fixed-width columns first: the row is rewritten often."""

    __tablename__ = "deliveries"
    __table_args__ = (
        sa.CheckConstraint(_one_of("state", State), name="state"),
        sa.CheckConstraint("(state = 'pending') = (wake_at IS NOT NULL)", name="wake_at"),
        sa.CheckConstraint("(state = 'delivering') = (lease_until IS NOT NULL)", name="lease_until"),
        sa.CheckConstraint("(state = 'dead') = (dead_reason IS NOT NULL)", name="dead_reason"),
        sa.CheckConstraint(
            "(state IN ('delivered', 'dead', 'cancelled')) = (completed_at IS NOT NULL)", name="completed_at"
        ),
        sa.Index("ix_deliveries_wake_at", "wake_at", postgresql_where=sa.text("wake_at IS NOT NULL")),
        sa.Index("ix_deliveries_lease_until", "lease_until", postgresql_where=sa.text("lease_until IS NOT NULL")),
        sa.Index("ix_deliveries_parked", "destination_id", "next_attempt_at", postgresql_where=sa.text("parked")),
        sa.Index("ix_deliveries_open", "id", postgresql_where=sa.text("completed_at IS NULL")),
        sa.Index(
            "ix_deliveries_dead",
            "tenant",
            "completed_at",
            "id",
            postgresql_where=sa.text("dead_reason IS NOT NULL"),
        ),
        sa.Index(
            "ix_deliveries_dead_by_destination",
            "destination_id",
            "dead_reason",
            "completed_at",
            "id",
            postgresql_where=sa.text("dead_reason IS NOT NULL"),
        ),
        sa.Index("ix_deliveries_redrive_id", "redrive_id", postgresql_where=sa.text("redrive_id IS NOT NULL")),
        {"postgresql_partition_by": "RANGE (id)"},
    )

    id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    destination_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, nullable=False))
    created_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
    next_attempt_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False))
    deadline_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False))
    # When the dispatcher looks at it next: a due row is hinted, and looked at again when the hint
    # should have been taken; a parked one at its deadline.
    wake_at: dt.datetime | None = Field(sa_column=sa.Column(_AT))
    lease_until: dt.datetime | None = Field(sa_column=sa.Column(_AT))
    claimed_at: dt.datetime | None = Field(sa_column=sa.Column(_AT))
    completed_at: dt.datetime | None = Field(sa_column=sa.Column(_AT))
    redrive_id: uuid.UUID | None = Field(sa_column=sa.Column(_UUID))
    attempt_count: int = Field(sa_column=sa.Column(sa.Integer, nullable=False, server_default=sa.text("0")))
    attempts_max: int = Field(sa_column=sa.Column(sa.Integer, nullable=False))
    last_status_code: int | None = Field(sa_column=sa.Column(sa.Integer))
    redrive_count: int = Field(sa_column=sa.Column(sa.Integer, nullable=False, server_default=sa.text("0")))
    crashed_claims: int = Field(sa_column=sa.Column(sa.SmallInteger, nullable=False, server_default=sa.text("0")))
    # Attempts that the schedule does not count: those before the latest redrive, and released ones.
    uncharged_count: int = Field(sa_column=sa.Column(sa.Integer, nullable=False, server_default=sa.text("0")))
    parked: bool = Field(sa_column=sa.Column(sa.Boolean, nullable=False, server_default=sa.false()))
    may_have_been_delivered: bool = Field(sa_column=sa.Column(sa.Boolean, nullable=False, server_default=sa.false()))
    state: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    tenant: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    next_trigger: str = Field(sa_column=sa.Column(sa.Text, nullable=False, server_default=sa.text("'schedule'")))
    last_outcome: str | None = Field(sa_column=sa.Column(sa.Text))
    dead_reason: str | None = Field(sa_column=sa.Column(sa.Text))
    worker: str | None = Field(sa_column=sa.Column(sa.Text))
    last_error: str | None = Field(sa_column=sa.Column(sa.Text))


class Attempt(SQLModel, table=True):
    """One HTTP try, as it ended. Appended by the settling; `late_result` by a zombie, once."""

    __tablename__ = "attempts"
    __table_args__ = (
        sa.CheckConstraint(_one_of("outcome", Outcome), name="outcome"),
        {"postgresql_partition_by": "RANGE (delivery_id)"},
    )

    delivery_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    number: int = Field(sa_column=sa.Column(sa.Integer, primary_key=True, autoincrement=False))
    status_code: int | None = Field(sa_column=sa.Column(sa.Integer))
    latency_ms: int | None = Field(sa_column=sa.Column(sa.Integer))
    scheduled_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False))
    started_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False))
    completed_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
    trigger: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    outcome: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    # NULL: the worker was lost, so nobody knows how far the exchange came.
    phase: str | None = Field(sa_column=sa.Column(sa.Text))
    error: str | None = Field(sa_column=sa.Column(sa.Text))
    worker: str | None = Field(sa_column=sa.Column(sa.Text))
    response_excerpt: bytes | None = Field(sa_column=sa.Column(sa.LargeBinary))
    late_result: dict[str, Any] | None = Field(sa_column=sa.Column(pg.JSONB))


class Redrive(SQLModel, table=True):
    """A durable operation: put dead deliveries back, within bounds, for a recorded reason."""

    __tablename__ = "redrives"
    __table_args__ = (
        sa.CheckConstraint("state IN ('running', 'completed', 'stopped', 'cancelled')", name="state"),
        sa.UniqueConstraint("tenant", "idempotency_key"),
        sa.Index("ix_redrives_tenant_id", "tenant", "id"),
        sa.Index("ix_redrives_running", "id", postgresql_where=sa.text("state = 'running'")),
    )

    id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    tenant: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    idempotency_key: str | None = Field(sa_column=sa.Column(sa.Text))
    fingerprint: bytes | None = Field(sa_column=sa.Column(sa.LargeBinary))
    state: str = Field(sa_column=sa.Column(sa.Text, nullable=False, server_default=sa.text("'running'")))
    actor: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    reason: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    selected_count: int = Field(sa_column=sa.Column(sa.Integer, nullable=False))
    rate_per_second: float | None = Field(sa_column=sa.Column(sa.Double))
    stop_after_same_reason: int | None = Field(sa_column=sa.Column(sa.Integer))
    stopped_because: str | None = Field(sa_column=sa.Column(sa.Text))
    created_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
    stepped_at: dt.datetime | None = Field(sa_column=sa.Column(_AT))
    completed_at: dt.datetime | None = Field(sa_column=sa.Column(_AT))


class RedriveItem(SQLModel, table=True):
    """One delivery of a redrive: waiting, requeued, or skipped for a reason."""

    __tablename__ = "redrive_items"
    __table_args__ = (
        sa.CheckConstraint("state IN ('waiting', 'requeued', 'skipped')", name="state"),
        sa.ForeignKeyConstraint(["redrive_id"], ["redrives.id"], ondelete="CASCADE"),
        sa.Index(
            "ix_redrive_items_waiting", "redrive_id", "delivery_id", postgresql_where=sa.text("state = 'waiting'")
        ),
    )

    redrive_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    delivery_id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    state: str = Field(sa_column=sa.Column(sa.Text, nullable=False, server_default=sa.text("'waiting'")))
    skipped_because: str | None = Field(sa_column=sa.Column(sa.Text))


class AuditRecord(SQLModel, table=True):
    """Who did what to what, and why. Appended only: a trigger refuses everything else."""

    __tablename__ = "audit_log"
    __table_args__ = (sa.Index("ix_audit_log_tenant_id", "tenant", "id"),)

    id: int = Field(sa_column=sa.Column(sa.BigInteger, sa.Identity(always=True), primary_key=True))
    at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
    tenant: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    actor: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    action: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    subject: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    reason: str | None = Field(sa_column=sa.Column(sa.Text))
    detail: dict[str, Any] = Field(sa_column=sa.Column(pg.JSONB, nullable=False, server_default=sa.text("'{}'")))


class ApiKey(SQLModel, table=True):
    """A key of the API. Only the hash of its secret is kept."""

    __tablename__ = "api_keys"

    id: uuid.UUID = Field(sa_column=sa.Column(_UUID, primary_key=True))
    tenant: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    name: str = Field(sa_column=sa.Column(sa.Text, nullable=False))
    secret_sha256: bytes = Field(sa_column=sa.Column(sa.LargeBinary, nullable=False))
    created_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
    revoked_at: dt.datetime | None = Field(sa_column=sa.Column(_AT))


class Tally(SQLModel, table=True):
    """How often one thing happened in one minute, as the processes counted it: what rates are read from."""

    __tablename__ = "tallies"
    __table_args__ = (sa.Index("ix_tallies_minute", "minute"),)

    tenant: str = Field(sa_column=sa.Column(sa.Text, primary_key=True))
    minute: dt.datetime = Field(sa_column=sa.Column(_AT, primary_key=True))
    name: str = Field(sa_column=sa.Column(sa.Text, primary_key=True))
    count: int = Field(sa_column=sa.Column(sa.BigInteger, nullable=False))


class Worker(SQLModel, table=True):
    """A living worker's heartbeat. Claims of one that stopped beating are rescued."""

    __tablename__ = "workers"

    id: str = Field(sa_column=sa.Column(sa.Text, primary_key=True))
    started_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
    heartbeat_at: dt.datetime = Field(sa_column=sa.Column(_AT, nullable=False, server_default=NOW))
