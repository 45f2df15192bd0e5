"""A running `hookledger dev` for the tests that need the whole of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.embedded.processes import family, sight, wait_until, wait_until_gone

START_SECONDS = 60.0


class Dev:
    """A running `hookledger dev`."""

    def __init__(self, process: subprocess.Popen[str], ready_file: Path, output: Path) -> None:
        self.process = process
        self.ready_file = ready_file
        self.output = output

    @property
    def ready(self) -> dict[str, Any]:
        """What the ready file says now."""
        content: dict[str, Any] = json.loads(self.ready_file.read_text())
        return content

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.ready_file.exists() or self.process.poll() is not None, "ready", seconds=START_SECONDS)
        assert self.ready_file.exists(), self.output.read_text()

    def status(self, path: str, key: str = "") -> int:
        """The status of a GET of the API, 0 without an answer."""
        request = urllib.request.Request(self.ready["api_url"] + path, headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def restarted(self, part: str, former_pid: int) -> bool:
        """Whether the ready file names a new process for the part, and that one runs."""
        pid = self.ready["pids"][part]
        return bool(pid != former_pid and sight(pid) is not None)


@contextmanager
def running_dev(folder: Path, *options: str, **environment: str) -> Iterator[Dev]:
    """Start it, and end it with all its processes whatever happens."""
    ready_file, output = folder / "ready.json", folder / "output"
    ready_file.unlink(missing_ok=True)  # of one that was killed: it would be believed until the new one is up
    command = [sys.executable, "-P", "-m", "service.cli", "dev", "--data-dir", str(folder / "data")]
    clean = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL", "API_PORT")}
    with (
        output.open("a") as file,
        subprocess.Popen(
            [*command, "--ready-file", str(ready_file), *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean | environment,
        ) as process,
    ):
        try:
            yield Dev(process, ready_file, output)
        finally:
            processes = family(process.pid)
            process.kill()
            wait_until_gone(processes)
