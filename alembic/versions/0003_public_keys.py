"""Signing secrets may be Ed25519 pairs: the public key stands beside the encrypted seed.

The version before reads such a row as a secret that does not decrypt: what it claims for that destination is
released uncharged, to be sent by a worker that knows pairs. It never signs with the seed.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Null by default: no row is written, and the lock is held for an instant.
    op.add_column("destination_secrets", sa.Column("public_key", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("destination_secrets", "public_key")
