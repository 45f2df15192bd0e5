"""Every setting of every role, in one frozen object, read from the environment once.

The rule this module keeps: relations between settings are checked here, when a process starts,
so that no story has to wonder whether a lease is longer than a timeout.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.domain import limits
from service.domain.address import AllowList, parse_proxy


class Settings(BaseSettings):
    """The environment of a role. Each field is read from the variable of its name in capitals."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    database_url: SecretStr = Field(
        description="The Postgres ledger, `postgresql://user:password@host:port/name`. Required by every role.",
    )
    redis_url: SecretStr = Field(
        description="The Redis that carries hints, `redis://host:port/0`. Losing it loses nothing.",
    )
    secret_keys: SecretStr = Field(
        description="The keyring for signing secrets at rest: `id:base64-of-32-bytes`, comma-separated; "
        "the first encrypts, all decrypt. `hookledger keys keyring` makes one.",
    )

    api_host: str = Field("127.0.0.1", description="The address the API binds.")
    api_port: int = Field(8080, ge=0, le=65535, description="The port the API binds.")
    api_reuse_port: bool = Field(False, description="Let several API processes of one machine share the port.")
    api_drain_seconds: float = Field(
        2.0,
        ge=0,
        le=60,
        description="How long a stopping API, not ready any more, still answers new requests.",
    )
    database_pool_connections_max: int = Field(
        5, ge=1, le=100, description="Postgres connections one process holds at most."
    )
    database_acquire_timeout_seconds: float = Field(
        2.0, gt=0, description="How long a request waits for a connection before it is answered 503."
    )
    database_statement_timeout_seconds: float = Field(10.0, gt=0, description="How long one ledger statement may run.")

    payload_bytes_max: int = Field(
        limits.PAYLOAD_BYTES_MAX_DEFAULT, ge=1, le=limits.PAYLOAD_BYTES_MAX, description="The largest payload accepted."
    )
    idempotency_window_seconds: int = Field(
        7 * 86_400, ge=60, description="How long an Idempotency-Key is remembered, at least."
    )

    worker_slots: int = Field(256, ge=1, le=10_000, description="Attempts one worker has in flight at most.")
    worker_grace_seconds: float = Field(
        25.0,
        ge=0,
        description="How long a stopping worker lets attempts finish; then they are broken off: `unknown`.",
    )
    lease_margin_seconds: float = Field(
        15.0, ge=5, description="A lease lasts the destination's timeout plus this, for settling."
    )
    heartbeat_seconds: float = Field(2.0, gt=0, description="How often a worker says that it lives.")
    heartbeat_stale_seconds: float = Field(
        10.0, gt=0, description="A worker unheard of for this long has lost its claims."
    )
    dispatch_interval_seconds: float = Field(
        0.25, gt=0, le=10, description="The pause between two passes of the dispatcher."
    )
    hint_visibility_seconds: float = Field(
        2.0, gt=0, le=60, description="How long a hint may take before the delivery is hinted again (short queue)."
    )

    egress_allow: str = Field(
        "",
        description="Non-public ranges that destinations may use, `network:port` or `network:*`, comma-separated "
        "(`127.0.0.0/8:*`). Empty: none.",
    )
    egress_proxy: SecretStr = Field(
        SecretStr(""),
        description="The proxy that a network requires for the way out, `http://[user:password@]host:port`. It is used "
        "for every destination, by CONNECT ([egress.md](egress.md#an-egress-proxy)). Empty: none.",
    )

    log_format: Annotated[str, Field(pattern="^(json|console)$")] = Field(
        "json", description="`json`: one object per line; `console`: for people."
    )
    log_level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = Field(
        "info", description="The least severe level that is written."
    )

    @field_validator("database_url")
    @classmethod
    def _postgres_only(cls, value: SecretStr) -> SecretStr:
        if not value.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise ValueError("must start with postgresql://")
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis_only(cls, value: SecretStr) -> SecretStr:
        if not value.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must start with redis://, rediss:// or unix://")
        return value

    @field_validator("secret_keys")
    @classmethod
    def _keyring_is_usable(cls, value: SecretStr) -> SecretStr:
        parse_keyring(value.get_secret_value())
        return value

    @field_validator("egress_allow")
    @classmethod
    def _allow_list_is_readable(cls, value: str) -> str:
        AllowList.parse(value)
        return value

    @field_validator("egress_proxy")
    @classmethod
    def _proxy_is_readable(cls, value: SecretStr) -> SecretStr:
        parse_proxy(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _relations_hold(self) -> Self:
        if self.heartbeat_stale_seconds < 3 * self.heartbeat_seconds:
            raise ValueError("HEARTBEAT_STALE_SECONDS must be at least three times HEARTBEAT_SECONDS")
        if self.heartbeat_stale_seconds <= limits.CLAIM_YOUNG_SECONDS:
            raise ValueError(f"HEARTBEAT_STALE_SECONDS must be more than {limits.CLAIM_YOUNG_SECONDS:g}")
        return self


def parse_keyring(text: str) -> dict[str, bytes]:
    """Read `id:base64,id:base64` into an ordered ring of 32-byte keys. Raises ValueError in plain words."""
    ring: dict[str, bytes] = {}
    for part in text.split(","):
        key_id, _, encoded = part.strip().partition(":")
        try:
            key = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise ValueError("each entry must read id:base64-of-32-bytes") from error
        if not key_id.isascii() or not key_id.isalnum() or len(key_id) > 16 or len(key) != 32:
            raise ValueError("each entry must read id:base64-of-32-bytes, the id 1-16 letters or digits")
        if key_id in ring:
            raise ValueError(f"the key id {key_id} stands twice")
        ring[key_id] = key
    return ring
