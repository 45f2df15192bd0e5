"""Destinations: every query is bound to a tenant, and what an operator changes leaves an audit record."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.domain import limits
from service.domain.delivery import OnAmbiguous
from service.domain.retry import RetryPolicy
from service.ledger import audit
from service.ledger.session import Connection, Ledger, Row, Statement


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """What may be told of a signing secret in force. `public_key` is that of a `v1a` pair."""

    public_key: str | None
    created_at: dt.datetime
    expires_at: dt.datetime | None


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
    secrets: tuple[StoredSecret, ...]  # newest first


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A signing secret on its way into the ledger, encrypted already."""

    id: uuid.UUID
    ciphertext: bytes
    public_key: str | None = None


@dataclass(frozen=True, slots=True)
class TooManySecrets:
    """As many secrets are in force as may be; the first of them ends then."""

    ends_at: dt.datetime


def policy_of(row: Mapping[str, Any] | Row) -> RetryPolicy:
    """The retry policy in a row that holds a destination's policy columns."""
    schedule_seconds = row["schedule_seconds"]
    return RetryPolicy(
        base_seconds=row["base_seconds"],
        cap_seconds=row["cap_seconds"],
        schedule_seconds=tuple(schedule_seconds) if schedule_seconds else None,
        on_ambiguous=OnAmbiguous(row["on_ambiguous"]),
    )


# Of the secrets in force, what may be told: the ciphertext is read by the claim alone.
_SECRETS = """(
    SELECT coalesce(
        jsonb_agg(
            jsonb_build_object('public_key', s.public_key, 'created_at', s.created_at, 'expires_at', s.expires_at)
            ORDER BY s.created_at DESC, s.id DESC
        ), '[]')
    FROM destination_secrets s
    WHERE s.destination_id = destinations.id AND (s.expires_at IS NULL OR s.expires_at > now())
) AS secrets"""

_COLUMNS = f"""id, tenant, name, url, owner, state, disabled_reason, ad_hoc, headers, timeout_seconds, attempts_max,
    deadline_seconds, schedule_seconds, base_seconds, cap_seconds, on_ambiguous, response_rules, created_at,
    updated_at, {_SECRETS}"""

_INSERT = Statement("""
INSERT INTO destinations (id, tenant, name, url, owner, ad_hoc, headers, timeout_seconds, attempts_max,
    deadline_seconds, schedule_seconds, base_seconds, cap_seconds, on_ambiguous, response_rules)
VALUES (:id, :tenant, :name, :url, :owner, :ad_hoc, CAST(:headers AS jsonb), :timeout_seconds, :attempts_max,
    :deadline_seconds, CAST(:schedule_seconds AS float8[]), :base_seconds, :cap_seconds, :on_ambiguous,
    CAST(:response_rules AS jsonb))
ON CONFLICT (tenant, url) WHERE ad_hoc DO NOTHING
RETURNING id
""")
# Not `now()`, when the transaction began: of two rotations, the one that waited for the other is the newer.
_INSERT_SECRET = Statement("""
INSERT INTO destination_secrets (id, destination_id, ciphertext, public_key, created_at)
VALUES (:id, :destination_id, :ciphertext, :public_key, clock_timestamp())
""")
_FIND = Statement(f"SELECT {_COLUMNS} FROM destinations WHERE id = :id AND tenant = :tenant")
_FIND_AD_HOC = Statement(f"SELECT {_COLUMNS} FROM destinations WHERE tenant = :tenant AND url = :url AND ad_hoc")
_LIST = Statement(f"""
SELECT {_COLUMNS} FROM destinations
WHERE tenant = :tenant AND (CAST(:before AS uuid) IS NULL OR id < CAST(:before AS uuid))
ORDER BY id DESC LIMIT :limit
""")


async def create(
    ledger: Ledger, values: Mapping[str, Any], secret: NewSecret, *, deed: audit.Deed
) -> StoredDestination | None:
    """Write a destination with its first secret; None when its ad-hoc URL exists already."""
    async with ledger.transaction() as connection:
        made = await connection.rows(_INSERT, _as_columns(values))
        if not made:
            return None
        await _insert_secret(connection, made[0]["id"], secret)
        await audit.record(connection, deed)
        written = await connection.rows(_FIND, {"id": made[0]["id"], "tenant": deed.tenant})
    return _stored(written[0])


async def _insert_secret(connection: Connection, destination_id: uuid.UUID, secret: NewSecret) -> None:
    values = {"id": secret.id, "ciphertext": secret.ciphertext, "public_key": secret.public_key}
    await connection.execute(_INSERT_SECRET, {**values, "destination_id": destination_id})


def _stored(row: Row) -> StoredDestination:
    secrets = tuple(
        StoredSecret(
            public_key=secret["public_key"],
            created_at=dt.datetime.fromisoformat(secret["created_at"]),
            expires_at=dt.datetime.fromisoformat(secret["expires_at"]) if secret["expires_at"] else None,
        )
        for secret in row["secrets"]
    )
    return StoredDestination(**{**row, "secrets": secrets})


