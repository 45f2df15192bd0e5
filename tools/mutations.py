"""Takes one guarantee away at a time and sees whether the tests notice: `./run mutate`.

A mutation is an edit to a copy of the project, and the tests that must go red for it. It is noticed
only if a test fails: tests that do not even load would be red for a reason of their own. Names may
be given, to run these alone; `--list` shows them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_LEFT_OUT: Final = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
_TESTS_FAILED: Final = 1
_SECONDS_MAX: Final = 300.0


@dataclass(frozen=True, slots=True)
class Mutation:
    """What is taken away: each edit replaces a text that stands exactly once in `file`."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Edit the file below `root`. Raises ValueError where the code has moved on."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        for before, after in self.edits:
            if text.count(before) != 1:
                raise ValueError(f"{self.name}: {self.file} does not hold this exactly once: {before}")
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")


_MERGE = "ORDER BY {columns}\n    ON CONFLICT ({columns}) DO UPDATE SET {written} = excluded.{written}"
_UNDONE = """
import contextlib

class _Undo(Exception):
    pass

async def _undone(ledger, values):
    with contextlib.suppress(_Undo):
        async with ledger.transaction() as connection:
            claimed = await connection.rows(_CLAIM.everywhere, values)
            raise _Undo
    return claimed

"""

MUTATIONS: Final = (
    Mutation(
        "the fence: an attempt is settled by its number",
        "service/ledger/attempting.py",
        ((" AND d.state = 'delivering' AND d.attempt_count = s.number", " AND d.state = 'delivering'"),),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "the second fence: an attempt is recorded once",
        "service/ledger/attempting.py",
        (
            (" AND d.state = 'delivering' AND d.attempt_count = s.number", " AND d.state = 'delivering'"),
            ("FROM moved\nRETURNING", "FROM moved ON CONFLICT DO NOTHING\nRETURNING"),
        ),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "the committed intent: a claim is committed before a byte is sent",
        "service/ledger/attempting.py",
        (
            ("await _CLAIM.rows(ledger, delivery_ids, values)", "await _undone(ledger, values)"),
            ("async def claim(", _UNDONE + "async def claim("),
        ),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "the identity: one delivery for an event at a destination",
        "service/ledger/accepting.py",
        (
            (
                "ORDER BY destination_id, event_id\n    ON CONFLICT DO NOTHING",
                _MERGE.format(columns="destination_id, event_id", written="delivery_id"),
            ),
        ),
        ("tests/stories/test_accept.py",),
    ),
    Mutation(
        "the key: one delivery for an Idempotency-Key",
        "service/ledger/accepting.py",
        (
            (
                "FROM input ORDER BY tenant, key\n    ON CONFLICT DO NOTHING",
                "FROM input " + _MERGE.format(columns="tenant, key", written="fingerprint"),
            ),
        ),
        ("tests/stories/test_accept.py",),
    ),
    Mutation(
        "one claim: only what is pending is claimed",
        "service/ledger/attempting.py",
        (
            ("AND d.state = 'pending' AND d.next_attempt_at <= now()", "AND d.next_attempt_at <= now()"),
            ("d.id = chosen.id AND d.state = 'pending'\n", "d.id = chosen.id\n"),
        ),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "nothing before its time",
        "service/ledger/attempting.py",
        (("AND d.state = 'pending' AND d.next_attempt_at <= now()", "AND d.state = 'pending'"),),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "nothing after a cancel, and no cancel after the end",
        "service/ledger/operating.py",
        (
            (
                "completed_at = now()\nWHERE id = :id AND tenant = :tenant AND state = 'pending'",
                "completed_at = now()\nWHERE id = :id AND tenant = :tenant",
            ),
            ('if found[0]["state"] != needed:', "if needed is None:"),
        ),
        ("tests/stories/test_operating.py",),
    ),
    Mutation(
        "a lost worker's attempt is unknown, not failed",
        "service/dispatch.py",
        (("outcome=Outcome.UNKNOWN", "outcome=Outcome.RETRYABLE"),),
        ("tests/stories/test_dispatch.py",),
    ),
    Mutation(
        "three lost workers are poison",
        "service/domain/retry.py",
        (("if budget.crashed_claims + 1 >= limits.CRASHED_CLAIMS_MAX:", "if budget.crashed_claims > 999:"),),
        ("tests/stories/test_dispatch.py", "tests/unit/test_retry.py"),
    ),
    Mutation(
        "a paused worker does not send on an old claim",
        "service/deliver.py",
        (("if self._clock.monotonic() - asked_at > self._bounds.claim_young_seconds:", "if asked_at < 0:"),),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "an outcome is written again while the ledger is away",
        "service/deliver.py",
        (("            if self._clock.monotonic() > settle_until:\n", "            if settle_until > 0:\n"),),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "a late answer overwrites no outcome",
        "service/ledger/attempting.py",
        ((" AND phase IS NULL AND late_result IS NULL", " AND late_result IS NULL"),),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "a late answer is told once",
        "service/ledger/attempting.py",
        ((" AND phase IS NULL AND late_result IS NULL", " AND phase IS NULL"),),
        ("tests/stories/test_deliver.py", "tests/stories/test_fencing.py"),
    ),
    Mutation(
        "only what is dead is redriven",
        "service/ledger/redrives.py",
        (
            ("AND d.tenant = :tenant AND d.state = 'dead'\n", "AND d.tenant = :tenant\n"),
            (
                " AND l.completed_at <= CAST(:created_at AS timestamptz)",
                " AND CAST(:created_at AS timestamptz) < now()",
            ),
        ),
        ("tests/stories/test_redrive.py",),
    ),
    Mutation(
        "a redrive begins the schedule anew",
        "service/ledger/redrives.py",
        ((", uncharged_count = d.attempt_count", ""),),
        ("tests/stories/test_redrive.py",),
    ),
    Mutation(
        "the hint is repaired: what was hinted is looked at again",
        "service/ledger/dispatching.py",
        (
            (
                "SET wake_at = now() + make_interval(secs => :visibility_seconds)",
                "SET wake_at = 'infinity'::timestamptz + make_interval(secs => 0 * :visibility_seconds)",
            ),
        ),
        ("tests/stories/test_dispatch.py",),
    ),
    Mutation(
        "the jitter",
        "service/domain/retry.py",
        (("return step_seconds * (1 - jitter / 2)", "return step_seconds"),),
        ("tests/unit/test_retry.py",),
    ),
    Mutation(
        "the deadline",
        "service/domain/retry.py",
        (("if now + dt.timedelta(seconds=delay_seconds) > budget.deadline_at:", "if budget.number < 0:"),),
        ("tests/unit/test_retry.py",),
    ),
    Mutation(
        "every address of a name is judged",
        "service/egress/guard.py",
        (("for address in addresses:\n            denied", "for address in addresses[:1]:\n            denied"),),
        ("tests/wire/test_egress.py",),
    ),
    Mutation(
        "our headers win over what a row was forced to hold",
        "service/deliver.py",
        (
            (
                "merged |= {name: (name, value) for name, value in ours.items()}",
                "merged = {name: (name, value) for name, value in ours.items()} | merged",
            ),
        ),
        ("tests/api/test_fidelity.py",),
    ),
    Mutation(
        "what is received costs little time: a body of tiny chunks is cut",
        "service/egress/response.py",
        (("if self._chunk_lines_count > 2 * RESPONSE_CHUNK_LINES_MAX:", "if self._chunk_lines_count < 0:"),),
        ("tests/wire/test_hostile.py",),
    ),
    Mutation(
        "the payload goes out byte for byte",
        "service/api/intake.py",
        (("body = bytes(request.payload)", 'body = bytes(request.payload).replace(b" ", b"")'),),
        ("tests/api/test_deliveries.py",),
    ),
    Mutation(
        "a tenant sees nothing of another's",
        "service/ledger/views.py",
        (
            (
                "WHERE d.id = :id AND p.delivery_id = :id AND d.tenant = :tenant",
                "WHERE d.id = :id AND p.delivery_id = :id",
            ),
        ),
        ("tests/api/test_access.py",),
    ),
)


def main(arguments: list[str]) -> int:
    """Run the mutations that are named, or all; the exit code is 1 when one was not noticed."""
    if "--list" in arguments:
        print("\n".join(mutation.name for mutation in MUTATIONS))
        return 0
    chosen = [mutation for mutation in MUTATIONS if not arguments or any(word in mutation.name for word in arguments)]
    unnoticed = [mutation.name for mutation in chosen if not _noticed(mutation)]
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} mutations were noticed.")
    return 1 if unnoticed or not chosen else 0


def _noticed(mutation: Mutation) -> bool:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hookledger-mutation-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=_LEFT_OUT)
        mutation.apply(copy)
        exit_code, output = _test(copy, mutation.tests)
    found = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    noticed = exit_code == _TESTS_FAILED and found is not None
    by = (
        f"red: {found[1].rpartition('::')[2]}" if noticed and found else f"NOT NOTICED (pytest's exit code {exit_code})"
    )
    print(f"{mutation.name} ... {by} ({time.monotonic() - started:.0f} s)", flush=True)
    return noticed


def _test(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run the tests on the copy until the first fails; pytest's exit code and what it said."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--numprocesses=0", *tests]
    # The copy before the installed project, in pytest and in whatever it starts.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
