"""Destinations: every query is bound to a tenant, and what an operator changes leaves an audit record."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from service.domain.delivery import OnAmbiguous
from service.domain.retry import RetryPolicy
from service.ledger import audit
from service.ledger.session import Ledger, rows


@dataclass(frozen=True, slots=True)
class StoredDestination:
    """A destination as it stands in the ledger."""

    id: uuid.UUID
    tenant: str
    name: str
    url: str
    owner: str | None
    state: str
    disabled_reason: str | None
    ad_hoc: bool
    headers: Mapping[str, str]
    timeout_seconds: float
    attempts_max: int
    deadline_seconds: int
    schedule_seconds: list[float] | None
    base_seconds: float
    cap_seconds: float
    on_ambiguous: str
    response_rules: Mapping[str, str]
    created_at: dt.datetime
    updated_at: dt.datetime


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A signing secret on its way into the ledger, encrypted already."""

    id: uuid.UUID
    ciphertext: bytes


def policy_of(row: Mapping[str, Any] | sa.RowMapping) -> RetryPolicy:
    """The retry policy in a row that holds a destination's policy columns."""
    schedule_seconds = row["schedule_seconds"]
    return RetryPolicy(
        base_seconds=row["base_seconds"],
        cap_seconds=row["cap_seconds"],
        schedule_seconds=tuple(schedule_seconds) if schedule_seconds else None,
        on_ambiguous=OnAmbiguous(row["on_ambiguous"]),
    )


_COLUMNS = """id, tenant, name, url, owner, state, disabled_reason, ad_hoc, headers, timeout_seconds, attempts_max,
    deadline_seconds, schedule_seconds, base_seconds, cap_seconds, on_ambiguous, response_rules, created_at,
    updated_at"""

_INSERT = sa.text(f"""
INSERT INTO destinations (id, tenant, name, url, owner, ad_hoc, headers, timeout_seconds, attempts_max,
    deadline_seconds, schedule_seconds, base_seconds, cap_seconds, on_ambiguous, response_rules)
VALUES (:id, :tenant, :name, :url, :owner, :ad_hoc, CAST(:headers AS jsonb), :timeout_seconds, :attempts_max,
    :deadline_seconds, CAST(:schedule_seconds AS float8[]), :base_seconds, :cap_seconds, :on_ambiguous,
    CAST(:response_rules AS jsonb))
ON CONFLICT (tenant, url) WHERE ad_hoc DO NOTHING
RETURNING {_COLUMNS}
""")
_INSERT_SECRET = sa.text("""
INSERT INTO destination_secrets (id, destination_id, ciphertext) VALUES (:id, :destination_id, :ciphertext)
""")
_FIND = sa.text(f"SELECT {_COLUMNS} FROM destinations WHERE id = :id AND tenant = :tenant")
_FIND_AD_HOC = sa.text(f"SELECT {_COLUMNS} FROM destinations WHERE tenant = :tenant AND url = :url AND ad_hoc")
_LIST = sa.text(f"""
SELECT {_COLUMNS} FROM destinations
WHERE tenant = :tenant AND (CAST(:before AS uuid) IS NULL OR id < CAST(:before AS uuid))
ORDER BY id DESC LIMIT :limit
""")


async def create(
    ledger: Ledger, values: Mapping[str, Any], secret: NewSecret, *, deed: audit.Deed
) -> StoredDestination | None:
    """Write a destination with its first secret; None when its ad-hoc URL exists already."""
    async with ledger.transaction() as connection:
        made = await rows(connection, _INSERT, _as_columns(values))
        if not made:
            return None
        await connection.execute(
            _INSERT_SECRET,
            {"id": secret.id, "destination_id": made[0]["id"], "ciphertext": secret.ciphertext},
        )
        await audit.record(connection, deed)
    return StoredDestination(**made[0])


async def find(ledger: Ledger, tenant: str, destination_id: uuid.UUID) -> StoredDestination | None:
    """Read one destination of the tenant."""
    async with ledger.statement() as connection:
        found = await rows(connection, _FIND, {"id": destination_id, "tenant": tenant})
    return StoredDestination(**found[0]) if found else None


async def find_ad_hoc(ledger: Ledger, tenant: str, url: str) -> StoredDestination | None:
    """Read the destination that a bare URL stands for. Index: `uq_destinations_ad_hoc`."""
    async with ledger.statement() as connection:
        found = await rows(connection, _FIND_AD_HOC, {"tenant": tenant, "url": url})
    return StoredDestination(**found[0]) if found else None


