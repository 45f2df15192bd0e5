"""The audit log: who did what to what, and why; written in the transaction of the deed itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.ledger.session import Connection, Statement


@dataclass(frozen=True, slots=True)
class Deed:
    """One audited act. `subject` is a TypeID; `actor` a key's TypeID or the name of a role."""

    tenant: str
    actor: str
    action: str
    subject: str
    reason: str | None = None
    detail: Mapping[str, Any] | None = None


_RECORD = Statement("""
INSERT INTO audit_log (tenant, actor, action, subject, reason, detail)
VALUES (:tenant, :actor, :action, :subject, :reason, CAST(:detail AS jsonb))
""")


async def record(connection: Connection, deed: Deed) -> None:
    """Append one record within the caller's transaction."""
    await connection.execute(
        _RECORD,
        {
            "tenant": deed.tenant,
            "actor": deed.actor,
            "action": deed.action,
            "subject": deed.subject,
            "reason": deed.reason,
            "detail": json.dumps(dict(deed.detail or {})),
        },
    )