async def find(ledger: Ledger, tenant: str, destination_id: uuid.UUID) -> StoredDestination | None:
    """Read one destination of the tenant."""
    async with ledger.statement() as connection:
        found = await connection.rows(_FIND, {"id": destination_id, "tenant": tenant})
    return _stored(found[0]) if found else None


async def find_ad_hoc(ledger: Ledger, tenant: str, url: str) -> StoredDestination | None:
    """Read the destination that a bare URL stands for. Index: `uq_destinations_ad_hoc`."""
    async with ledger.statement() as connection:
        found = await connection.rows(_FIND_AD_HOC, {"tenant": tenant, "url": url})
    return _stored(found[0]) if found else None


async def list_page(ledger: Ledger, tenant: str, *, before: uuid.UUID | None, limit: int) -> list[StoredDestination]:
    """Read one page, newest first. Index: `ix_destinations_tenant_id`."""
    async with ledger.statement() as connection:
        found = await connection.rows(_LIST, {"tenant": tenant, "before": before, "limit": limit})
    return [_stored(row) for row in found]


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
    statement = Statement(f"""
    UPDATE destinations SET {assignments}, updated_at = now() WHERE id = :id AND tenant = :tenant RETURNING {_COLUMNS}
    """)
    async with ledger.transaction() as connection:
        changed = await connection.rows(statement, {**_as_columns(changes), "id": destination_id, "tenant": tenant})
        if changed:
            await audit.record(connection, deed)
    return _stored(changed[0]) if changed else None


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
_PAUSE = Statement(f"""
UPDATE destinations SET state = 'paused', updated_at = now()
WHERE id = :id AND tenant = :tenant AND state = 'active' RETURNING {_COLUMNS}
""")
_RESUME = Statement(f"""
UPDATE destinations SET state = 'active', gated = true, updated_at = now()
WHERE id = :id AND tenant = :tenant AND state = 'paused' RETURNING {_COLUMNS}
""")
_ENABLE = Statement(f"""
UPDATE destinations SET state = 'active', disabled_reason = NULL, gated = true, updated_at = now()
WHERE id = :id AND tenant = :tenant AND state = 'disabled' RETURNING {_COLUMNS}
""")
_DISABLE = Statement("""
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
    ledger: Ledger, statement: Statement, deed: audit.Deed, destination_id: uuid.UUID
) -> StoredDestination | None:
    async with ledger.transaction() as connection:
        moved = await connection.rows(statement, {"id": destination_id, "tenant": deed.tenant})
        if moved:
            await audit.record(connection, deed)
    return _stored(moved[0]) if moved else None


async def disable(ledger: Ledger, deed: audit.Deed, destination_id: uuid.UUID) -> bool:
    """DISABLE: active or paused → disabled, for the deed's reason; answers whether it moved."""
    async with ledger.transaction() as connection:
        values = {"id": destination_id, "tenant": deed.tenant, "reason": deed.reason or "disabled"}
        moved = bool(await connection.rows(_DISABLE, values))
        if moved:
            await audit.record(connection, deed)
    return moved


# The lock is taken by a statement of its own: what a statement reads beside the row that it waited for
# is as it was before the wait.
_LOCK = Statement("SELECT id FROM destinations WHERE id = :id AND tenant = :tenant FOR NO KEY UPDATE")
_IN_FORCE = Statement("""
SELECT count(*) AS count, min(expires_at) AS ends_at FROM destination_secrets
WHERE destination_id = :id AND (expires_at IS NULL OR expires_at > now())
""")
_FORGET = Statement("""
DELETE FROM destination_secrets
WHERE destination_id = :id AND (CAST(:overlap_seconds AS float8) = 0 OR expires_at <= now())
""")
_OVERLAP = Statement("""
UPDATE destination_secrets
SET expires_at = LEAST(expires_at, clock_timestamp() + make_interval(secs => CAST(:overlap_seconds AS float8)))
WHERE destination_id = :id
""")
_TOUCH = Statement(
    f"UPDATE destinations SET updated_at = now() WHERE id = :id AND tenant = :tenant RETURNING {_COLUMNS}"
)


async def rotate(
    ledger: Ledger, destination_id: uuid.UUID, secret: NewSecret, overlap_seconds: float, *, deed: audit.Deed
) -> StoredDestination | TooManySecrets | None:
    """Put a secret in front; those before it sign along for the overlap at most, or are deleted where it is 0.

    Secrets that have ended are deleted as well: each rotation clears what the ones before it left. None
    when the tenant has no such destination. Guard: the destination's row lock, so that two rotations
    follow each other. Index: `ix_destination_secrets_destination_id`.
    """
    values = {"id": destination_id, "tenant": deed.tenant, "overlap_seconds": overlap_seconds}
    async with ledger.transaction() as connection:
        if not await connection.rows(_LOCK, values):
            return None
        [in_force] = await connection.rows(_IN_FORCE, values)
        if overlap_seconds > 0 and in_force["count"] >= limits.SECRETS_MAX:
            return TooManySecrets(in_force["ends_at"])
        await connection.execute(_FORGET, values)
        await connection.execute(_OVERLAP, values)
        await _insert_secret(connection, destination_id, secret)
        await audit.record(connection, deed)
        rotated = await connection.rows(_TOUCH, values)
    return _stored(rotated[0])
