"""The ledger: its tables, the first weeks' partitions, and an audit log that nobody can rewrite."""

from __future__ import annotations

import datetime as dt

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from service.ledger import partitions

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# In the order in which they may be made; taken down in the other.
_TABLES = (
    "workers",
    "api_keys",
    "audit_log",
    "destinations",
    "destination_secrets",
    "idempotency_keys",
    "delivery_identities",
    "deliveries",
    "payloads",
    "attempts",
    "redrives",
    "redrive_items",
)


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("revoked_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_table(
        "attempts",
        sa.Column("delivery_id", sa.UUID(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("latency_ms", sa.Integer(), nullable=True),
        sa.Column("scheduled_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("started_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("completed_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("response_excerpt", sa.LargeBinary(), nullable=True),
        sa.Column("late_result", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint(
            "outcome IN ('success', 'not_sent', 'blocked', 'unknown', 'redirect', 'retryable', 'throttled', 'gone', "
            "'rejected')",
            name=op.f("ck_attempts_outcome"),
        ),
        sa.PrimaryKeyConstraint("delivery_id", "number", name=op.f("pk_attempts")),
        postgresql_partition_by="RANGE (delivery_id)",
    )
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("detail", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_tenant_id", "audit_log", ["tenant", "id"], unique=False)
    op.create_table(
        "deliveries",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("destination_id", sa.UUID(), nullable=False),
        sa.Column("created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("next_attempt_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("deadline_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("wake_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("lease_until", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("claimed_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("completed_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("redrive_id", sa.UUID(), nullable=True),
        sa.Column("attempt_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempts_max", sa.Integer(), nullable=False),
        sa.Column("last_status_code", sa.Integer(), nullable=True),
        sa.Column("redrive_count", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("crashed_claims", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("parked", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("may_have_been_delivered", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("next_trigger", sa.Text(), server_default=sa.text("'schedule'"), nullable=False),
        sa.Column("last_outcome", sa.Text(), nullable=True),
        sa.Column("dead_reason", sa.Text(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.CheckConstraint("(state = 'dead') = (dead_reason IS NOT NULL)", name=op.f("ck_deliveries_dead_reason")),
        sa.CheckConstraint(
            "(state = 'delivering') = (lease_until IS NOT NULL)", name=op.f("ck_deliveries_lease_until")
        ),
        sa.CheckConstraint("(state = 'pending') = (wake_at IS NOT NULL)", name=op.f("ck_deliveries_wake_at")),
        sa.CheckConstraint(
            "(state IN ('delivered', 'dead', 'cancelled')) = (completed_at IS NOT NULL)",
            name=op.f("ck_deliveries_completed_at"),
        ),
        sa.CheckConstraint(
            "state IN ('pending', 'delivering', 'delivered', 'ambiguous', 'dead', 'cancelled')",
            name=op.f("ck_deliveries_state"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        postgresql_partition_by="RANGE (id)",
    )
    op.create_index(
        "ix_deliveries_dead",
        "deliveries",
        ["tenant", "completed_at", "id"],
        unique=False,
        postgresql_where=sa.text("dead_reason IS NOT NULL"),
    )
    op.create_index(
        "ix_deliveries_dead_by_destination",
        "deliveries",
        ["destination_id", "dead_reason", "completed_at", "id"],
        unique=False,
        postgresql_where=sa.text("dead_reason IS NOT NULL"),
    )
    op.create_index(
        "ix_deliveries_lease_until",
        "deliveries",
        ["lease_until"],
        unique=False,
        postgresql_where=sa.text("lease_until IS NOT NULL"),
    )
    op.create_index(
        "ix_deliveries_open", "deliveries", ["id"], unique=False, postgresql_where=sa.text("completed_at IS NULL")
    )
    op.create_index(
        "ix_deliveries_parked",
        "deliveries",
        ["destination_id", "next_attempt_at"],
        unique=False,
        postgresql_where=sa.text("parked"),
    )
    op.create_index(
        "ix_deliveries_redrive_id",
        "deliveries",
        ["redrive_id"],
        unique=False,
        postgresql_where=sa.text("redrive_id IS NOT NULL"),
    )
    op.create_index(
        "ix_deliveries_wake_at",
        "deliveries",
        ["wake_at"],
        unique=False,
        postgresql_where=sa.text("wake_at IS NOT NULL"),
    )
    op.create_table(
        "delivery_identities",
        sa.Column("destination_id", sa.UUID(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("delivery_id", sa.UUID(), nullable=False),
        sa.Column("payload_sha256", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("destination_id", "event_id", name=op.f("pk_delivery_identities")),
    )
    op.create_table(
        "destinations",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), server_default=sa.text("'active'"), nullable=False),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("ad_hoc", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("gated", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("headers", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("timeout_seconds", sa.Double(), nullable=False),
        sa.Column("attempts_max", sa.Integer(), nullable=False),
        sa.Column("deadline_seconds", sa.Integer(), nullable=False),
        sa.Column("schedule_seconds", postgresql.ARRAY(sa.Double()), nullable=True),
        sa.Column("base_seconds", sa.Double(), nullable=False),
        sa.Column("cap_seconds", sa.Double(), nullable=False),
        sa.Column("on_ambiguous", sa.Text(), nullable=False),
        sa.Column(
            "response_rules", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "(state = 'disabled') = (disabled_reason IS NOT NULL)", name=op.f("ck_destinations_disabled_reason")
        ),
        sa.CheckConstraint("on_ambiguous IN ('retry', 'hold')", name=op.f("ck_destinations_on_ambiguous")),
        sa.CheckConstraint("state IN ('active', 'paused', 'disabled')", name=op.f("ck_destinations_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_destinations")),
    )
    op.create_index("ix_destinations_gated", "destinations", ["id"], unique=False, postgresql_where=sa.text("gated"))
    op.create_index("ix_destinations_tenant_id", "destinations", ["tenant", "id"], unique=False)
    op.create_index(
        "uq_destinations_ad_hoc", "destinations", ["tenant", "url"], unique=True, postgresql_where=sa.text("ad_hoc")
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("destination_id", sa.UUID(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"], unique=False)
    op.create_table(
        "payloads",
        sa.Column("delivery_id", sa.UUID(), nullable=False),
        sa.Column("destination_id", sa.UUID(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("event_type", sa.Text(), nullable=True),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("headers", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("metadata", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("body_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("delivery_id", name=op.f("pk_payloads")),
        postgresql_partition_by="RANGE (delivery_id)",
    )
    op.create_index(
        "ix_payloads_destination_id_delivery_id", "payloads", ["destination_id", "delivery_id"], unique=False
    )
    op.create_index(
        "ix_payloads_event_type",
        "payloads",
        ["tenant", "event_type", "delivery_id"],
        unique=False,
        postgresql_where=sa.text("event_type IS NOT NULL"),
    )
    op.create_index(
        "ix_payloads_metadata",
        "payloads",
        ["metadata"],
        unique=False,
        postgresql_using="gin",
        postgresql_ops={"metadata": "jsonb_path_ops"},
        postgresql_where=sa.text("metadata IS NOT NULL"),
    )
    op.create_index("ix_payloads_tenant_delivery_id", "payloads", ["tenant", "delivery_id"], unique=False)
    op.create_table(
        "redrives",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=True),
        sa.Column("state", sa.Text(), server_default=sa.text("'running'"), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("selected_count", sa.Integer(), nullable=False),
        sa.Column("rate_per_second", sa.Double(), nullable=True),
        sa.Column("stop_after_same_reason", sa.Integer(), nullable=True),
        sa.Column("stopped_because", sa.Text(), nullable=True),
        sa.Column("created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("stepped_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("completed_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('running', 'completed', 'stopped', 'cancelled')", name=op.f("ck_redrives_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_redrives")),
        sa.UniqueConstraint("tenant", "idempotency_key", name=op.f("uq_redrives_tenant_idempotency_key")),
    )
    op.create_index(
        "ix_redrives_running", "redrives", ["id"], unique=False, postgresql_where=sa.text("state = 'running'")
    )
    op.create_index("ix_redrives_tenant_id", "redrives", ["tenant", "id"], unique=False)
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("started_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("heartbeat_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "destination_secrets",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("destination_id", sa.UUID(), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["destination_id"],
            ["destinations.id"],
            name=op.f("fk_destination_secrets_destination_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_destination_secrets")),
    )
    op.create_index("ix_destination_secrets_destination_id", "destination_secrets", ["destination_id"], unique=False)
    op.create_table(
        "redrive_items",
        sa.Column("redrive_id", sa.UUID(), nullable=False),
        sa.Column("delivery_id", sa.UUID(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'waiting'"), nullable=False),
        sa.Column("skipped_because", sa.Text(), nullable=True),
        sa.CheckConstraint("state IN ('waiting', 'requeued', 'skipped')", name=op.f("ck_redrive_items_state")),
        sa.ForeignKeyConstraint(
            ["redrive_id"], ["redrives.id"], name=op.f("fk_redrive_items_redrive_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("redrive_id", "delivery_id", name=op.f("pk_redrive_items")),
    )
    op.create_index(
        "ix_redrive_items_waiting",
        "redrive_items",
        ["redrive_id", "delivery_id"],
        unique=False,
        postgresql_where=sa.text("state = 'waiting'"),
    )
    # Webhook payloads are short or compressed badly; compressing them costs more CPU than it saves disk.
    op.execute("ALTER TABLE payloads ALTER COLUMN body SET STORAGE EXTERNAL")
    _make_partitions()
    op.execute("""
    CREATE FUNCTION audit_log_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'audit_log is append-only' USING ERRCODE = 'insufficient_privilege';
    END $$
    """)
    op.execute("""
    CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION audit_log_is_append_only()
    """)


def _make_partitions() -> None:
    """Each table's DEFAULT partition, and its weeks from the last one on; the dispatcher makes the rest."""
    for table in partitions.PARTITIONED:
        op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")
        for week in partitions.weeks(dt.datetime.now(dt.UTC), back=1):
            for statement in partitions.statements(table, week):
                op.execute(statement)


def downgrade() -> None:
    for table in reversed(_TABLES):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP FUNCTION audit_log_is_append_only")
