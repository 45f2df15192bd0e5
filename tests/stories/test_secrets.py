"""Signing secrets over time: what a receiver sees before, during and after a rotation, and what nobody sees."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import uuid
from collections.abc import AsyncIterator

import pytest
import standardwebhooks
import svix.webhooks
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from service import ed25519, redrive
from service.bootstrap import IdSource
from service.clock import SystemClock
from service.deliver import Bounds, Deliverer
from service.destinations import Created, read_secret
from service.domain import limits
from service.domain.address import AllowList
from service.domain.signing import Scheme
from service.egress.sender import HttpSender
from service.ledger.dead_letters import ByIds
from service.ledger.destinations import TooManySecrets
from tests.wire.receiver import Received, Receiver, ok
from tests.world import TENANT, World, captured_logs

ACTOR = "key_test"
DAY = 86_400.0


@pytest.fixture
async def worker(world: World) -> AsyncIterator[Deliverer]:
    """A worker with the real sender and the real clock: the receivers' libraries judge by theirs."""
    sender = HttpSender(AllowList.parse("127.0.0.0/8:*"))
    bounds = Bounds(slots_count=5, lease_margin_seconds=15.0, patience_seconds=0.05)
    yield Deliverer(
        world.ledger, sender, world.keyring, SystemClock(), bounds, world.tallies, worker="w", jitter=lambda: 0.5
    )
    await sender.close()


async def work(world: World, worker: Deliverer) -> None:
    await world.hints.drain()
    await worker.deliver(world.queue.take_all())


async def created(world: World, url: str = "https://receiver.example/", scheme: Scheme = Scheme.V1) -> Created:
    secret = world.destinations.new_secret(scheme)
    return await world.destinations.create(TENANT, ACTOR, {"name": "receiver", "url": url}, secret)


async def rotated(
    world: World, destination_id: uuid.UUID, overlap_seconds: float = DAY, scheme: Scheme = Scheme.V1
) -> Created:
    secret = world.destinations.new_secret(scheme)
    made = await world.destinations.rotate(TENANT, ACTOR, destination_id, secret, overlap_seconds)
    assert isinstance(made, Created)
    return made


async def overlap_passes(world: World, seconds: float = DAY) -> None:
    """The database's clock cannot be told the time: the ends come nearer instead."""
    await world.execute(f"UPDATE destination_secrets SET expires_at = expires_at - make_interval(secs => {seconds})")


def accepts(secret: str | None, request: Received) -> bool:
    """Whether a receiver that holds this `whsec_` secret takes the request, by both reference libraries."""
    assert secret is not None
    headers = {name.decode().lower(): value.decode() for name, value in request.headers}
    verdicts = set()
    for library in (standardwebhooks, svix.webhooks):
        try:
            library.Webhook(secret).verify(request.body, headers)
            verdicts.add(True)
        except library.WebhookVerificationError:
            verdicts.add(False)
    [verdict] = verdicts
    return verdict


def accepts_a(public_key: str | None, request: Received) -> bool:
    """Whether a receiver that holds this `whpk_` key takes the request; the signed bytes are put together here."""
    assert public_key is not None
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key.removeprefix("whpk_")))
    [webhook_id], [timestamp] = request.values("webhook-id"), request.values("webhook-timestamp")
    signed = webhook_id + b"." + timestamp + b"." + request.body
    for entry in request.values("webhook-signature")[0].split(b" "):
        version, _, signature = entry.partition(b",")
        if version == b"v1a":
            try:
                key.verify(base64.b64decode(signature), signed)
            except InvalidSignature:
                continue
            return True
    return False


def entries(request: Received) -> list[bytes]:
    """The schemes of the signatures, in their order."""
    [header] = request.values("webhook-signature")
    return [entry.partition(b",")[0] for entry in header.split(b" ")]


# On the wire


