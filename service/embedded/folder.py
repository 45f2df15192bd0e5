"""The data folder of one development machine: who may use it, and what is kept in it.

The rule: one process owns a data folder at a time, and every secret in it is readable by its owner
alone. As root the servers run as an unprivileged user, so the folder they keep their data in must
be one that this user can reach.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from service.embedded.process import Account, account_for_servers
from service.errors import StartError

# Where the servers' data goes when root's data folder lies below a private one such as /root.
REACHABLE = Path("/var/lib/hookledger")
LINK = "servers"
_LOCK = "lock"  # its presence says that the folder is ours
_IGNORE = ".gitignore"
LOG_BYTES_MAX = 10 * 1024 * 1024


class DataFolder:
    """An open data folder. Close it to let another process have it.

    `path` is the folder that was asked for, with the secrets and logs; `place` is where the servers
    keep their data, which is the same folder whenever `account` can reach it.
    """

    def __init__(self, path: Path, place: Path, account: Account | None, lock: int) -> None:
        self.path = path
        self.place = place
        self.account = account
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the folder if need be and take it. Raises StartError in one plain sentence."""
        path = path.absolute()
        with _plainly(path):
            _make_private(path)
            lock = _take_lock(path)
        try:
            with _plainly(path):
                account = account_for_servers(path / LINK / "postgres" if _has_link(path) else path / "postgres")
                return cls(path, _place(path, account), account, lock)
        except BaseException:
            os.close(lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def read(self, name: str) -> str | None:
        """A small kept text, None when it is not there."""
        with _plainly(self.path):
            path = self.path / name
            return path.read_text().strip() if path.exists() else None

    def write(self, name: str, text: str) -> None:
        """Keep a small text, whole or not at all, readable by the owner alone."""
        with _plainly(self.path):
            write_atomically(self.path / name, text + "\n")
            self._give_to_owner(self.path / name)

    def kept(self, name: str, make: Callable[[], str]) -> str:
        """The kept text, made on the first call ever."""
        text = self.read(name)
        if not text:
            text = make()
            self.write(name, text)
        return text

    def kept_port(self, name: str) -> int | None:
        """The port that a server used last."""
        text = self.read(name)
        return int(text) if text and text.isdecimal() else None

    def pid_file(self, name: str) -> Path:
        """Where the pid of a child of this name is kept."""
        return self._folder_of_ours("pids") / name

    def log_file(self, name: str) -> Path:
        """The log of a server; an overgrown one is first set aside, over the one set aside before."""
        log = self._folder_of_ours("logs") / f"{name}.log"
        with _plainly(self.path):
            if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
                log.replace(log.with_suffix(".log.1"))
            log.touch(mode=0o600)
            self._give_to_owner(log)
        return log

    def make_for_servers(self, name: str) -> Path:
        """A folder in `place` that belongs to the servers' account and nobody else."""
        folder = self.place / name
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
        if self.account is not None:
            os.chown(folder, self.account.uid, self.account.gid)
        return folder

    def reachable(self, program: Path, packages: list[Path], version: str) -> Path:
        """`program`, or its copy at a place where the servers' account can run it.

        `packages` are the folders that must stay beside each other, because programs find their
        libraries relative to themselves; `program` lies in the first.
        """
        if self.account is None or can_run(self.account, program):
            return program
        copies = self.place / "programs" / version
        if not copies.exists():
            with _plainly(self.place):
                _copy_readable(packages, copies)
        return copies / program.relative_to(packages[0].parent)

    def _folder_of_ours(self, name: str) -> Path:
        folder = self.path / name
        with _plainly(self.path):
            folder.mkdir(mode=0o700, exist_ok=True)
            self._give_to_owner(folder)
        return folder

    def _give_to_owner(self, path: Path) -> None:
        """Whatever root does in an ordinary user's folder (sudo), that user can go on with."""
        if os.geteuid() == 0:
            owner = self.path.stat()
            os.chown(path, owner.st_uid, owner.st_gid)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step, mode 0600."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def can_enter(account: Account, folder: Path) -> bool:
    """Whether the account may pass through the folder and all that it lies in."""
    folder = folder.resolve()
    return all(_allows(account, each, stat.S_IXOTH) for each in (folder, *folder.parents))


def can_run(account: Account, program: Path) -> bool:
    """Whether the account may read and execute the program where it is."""
    program = program.resolve()
    return can_enter(account, program.parent) and _allows(account, program, stat.S_IROTH | stat.S_IXOTH)


def _allows(account: Account, path: Path, wanted: int) -> bool:
    """Judge by owner, group or others, whichever applies to the account. `wanted` is in the bits for others."""
    status = path.stat()
    shift = 6 if status.st_uid == account.uid else 3 if status.st_gid == account.gid else 0
    return (status.st_mode >> shift) & wanted == wanted


def _make_private(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    found = {each.name for each in path.iterdir()}
    if not found <= {_IGNORE} and _LOCK not in found:
        raise StartError(
            f"The folder {path} holds something else: give an empty one, or one that is not there yet, with --data-dir."
        )
    # Root's servers must pass through; nobody but root may list. An ordinary user's run as that user.
    path.chmod(0o711 if os.geteuid() == 0 else 0o700)
    ignore = path / _IGNORE
    if not ignore.exists():
        ignore.write_text("*\n")


def _take_lock(path: Path) -> int:
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 32).decode().strip()
        os.close(descriptor)
        raise StartError(
            f"The data folder {path} is in use by another Hookledger (process {owner}): "
            "stop that one, or give this one a folder of its own with --data-dir."
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _has_link(path: Path) -> bool:
    return (path / LINK).is_symlink()


def _place(path: Path, account: Account | None) -> Path:
    """The folder for the servers' data: ours, or one elsewhere that a link in ours leads to."""
    if _has_link(path):
        place = path / LINK
        if not place.is_dir():
            raise StartError(
                f"The data of the embedded servers is gone: {place} leads to {place.readlink()}, which is not "
                f"there. Delete {path} to start afresh."
            )
        return place.resolve()
    if account is None or can_enter(account, path):
        return path
    REACHABLE.mkdir(parents=True, exist_ok=True)
    REACHABLE.chmod(0o755)
    place = Path(tempfile.mkdtemp(dir=REACHABLE, prefix=f"{path.parent.name}-".lstrip("-")))
    place.chmod(0o711)
    (path / LINK).symlink_to(place)
    return place


def _copy_readable(packages: list[Path], destination: Path) -> None:
    """Copy what running a server needs, for everyone to read and run; whole or not at all."""
    destination.parent.mkdir(exist_ok=True)
    destination.parent.chmod(0o755)
    half = Path(tempfile.mkdtemp(dir=destination.parent))
    for package in packages:
        shutil.copytree(package, half / package.name, ignore=shutil.ignore_patterns("include", "*.py", "__pycache__"))
    for each in (half, *half.rglob("*")):
        each.chmod(0o755 if each.is_dir() or each.stat().st_mode & stat.S_IXUSR else 0o644)
    half.rename(destination)


@contextmanager
def _plainly(path: Path) -> Iterator[None]:
    """Say in one sentence why a folder cannot be used."""
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise StartError(f"The data folder {path} cannot be made: a file is in its way.") from None
    except OSError as error:
        reason = "no permission" if error.errno in (errno.EACCES, errno.EPERM) else error.strerror
        raise StartError(
            f"The data folder {path} cannot be used ({reason}): give another one with --data-dir."
        ) from None