async def list_page(ledger: Ledger, tenant: str, *, before: uuid.UUID | None, limit: int) -> list[StoredDestination]:
    """Read one page, newest first. Index: `ix_destinations_tenant_id`."""
    async with ledger.statement() as connection:
        found = await rows(connection, _LIST, {"tenant": tenant, "before": before, "limit": limit})
    return [StoredDestination(**row) for row in found]


_JSON_COLUMNS: Final = frozenset({"headers", "response_rules"})
_CHANGEABLE: Final = frozenset(
    {"name", "url", "owner", "headers", "timeout_seconds", "attempts_max", "deadline_seconds", "schedule_seconds"}
    | {"base_seconds", "cap_seconds", "on_ambiguous", "response_rules"}
)


async def change(
    ledger: Ledger, tenant: str, destination_id: uuid.UUID, changes: Mapping[str, Any], *, deed: audit.Deed
) -> StoredDestination | None:
    """Set the given columns; None when the tenant has no such destination."""
    assert changes.keys() <= _CHANGEABLE, "columns are chosen by our code, never by a request"
    assignments = ", ".join(
        f"{name} = CAST(:{name} AS {'jsonb' if name in _JSON_COLUMNS else _CASTS.get(name, 'text')})"
        for name in sorted(changes)
    )
    statement = sa.text(f"""
    UPDATE destinations SET {assignments}, updated_at = now() WHERE id = :id AND tenant = :tenant RETURNING {_COLUMNS}
    """)
    async with ledger.transaction() as connection:
        changed = await rows(connection, statement, {**_as_columns(changes), "id": destination_id, "tenant": tenant})
        if changed:
            await audit.record(connection, deed)
    return StoredDestination(**changed[0]) if changed else None


_CASTS: Final = {
    "timeout_seconds": "float8",
    "attempts_max": "int",
    "deadline_seconds": "int",
    "schedule_seconds": "float8[]",
    "base_seconds": "float8",
    "cap_seconds": "float8",
}


def _as_columns(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: json.dumps(dict(value)) if name in _JSON_COLUMNS else value for name, value in values.items()}


# `gated` makes the dispatcher look for parked rows; a pause parks none itself, so that it is instant.
_PAUSE = sa.text(f"""
UPDATE destinations SET state = 'paused', updated_at = now()
WHERE id = :id AND tenant = :tenant AND state = 'active' RETURNING {_COLUMNS}
""")
_RESUME = sa.text(f"""
UPDATE destinations SET state = 'active', gated = true, updated_at = now()
WHERE id = :id AND tenant = :tenant AND state = 'paused' RETURNING {_COLUMNS}
""")
_ENABLE = sa.text(f"""
UPDATE destinations SET state = 'active', disabled_reason = NULL, gated = true, updated_at = now()
WHERE id = :id AND tenant = :tenant AND state = 'disabled' RETURNING {_COLUMNS}
""")
_DISABLE = sa.text("""
UPDATE destinations SET state = 'disabled', disabled_reason = :reason, gated = true, updated_at = now()
WHERE id = :id AND tenant = :tenant AND state <> 'disabled' RETURNING id
""")


async def pause(ledger: Ledger, deed: audit.Deed, destination_id: uuid.UUID) -> StoredDestination | None:
    """PAUSE: active → paused; None when it is not active."""
    return await _move(ledger, _PAUSE, deed, destination_id)


async def resume(ledger: Ledger, deed: audit.Deed, destination_id: uuid.UUID) -> StoredDestination | None:
    """RESUME: paused → active; None when it is not paused. The dispatcher admits what was parked."""
    return await _move(ledger, _RESUME, deed, destination_id)


async def enable(ledger: Ledger, deed: audit.Deed, destination_id: uuid.UUID) -> StoredDestination | None:
    """ENABLE: disabled → active; None when it is not disabled."""
    return await _move(ledger, _ENABLE, deed, destination_id)


async def _move(
    ledger: Ledger, statement: sa.TextClause, deed: audit.Deed, destination_id: uuid.UUID
) -> StoredDestination | None:
    async with ledger.transaction() as connection:
        moved = await rows(connection, statement, {"id": destination_id, "tenant": deed.tenant})
        if moved:
            await audit.record(connection, deed)
    return StoredDestination(**moved[0]) if moved else None


async def disable(ledger: Ledger, deed: audit.Deed, destination_id: uuid.UUID) -> bool:
    """DISABLE: active or paused → disabled, for the deed's reason; answers whether it moved."""
    async with ledger.transaction() as connection:
        values = {"id": destination_id, "tenant": deed.tenant, "reason": deed.reason or "disabled"}
        moved = bool(await rows(connection, _DISABLE, values))
        if moved:
            await audit.record(connection, deed)
    return moved
