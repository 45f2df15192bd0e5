"""What the handlers share: made once when the application starts, read from `request.app.state`."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import cast

from fastapi import Request

from service.accept import Intake
from service.destinations import Destinations
from service.domain.address import AllowList
from service.ledger.session import Ledger
from service.ports import Clock
from service.queue.arq_queue import ArqQueue
from service.settings import Settings


class AppState:
    """The API process's parts."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        queue: ArqQueue,
        intake: Intake,
        destinations: Destinations,
        new_id: Callable[[], uuid.UUID],
        clock: Clock,
        allow: AllowList,
        envelope_bytes_max: int,
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.queue = queue
        self.intake = intake
        self.destinations = destinations
        self.new_id = new_id
        self.clock = clock
        self.allow = allow
        # Base64 takes four characters for three bytes.
        self.intake_bytes_max = settings.payload_bytes_max * 4 // 3 + envelope_bytes_max
        self.stopping = False


def state_of(request: Request) -> AppState:
    """The parts, for a handler."""
    return cast("AppState", request.app.state.parts)
