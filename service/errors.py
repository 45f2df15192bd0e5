"""What is raised: our infrastructure's failures and the operator's mistakes, never a receiver's answer.

A receiver's failure is a value (`domain.outcome`). A caller's mistake is a value or a problem
(`api.problems`). What is left is here, and each class says whose fault it is.
"""

from __future__ import annotations


class HookledgerError(Exception):
    """The root of all that this service raises on purpose."""


class StartError(HookledgerError):
    """A process cannot start for a reason its operator can mend. The message is one plain sentence."""


class LedgerUnavailable(HookledgerError):
    """Postgres did not answer, or not in time. Whether the statement took effect is not known."""


class LedgerBusy(LedgerUnavailable):
    """No connection became free within the acquire timeout. The statement was not sent."""


class QueueUnavailable(HookledgerError):
    """Redis did not answer. Costs latency only: the dispatcher hints again."""


class LedgerRefused(HookledgerError):
    """Postgres refused the data or the statement: a bug of ours, or one row of a shared batch."""

    def __init__(self, message: str, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class KeyringError(HookledgerError):
    """A signing secret cannot be opened: the keyring lacks its key, or the row was tampered with."""
