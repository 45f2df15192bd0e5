"""The few instructions between fork and exec: a child that cannot outlive its parent.

Run as a program by path, with the standard library alone (`python -I -S launch.py …`), because
doing the same in `preexec_fn` would run Python in a forked copy of a process that may have threads.

    launch.py PARENT_PID DEATH_SIGNAL UID GID PROGRAM ARGUMENT…

UID and GID are -1 to stay who we are. The process that results is PROGRAM, under the pid that
the parent knows.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
ORPHANED_EXIT_CODE = 75  # nobody is left to read it; it only tells the two endings apart in a trace


def main(arguments: list[str]) -> None:
    """Become PROGRAM, or exit when the parent died first."""
    parent_pid, death_signal, uid, gid = (int(word) for word in arguments[:4])
    program = arguments[4:]
    _forget_inherited_signals()
    # Before the change of user: afterwards this Python may lie in a folder that is closed to us.
    ask_for_death_signal = _death_signal_asker()
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    # After it: the kernel clears the death signal when credentials change.
    ask_for_death_signal(death_signal)
    # The parent may have died before the line above took effect, and then no signal comes.
    if os.getppid() != parent_pid:
        sys.exit(ORPHANED_EXIT_CODE)
    os.execv(program[0], program)  # noqa: S606 - without a shell, on purpose


def _forget_inherited_signals() -> None:
    """A shell starts background jobs with SIGINT ignored, and that would be handed down."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _death_signal_asker() -> Callable[[int], None]:
    """What tells the kernel to signal us when our parent dies. Does nothing on macOS, which cannot:
    there, what is left over is ended at the next start, by its pid file.
    """
    if not sys.platform.startswith("linux"):
        return lambda _: None
    import ctypes  # noqa: PLC0415 - 15 ms, and only here

    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask(death_signal: int) -> None:
        if prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")

    return ask


if __name__ == "__main__":
    main(sys.argv[1:])