async def test_a_rotation_on_the_wire_before_during_and_after_the_overlap(world: World, worker: Deliverer) -> None:
    """Row of standard-webhooks.md: rotation, sign with the new and the old secret for a set period."""
    async with Receiver(ok()) as receiver:
        old = await created(world, receiver.url)
        await world.accepted(old.destination.id)
        await work(world, worker)
        new = await rotated(world, old.destination.id)
        await world.accepted(old.destination.id)
        await work(world, worker)
        await overlap_passes(world)
        await world.accepted(old.destination.id)
        await work(world, worker)
        before, during, after = receiver.requests
    assert (accepts(old.secret, before), accepts(new.secret, before)) == (True, False)
    assert (accepts(old.secret, during), accepts(new.secret, during)) == (True, True)
    assert (accepts(old.secret, after), accepts(new.secret, after)) == (False, True)
    assert [len(entries(request)) for request in (before, during, after)] == [1, 2, 1]


async def test_a_delivery_accepted_before_a_rotation_is_signed_with_both_secrets_after_it(
    world: World, worker: Deliverer
) -> None:
    async with Receiver(ok()) as receiver:
        old = await created(world, receiver.url)
        await world.accepted(old.destination.id)
        new = await rotated(world, old.destination.id)
        await work(world, worker)
        [request] = receiver.requests
    assert accepts(old.secret, request)
    assert accepts(new.secret, request)


async def test_a_retry_is_signed_with_the_secrets_of_its_own_moment(world: World, worker: Deliverer) -> None:
    async with Receiver(ok(status="503 Later"), ok()) as receiver:
        old = await created(world, receiver.url)
        await world.accepted(old.destination.id)
        await work(world, worker)
        new = await rotated(world, old.destination.id, overlap_seconds=0)
        await world.let_pass(60)
        await world.dispatch()
        await work(world, worker)
        first, second = receiver.requests
    assert (accepts(old.secret, first), accepts(new.secret, first)) == (True, False)
    assert (accepts(old.secret, second), accepts(new.secret, second)) == (False, True)
    assert first.values("webhook-id") == second.values("webhook-id")
    assert first.body == second.body


async def test_a_redrive_after_a_rotation_is_signed_with_the_new_secret(world: World, worker: Deliverer) -> None:
    async with Receiver(ok(status="401 No"), ok()) as receiver:
        old = await created(world, receiver.url)
        delivery_id = await world.accepted(old.destination.id, body=b'{"n": 1.50}')
        await work(world, worker)
        new = await rotated(world, old.destination.id)
        await overlap_passes(world)
        order = redrive.Order(ByIds((delivery_id,)), "the receiver lost its secret")
        await redrive.start(world.ledger, TENANT, ACTOR, order, key=None, new_id=world.new_id)
        await world.dispatch()
        await world.dispatch()
        await work(world, worker)
        first, again = receiver.requests
    assert (accepts(old.secret, again), accepts(new.secret, again)) == (False, True)
    assert (first.body, first.values("webhook-id")) == (again.body, again.values("webhook-id"))
    assert (await world.view(delivery_id))["state"] == "delivered"


async def test_an_overlap_of_zero_ends_every_earlier_secret_with_the_next_attempt(
    world: World, worker: Deliverer
) -> None:
    async with Receiver(ok()) as receiver:
        first = await created(world, receiver.url)
        second = await rotated(world, first.destination.id)
        third = await rotated(world, first.destination.id, overlap_seconds=0)
        await world.accepted(first.destination.id)
        await work(world, worker)
        [request] = receiver.requests
    assert [accepts(made.secret, request) for made in (first, second, third)] == [False, False, True]
    assert len(await world.fetch("SELECT id FROM destination_secrets")) == 1


