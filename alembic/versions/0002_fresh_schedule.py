"""A redrive begins the schedule anew: how many attempts a delivery's backoff does not count.

Deliveries that were redriven before this migration go on by the number of all their attempts, as they did.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A constant default is kept in the catalog: no row is written, and the lock is held for an instant.
    op.add_column("deliveries", sa.Column("uncharged_count", sa.Integer(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    op.drop_column("deliveries", "uncharged_count")
