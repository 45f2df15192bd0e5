"""`hookledger up`: all roles on one machine, in chosen counts, against given servers, kept running.

The rule: what can be wrong with the set-up shows in the first seconds and ends it with a sentence;
after that, whatever dies is started again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from service.settings import Settings
from service.supervise import Role, Signals, Supervisor, gave_up

SETTLED_SECONDS: Final = 20.0  # on a slow machine a role may take most of it to say what is wrong
STOP_MARGIN_SECONDS: Final = 10.0  # for settling and closing, after the attempts' own grace


@dataclass(frozen=True, slots=True)
class Counts:
    """How many processes of each role."""

    api: int
    worker: int
    dispatcher: int


def run(counts: Counts, environment: Mapping[str, str], settings: Settings) -> int:
    """Run the roles until SIGINT or SIGTERM; the exit code. They read the settings from `environment` themselves."""
    roles = make_roles(counts, environment, settings.worker_grace_seconds + STOP_MARGIN_SECONDS)
    with Signals() as signals:
        supervisor = Supervisor(
            [roles], on_start=lambda _: None, log_format=settings.log_format, log_level=settings.log_level
        )
        try:
            for role in roles:
                supervisor.start(role)
            settled_at = time.monotonic() + SETTLED_SECONDS
            while time.monotonic() < settled_at and not signals.stop_requests:
                if gave_up(roles):
                    return 1
                signals.wait(min(supervisor.check(), settled_at - time.monotonic()))
            supervisor.run(signals)
        finally:
            supervisor.stop(signals)
    return 0


def make_roles(counts: Counts, environment: Mapping[str, str], grace_seconds: float) -> list[Role]:
    """The processes, named `api-1`, `api-2` and so on."""
    shared_port = {"API_REUSE_PORT": "1"} if counts.api > 1 else {}
    return [
        Role(
            f"{command}-{number}",
            [command],
            {**environment, **shared_port},
            grace_seconds=grace_seconds,
            # Should we be killed, the roles still finish and settle what they have under way.
            death_signal=signal.SIGTERM,
        )
        for command, count in (("api", counts.api), ("worker", counts.worker), ("dispatcher", counts.dispatcher))
        for number in range(1, count + 1)
    ]