async def test_a_destination_moves_from_v1_to_v1a_and_its_receivers_with_it(world: World, worker: Deliverer) -> None:
    async with Receiver(ok()) as receiver:
        shared = await created(world, receiver.url)
        pair = await rotated(world, shared.destination.id, scheme=Scheme.V1A)
        newer = await rotated(world, shared.destination.id, scheme=Scheme.V1A)
        await world.accepted(shared.destination.id, body=bytes(range(256)), content_type="application/octet-stream")
        await world.accepted(shared.destination.id)
        await work(world, worker)
        await overlap_passes(world)
        await world.accepted(shared.destination.id)
        await work(world, worker)
        *during, after = receiver.requests
    assert pair.secret is None
    keys = [made.destination.secrets[0].public_key for made in (pair, newer)]
    for request in during:
        assert entries(request) == [b"v1a", b"v1a", b"v1"]
        assert [accepts_a(key, request) for key in keys] == [True, True]
    assert accepts(shared.secret, next(request for request in during if request.body == b'{"n":1.0}'))
    assert entries(after) == [b"v1a"]
    assert [accepts_a(key, after) for key in keys] == [False, True]


# In the ledger


async def signed_by(world: World, destination_id: uuid.UUID) -> int:
    """How many signatures the next attempt carries."""
    await world.accepted(destination_id)
    await world.work()
    return len(dict(world.sender.requests[-1].headers)["webhook-signature"].split(" "))


async def test_the_newest_secret_signs_first(world: World) -> None:
    made = await created(world)
    schemes = (Scheme.V1A, Scheme.V1, Scheme.V1A)
    all_made = [made, *[await rotated(world, made.destination.id, scheme=scheme) for scheme in schemes]]
    created_ats = [one.destination.secrets[0].created_at for one in all_made]
    found = await world.destinations.find(TENANT, made.destination.id)
    assert found is not None
    assert [secret.created_at for secret in found.secrets] == created_ats[::-1]
    assert [secret.public_key is not None for secret in found.secrets] == [True, False, True, False]
    await world.accepted(made.destination.id)
    await world.work()
    signature = dict(world.sender.requests[0].headers)["webhook-signature"]
    assert [entry.split(",")[0] for entry in signature.split(" ")] == ["v1a", "v1", "v1a", "v1"]


async def test_the_number_of_secrets_is_bounded_and_ending_them_all_is_always_possible(world: World) -> None:
    made = await created(world)
    for _ in range(limits.SECRETS_MAX - 1):
        await rotated(world, made.destination.id)
    assert await signed_by(world, made.destination.id) == limits.SECRETS_MAX
    before = await world.destinations.find(TENANT, made.destination.id)
    secret = world.destinations.new_secret(Scheme.V1)
    refused = await world.destinations.rotate(TENANT, ACTOR, made.destination.id, secret, 1.0)
    assert before is not None
    assert isinstance(refused, TooManySecrets)
    assert refused.ends_at == before.secrets[-1].expires_at
    assert await world.destinations.find(TENANT, made.destination.id) == before
    await rotated(world, made.destination.id, overlap_seconds=0)
    assert await signed_by(world, made.destination.id) == 1


async def test_secrets_that_have_ended_make_room_and_are_deleted_by_the_next_rotation(world: World) -> None:
    made = await created(world)
    for _ in range(2 * limits.SECRETS_MAX):
        await rotated(world, made.destination.id)
        await overlap_passes(world)
    assert len(await world.fetch("SELECT id FROM destination_secrets")) == 2
    assert await signed_by(world, made.destination.id) == 1


async def test_a_later_rotation_may_shorten_an_overlap_and_never_lengthens_it(world: World) -> None:
    made = await created(world)
    long = (await rotated(world, made.destination.id, overlap_seconds=DAY)).destination.secrets
    longer = (await rotated(world, made.destination.id, overlap_seconds=2 * DAY)).destination.secrets
    assert longer[2].expires_at == long[1].expires_at
    short = (await rotated(world, made.destination.id, overlap_seconds=60)).destination.secrets
    ends = [secret.expires_at - short[0].created_at for secret in short[1:] if secret.expires_at]
    assert len(ends) == 3
    assert all(end < dt.timedelta(seconds=61) for end in ends)


