"""Counts by tenant, minute and name, for rates that are read and not counted.

The version before does not know the table and counts nothing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tallies",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("minute", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "minute", "name", name=op.f("pk_tallies")),
    )
    op.create_index("ix_tallies_minute", "tallies", ["minute"], unique=False)


def downgrade() -> None:
    op.drop_table("tallies")
