"""STORY reconcile: ambiguous → delivered | pending | dead, by the word of a person who found out.

The ledger does not know whether an ambiguous delivery arrived, and says so; it never decides that
alone. What the person says is recorded with who said it and why.
"""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import assert_never

from service.domain.ids import Prefix, to_typeid
from service.ledger import operating
from service.ledger.audit import Deed
from service.ledger.operating import Result
from service.ledger.session import Ledger


class Finding(StrEnum):
    """What the person found, or decided."""

    DELIVERED = "delivered"  # it arrived
    RETRY = "retry"  # send again, under the same id
    DEAD = "dead"  # let it be dead; it may have arrived


async def resolve(
    ledger: Ledger, tenant: str, actor: str, delivery_id: uuid.UUID, finding: Finding, note: str
) -> Result:
    """End the ambiguity, or say what stands in the way."""
    subject = to_typeid(Prefix.DELIVERY, delivery_id)
    deed = Deed(tenant, actor, "delivery.resolve", subject, reason=note, detail={"as": finding.value})
    match finding:
        case Finding.DELIVERED:
            return await operating.confirm(ledger, deed, delivery_id)
        case Finding.RETRY:
            return await operating.resend(ledger, deed, delivery_id)
        case Finding.DEAD:
            return await operating.give_up(ledger, deed, delivery_id)
        case _:
            assert_never(finding)
