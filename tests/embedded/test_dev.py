"""The whole of `hookledger dev` in real processes: it tells the truth when ready, mends itself, and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.processes import Sighting, family, sight, wait_until, wait_until_gone
from tests.embedded.running import Dev, running_dev
from tests.servers import temporary_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc; needs death signals"),
]

PARTS = ("api", "worker", "dispatcher", "postgres", "redis")


@pytest.fixture(scope="module")
def dev() -> Iterator[Dev]:
    """One that stays, for the tests that leave it running."""
    with temporary_folder() as folder, running_dev(folder, "--port", "0") as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One data folder for the tests that start and stop: only the first start is a cold one."""
    with temporary_folder() as made:
        yield made


def test_when_ready_it_answers_and_says_how_to_go_on(dev: Dev) -> None:
    ready = dev.ready

    assert set(ready) == {"api_url", "api_key", "database_url", "redis_url", "console_url", "pids"}
    assert set(ready["pids"]) == set(PARTS)
    assert {each.pid for each in family(dev.process.pid)} >= set(ready["pids"].values())
    assert dev.status("/healthz") == 200
    assert dev.status("/readyz") == 200
    assert dev.status("/deliveries?limit=1", ready["api_key"]) == 200
    assert dev.status("/deliveries?limit=1", "hlk_wrong") == 401
    wait_until(lambda: "Ctrl-C stops everything" in dev.output.read_text(), "the greeting")
    words = dev.output.read_text()
    assert ready["api_url"] in words
    assert ready["api_key"] in words
    assert f"curl -sS -H 'Authorization: Bearer {ready['api_key']}'" in words


def test_a_second_start_has_the_same_key_and_the_same_servers(folder: Path) -> None:
    kept = []
    for _ in range(2):
        with running_dev(folder, "--port", "0") as dev:
            dev.wait_until_ready()
            kept.append([dev.ready[name] for name in ("api_key", "database_url", "redis_url")])
            dev.process.send_signal(signal.SIGTERM)
            assert dev.process.wait(30) == 0

    assert kept[0] == kept[1]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_killed_comes_back_and_the_ready_file_follows(dev: Dev, part: str) -> None:
    pid = dev.ready["pids"][part]

    os.kill(pid, signal.SIGKILL)

    wait_until(lambda: dev.restarted(part, pid), f"the restart of {part}")
    wait_until(lambda: dev.status("/readyz") == 200, "an API that is ready again")
    words = dev.output.read_text()
    assert "process.ended" in words
    assert "process.restarted" in words
    others = {name: dev.ready["pids"][name] for name in PARTS if name != part}
    assert all(sight(other) for other in others.values())


def test_ctrl_c_leaves_no_process_and_no_ready_file(folder: Path) -> None:
    with running_dev(folder, "--port", "0") as dev:
        dev.wait_until_ready()
        processes = family(dev.process.pid)
        assert len(processes) > len(PARTS)

        dev.process.send_signal(signal.SIGINT)

        assert dev.process.wait(30) == 0
        wait_until_gone(processes)
        assert not dev.ready_file.exists()
        assert "Traceback" not in dev.output.read_text()


def test_asked_to_stop_before_it_is_ready_it_leaves_no_process(folder: Path) -> None:
    with running_dev(folder, "--port", "0") as dev:
        seen: set[Sighting] = set()

        def a_server_runs() -> bool:
            seen.update(family(dev.process.pid))
            return len(seen) > 1

        wait_until(a_server_runs, "the first child")
        dev.process.send_signal(signal.SIGINT)

        assert dev.process.wait(30) == 0
        wait_until_gone(seen)


def test_its_own_sigkill_leaves_no_process_either(folder: Path) -> None:
    with running_dev(folder, "--port", "0") as dev:
        dev.wait_until_ready()
        processes = family(dev.process.pid)
        assert len(processes) > len(PARTS)

        dev.process.kill()

        dev.process.wait()
        wait_until_gone(processes)


def test_a_second_one_on_the_same_data_is_refused_in_a_sentence(dev: Dev) -> None:
    data_dir = str(dev.ready_file.with_name("data"))
    command = [sys.executable, "-P", "-m", "service.cli", "dev", "--port", "0", "--data-dir", data_dir]

    second = subprocess.run(command, capture_output=True, text=True, check=False)

    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert f"in use by another Hookledger (process {dev.process.pid})" in second.stderr
    assert dev.status("/healthz") == 200


def test_a_port_that_was_asked_for_and_is_taken_is_refused_in_a_sentence(folder: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        with running_dev(folder, "--port", str(port)) as dev:
            assert dev.process.wait(30) == 1

    assert (
        dev.output.read_text()
        .rstrip()
        .endswith(f"Port {port} on 127.0.0.1 is in use or not allowed: choose another with --port.")
    )


def test_a_database_that_does_not_answer_is_told_in_a_sentence(folder: Path) -> None:
    with running_dev(
        folder,
        "--port",
        "0",
        DATABASE_URL="postgresql://nobody:nothing@127.0.0.1:1/none",
        REDIS_URL="redis://127.0.0.1:1",
    ) as dev:
        assert dev.process.wait(60) == 1

    assert "Traceback" not in dev.output.read_text()