async def test_rotations_at_once_follow_each_other_and_one_secret_is_left_without_an_end(world: World) -> None:
    made = await created(world)
    secrets = [world.destinations.new_secret(Scheme.V1) for _ in range(6)]
    answers = await asyncio.gather(
        *(world.destinations.rotate(TENANT, ACTOR, made.destination.id, secret, DAY) for secret in secrets)
    )
    done = [answer for answer in answers if isinstance(answer, Created)]
    assert len(done) == limits.SECRETS_MAX - 1
    assert all(isinstance(answer, TooManySecrets) for answer in answers if answer not in done)
    found = await world.destinations.find(TENANT, made.destination.id)
    assert found is not None
    assert [secret.expires_at is None for secret in found.secrets] == [True, False, False, False]


async def test_another_tenants_destination_is_not_rotated(world: World) -> None:
    made = await created(world)
    secret = world.destinations.new_secret(Scheme.V1)
    assert await world.destinations.rotate("other", ACTOR, made.destination.id, secret, 0) is None
    assert len(made.destination.secrets) == 1
    assert await world.destinations.rotate(TENANT, ACTOR, IdSource()(), secret, 0) is None


async def test_two_destinations_never_get_the_same_secret(world: World) -> None:
    """Row of standard-webhooks.md: a key is unique per destination."""
    made = [await created(world, scheme=scheme) for scheme in (Scheme.V1, Scheme.V1A) for _ in range(5)]
    assert len({one.secret or one.destination.secrets[0].public_key for one in made}) == 10


# What nobody sees


async def test_a_seed_is_never_taken_for_a_v1_secret_nor_for_another_pair(world: World) -> None:
    """A version that knows no pairs reads such a row as here: it sends nothing, and charges nobody."""
    made = await created(world, scheme=Scheme.V1A)
    public_key = made.destination.secrets[0].public_key
    for other in (None, "whpk_" + base64.b64encode(bytes(32)).decode()):
        await world.execute("UPDATE destination_secrets SET public_key = :other", {"other": other})
        delivery_id = await world.accepted(made.destination.id)
        await world.work()
        assert world.sender.requests == []
        row = await world.view(delivery_id)
        assert (row["state"], row["last_outcome"], row["attempts_max"]) == ("pending", "not_sent", 19)
    await world.execute("UPDATE destination_secrets SET public_key = :public_key", {"public_key": public_key})
    assert await signed_by(world, made.destination.id) == 1


async def test_nothing_of_a_secret_is_in_logs_reads_records_or_reprs(world: World) -> None:
    with captured_logs() as logs:
        shared = await created(world)
        pair = await rotated(world, shared.destination.id, scheme=Scheme.V1A)
        again = await rotated(world, shared.destination.id)
        assert await signed_by(world, shared.destination.id) == 3
        await world.execute("UPDATE destination_secrets SET ciphertext = 'other:0123456789abcdef'")
        await world.accepted(shared.destination.id)
        await world.work()
    assert {entry["event"] for entry in logs} >= {"attempt.settled", "secret.unreadable"}
    audit = await world.fetch("SELECT * FROM audit_log")
    rows = await world.fetch("SELECT * FROM destination_secrets")
    told = repr([logs, audit, rows, await world.destinations.find(TENANT, shared.destination.id), shared, pair, again])
    for made in (shared, again):
        assert made.secret is not None
        secret = read_secret(made.secret)
        assert secret is not None
        assert made.secret.removeprefix("whsec_") not in told + repr(secret)
        assert repr(secret.key) not in told + repr(secret)
    [key_a] = {row["public_key"] for row in rows} - {None}
    assert key_a == pair.destination.secrets[0].public_key
    assert [record["detail"].get("overlap_seconds") for record in audit][-2:] == [DAY, DAY]


async def test_a_seed_lies_encrypted_in_the_ledger(world: World) -> None:
    seed = bytes(range(100, 132))
    text = "whsk_" + base64.b64encode(seed + ed25519.public_key(seed)).decode()
    secret = read_secret(text)
    assert secret is not None
    await world.destinations.create(TENANT, ACTOR, {"name": "n", "url": "https://r.example/"}, secret)
    [row] = await world.fetch("SELECT ciphertext FROM destination_secrets")
    assert seed not in row["ciphertext"]
    assert row["ciphertext"].startswith(b"k1:")
