"""STORY destinations: create, change, rotate, pause, resume, enable — and the ad-hoc one behind a bare URL."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from service import ed25519
from service.domain import limits, signing
from service.domain.address import UrlProblem, parse_url
from service.domain.delivery import OnAmbiguous
from service.domain.ids import Prefix, to_typeid
from service.domain.retry import BASE_SECONDS_DEFAULT, CAP_SECONDS_DEFAULT, DEADLINE_SECONDS_DEFAULT
from service.domain.signing import Scheme
from service.keyring import Keyring
from service.ledger import destinations
from service.ledger.audit import Deed
from service.ledger.destinations import NewSecret, StoredDestination, TooManySecrets
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
    """A destination with a new secret, which is told this once. None: a pair, whose private half is told to nobody."""

    destination: StoredDestination
    secret: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class SigningSecret:
    """A secret in the clear: a `v1` key with its text, or the seed of a `v1a` pair with its public key."""

    key: bytes = field(repr=False)  # a traceback may show what it passed through
    text: str | None = field(default=None, repr=False)
    public_key: str | None = None

    @property
    def scheme(self) -> Scheme:
        """Which signatures it makes."""
        return Scheme.V1 if self.public_key is None else Scheme.V1A


def read_secret(text: str) -> SigningSecret | None:
    """The secret that a `whsec_` or `whsk_` text stands for, or None."""
    key = signing.parse_secret(text)
    if key is not None:
        return SigningSecret(key, text)
    seed = ed25519.seed_of(text)
    return None if seed is None else _pair(seed)


def _pair(seed: bytes) -> SigningSecret:
    return SigningSecret(seed, public_key=signing.format_public_key(ed25519.public_key(seed)))


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

    async def create(self, tenant: str, actor: str, values: Mapping[str, Any], secret: SigningSecret | None) -> Created:
        """Write a destination; a `v1` secret is made here unless another is brought along."""
        secret = secret or self.new_secret(Scheme.V1)
        made = await self._write(tenant, actor, values, secret)
        assert made is not None, "only an ad-hoc URL can exist already"
        return Created(made, secret.text)

    def new_secret(self, scheme: Scheme) -> SigningSecret:
        """A secret that nobody has seen."""
        match scheme:
            case Scheme.V1:
                text = signing.new_secret(self._random_bytes(signing.SECRET_BYTES_NEW))
                made = read_secret(text)
                assert made is not None, "it was just made"
                return made
            case Scheme.V1A:
                return _pair(self._random_bytes(signing.SEED_BYTES))
            case _:
                assert_never(scheme)

    async def ad_hoc(self, tenant: str, actor: str, url: str) -> uuid.UUID:
        """The destination that a bare URL stands for: one per tenant and URL, made on first use."""
        known = self._ad_hoc_ids.get((tenant, url))
        if known is not None:
            return known
        found = await destinations.find_ad_hoc(self._ledger, tenant, url)
        if found is None:
            values = {"name": name_of(url), "url": url, "ad_hoc": True}
            found = await self._write(tenant, actor, values, self.new_secret(Scheme.V1))
        # Another process was quicker: what it made is there now.
        found = found or await destinations.find_ad_hoc(self._ledger, tenant, url)
        assert found is not None, "the insert was refused because it exists"
        self._ad_hoc_ids[(tenant, url)] = found.id
        if len(self._ad_hoc_ids) > limits.AD_HOC_CACHE_ENTRIES_MAX:
            self._ad_hoc_ids.popitem(last=False)
        return found.id

    async def _write(
        self, tenant: str, actor: str, values: Mapping[str, Any], secret: SigningSecret
    ) -> StoredDestination | None:
        destination_id = self._new_id()
        columns = {**DEFAULTS, **values, "id": destination_id, "tenant": tenant}
        deed = Deed(tenant, actor, "destination.create", to_typeid(Prefix.DESTINATION, destination_id))
        return await destinations.create(self._ledger, columns, self._seal(tenant, destination_id, secret), deed=deed)

    def _seal(self, tenant: str, destination_id: uuid.UUID, secret: SigningSecret) -> NewSecret:
        sealed = self._keyring.encrypt(
            secret.key, tenant=tenant, destination_id=destination_id, public_key=secret.public_key
        )
        return NewSecret(self._new_id(), sealed, secret.public_key)

    async def rotate(
        self, tenant: str, actor: str, destination_id: uuid.UUID, secret: SigningSecret, overlap_seconds: float
    ) -> Created | TooManySecrets | None:
        """Sign with a new secret first, and along with those before it until the overlap is over; 0 ends them now.

        The next attempt is signed so, whenever its delivery was accepted. None: no such destination.
        """
        detail = {"signature": secret.scheme.value, "public_key": secret.public_key, "overlap_seconds": overlap_seconds}
        subject = to_typeid(Prefix.DESTINATION, destination_id)
        deed = Deed(tenant, actor, "destination.rotate_secret", subject, detail=detail)
        sealed = self._seal(tenant, destination_id, secret)
        rotated = await destinations.rotate(self._ledger, destination_id, sealed, overlap_seconds, deed=deed)
        return Created(rotated, secret.text) if isinstance(rotated, StoredDestination) else rotated

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


def name_of(url: str) -> str:
    """A name for people where none is given: the URL's host alone, because the rest may hold a credential."""
    parsed = parse_url(url)
    assert not isinstance(parsed, UrlProblem), "URLs are validated where they come in"
    return parsed.host[: limits.NAME_CHARS_MAX]
