"""STORY destinations: create, change, pause, resume, enable — and the ad-hoc one behind a bare URL."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from service.domain import limits, signing
from service.domain.address import UrlProblem, parse_url
from service.domain.delivery import OnAmbiguous
from service.domain.ids import Prefix, to_typeid
from service.domain.retry import BASE_SECONDS_DEFAULT, CAP_SECONDS_DEFAULT, DEADLINE_SECONDS_DEFAULT
from service.keyring import Keyring
from service.ledger import destinations
from service.ledger.audit import Deed
from service.ledger.destinations import NewSecret, StoredDestination
from service.ledger.session import Ledger

# What a destination is made with where its creator says nothing.
DEFAULTS: Mapping[str, Any] = {
    "owner": None,
    "ad_hoc": False,
    "headers": {},
    "timeout_seconds": limits.TIMEOUT_SECONDS_DEFAULT,
    "attempts_max": limits.ATTEMPTS_MAX_DEFAULT,
    "deadline_seconds": DEADLINE_SECONDS_DEFAULT,
    "schedule_seconds": None,
    "base_seconds": BASE_SECONDS_DEFAULT,
    "cap_seconds": CAP_SECONDS_DEFAULT,
    "on_ambiguous": OnAmbiguous.RETRY.value,
    "response_rules": {},
}


@dataclass(frozen=True, slots=True)
class Created:
    """A new destination and its secret, which is told this once."""

    destination: StoredDestination
    secret: str


class Destinations:
    """One process's dealings with destinations. Values are validated before they come here."""

    def __init__(
        self,
        ledger: Ledger,
        keyring: Keyring,
        new_id: Callable[[], uuid.UUID],
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._ledger = ledger
        self._keyring = keyring
        self._new_id = new_id
        self._random_bytes = random_bytes
        # An ad-hoc destination's URL never changes and it is never removed, so what is found stays true.
        self._ad_hoc_ids: OrderedDict[tuple[str, str], uuid.UUID] = OrderedDict()

    async def create(self, tenant: str, actor: str, values: Mapping[str, Any], secret: str | None) -> Created:
        """Write a destination; the secret is made here unless one is brought along."""
        text = secret or signing.new_secret(self._random_bytes(signing.SECRET_BYTES_NEW))
        made = await self._write(tenant, actor, values, text)
        assert made is not None, "only an ad-hoc URL can exist already"
        return Created(made, text)

    async def ad_hoc(self, tenant: str, actor: str, url: str) -> uuid.UUID:
        """The destination that a bare URL stands for: one per tenant and URL, made on first use."""
        known = self._ad_hoc_ids.get((tenant, url))
        if known is not None:
            return known
        found = await destinations.find_ad_hoc(self._ledger, tenant, url)
        if found is None:
            secret = signing.new_secret(self._random_bytes(signing.SECRET_BYTES_NEW))
            found = await self._write(tenant, actor, {"name": _ad_hoc_name(url), "url": url, "ad_hoc": True}, secret)
        # Another process was quicker: what it made is there now.
        found = found or await destinations.find_ad_hoc(self._ledger, tenant, url)
        assert found is not None, "the insert was refused because it exists"
        self._ad_hoc_ids[(tenant, url)] = found.id
        if len(self._ad_hoc_ids) > limits.AD_HOC_CACHE_ENTRIES_MAX:
            self._ad_hoc_ids.popitem(last=False)
        return found.id

    async def _write(
        self, tenant: str, actor: str, values: Mapping[str, Any], secret_text: str
    ) -> StoredDestination | None:
        destination_id = self._new_id()
        secret = signing.parse_secret(secret_text)
        assert secret is not None, "secrets are validated where they come in"
        sealed = self._keyring.encrypt(secret, tenant=tenant, destination_id=destination_id)
        columns = {**DEFAULTS, **values, "id": destination_id, "tenant": tenant}
        deed = Deed(tenant, actor, "destination.create", to_typeid(Prefix.DESTINATION, destination_id))
        return await destinations.create(self._ledger, columns, NewSecret(self._new_id(), sealed), deed=deed)

    async def find(self, tenant: str, destination_id: uuid.UUID) -> StoredDestination | None:
        """One destination of the tenant."""
        return await destinations.find(self._ledger, tenant, destination_id)

    async def list_page(self, tenant: str, *, before: uuid.UUID | None, limit: int) -> list[StoredDestination]:
        """A page, newest first."""
        return await destinations.list_page(self._ledger, tenant, before=before, limit=limit)

    async def change(
        self, tenant: str, actor: str, destination_id: uuid.UUID, changes: Mapping[str, Any]
    ) -> StoredDestination | None:
        """Set what is given; deliveries that wait are sent by the new values."""
        subject = to_typeid(Prefix.DESTINATION, destination_id)
        # Header values may be credentials: the record says that they changed, not to what.
        deed = Deed(tenant, actor, "destination.change", subject, detail={"fields": sorted(changes)})
        return await destinations.change(self._ledger, tenant, destination_id, changes, deed=deed)

    async def pause(self, tenant: str, actor: str, destination_id: uuid.UUID) -> StoredDestination | None:
        """Send nothing until it is resumed; accept goes on. None when it is not active."""
        return await destinations.pause(self._ledger, _deed(tenant, actor, "pause", destination_id), destination_id)

    async def resume(self, tenant: str, actor: str, destination_id: uuid.UUID) -> StoredDestination | None:
        """Send again what waited. None when it is not paused."""
        return await destinations.resume(self._ledger, _deed(tenant, actor, "resume", destination_id), destination_id)

    async def enable(self, tenant: str, actor: str, destination_id: uuid.UUID) -> StoredDestination | None:
        """Take deliveries again. None when it is not disabled."""
        return await destinations.enable(self._ledger, _deed(tenant, actor, "enable", destination_id), destination_id)


def _deed(tenant: str, actor: str, verb: str, destination_id: uuid.UUID) -> Deed:
    return Deed(tenant, actor, f"destination.{verb}", to_typeid(Prefix.DESTINATION, destination_id))


def _ad_hoc_name(url: str) -> str:
    """What lists show for a bare URL: its host alone, because a path or a query may hold a credential."""
    parsed = parse_url(url)
    assert not isinstance(parsed, UrlProblem), "URLs are validated where they come in"
    return parsed.host_header[: limits.NAME_CHARS_MAX]
