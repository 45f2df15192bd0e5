"""The embedded servers keep what was committed, stay out of everybody's way and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import redis

from service.embedded import process
from service.embedded.folder import DataFolder
from service.embedded.postgres import EmbeddedPostgres
from service.embedded.redis import EmbeddedRedis
from service.errors import StartError
from tests.embedded.processes import family, sight, wait_until_gone
from tests.servers import temporary_folder

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc; needs death signals")

OWNER_PROGRAM = """
import json, signal, sys
from pathlib import Path
from service.embedded.folder import DataFolder
from service.embedded.postgres import EmbeddedPostgres
from service.embedded.redis import EmbeddedRedis
folder = DataFolder.open(Path(sys.argv[1]))
servers = [EmbeddedPostgres(folder, fast=True), EmbeddedRedis(folder)]
for server in servers:
    server.start()
print(json.dumps([server.pid for server in servers]), flush=True)
signal.pause()
"""


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with temporary_folder() as folder:
        yield folder / "data"


@pytest.fixture(scope="module")
def made_before() -> Iterator[Path]:
    """A data folder with a cluster in it, to copy: making one takes longer than all else here."""
    with temporary_folder() as outer:
        with DataFolder.open(outer / "data") as folder:
            server = EmbeddedPostgres(folder, fast=True)
            server.start()
            server.stop()
        yield outer / "data"


@pytest.fixture
def folder(data_dir: Path) -> Iterator[DataFolder]:
    with DataFolder.open(data_dir) as opened:
        yield opened


@pytest.fixture
def postgres(folder: DataFolder, made_before: Path) -> Iterator[EmbeddedPostgres]:
    """A server that has been started and stopped before."""
    for name in ("postgres", "postgres-password"):
        subprocess.run(["cp", "-a", str(made_before / name), str(folder.path)], check=True)
    server = EmbeddedPostgres(folder, fast=True)
    yield server
    server.stop()


@pytest.fixture
def new_postgres(folder: DataFolder) -> Iterator[EmbeddedPostgres]:
    """A server without a cluster yet."""
    server = EmbeddedPostgres(folder, fast=True)
    yield server
    server.stop()


@pytest.fixture
def valkey(folder: DataFolder) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(folder)
    yield server
    server.stop()


def ask(url: str, statement: str) -> Any:
    """The first value of the first row."""

    async def fetch() -> Any:
        connection = await asyncpg.connect(url, timeout=10)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(fetch())


class TestPostgres:
    def test_a_first_start_makes_a_database_that_its_own_unprivileged_role_owns(
        self, new_postgres: EmbeddedPostgres
    ) -> None:
        url = new_postgres.start()

        assert ask(url, "SELECT current_user") == "hookledger"
        assert ask(url, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
        owner = "SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = 'hookledger'"
        assert ask(url, owner) == "hookledger"
        assert ask(new_postgres.superuser_url, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is True

    def test_a_later_start_has_the_same_address_and_the_same_rows(self, postgres: EmbeddedPostgres) -> None:
        url = postgres.start()
        ask(url, "CREATE TABLE kept AS SELECT 42 AS value")
        postgres.stop()

        assert postgres.start() == url
        assert ask(url, "SELECT value FROM kept") == 42

    def test_a_row_committed_before_the_server_was_killed_is_there_after(self, postgres: EmbeddedPostgres) -> None:
        url = postgres.start()
        ask(url, "CREATE TABLE kept AS SELECT 42 AS value")
        postgres.kill()

        postgres.start()

        assert ask(url, "SELECT value FROM kept") == 42

    @linux_only
    def test_stopping_leaves_no_process(self, postgres: EmbeddedPostgres) -> None:
        postgres.start()
        assert postgres.pid is not None
        processes = family(postgres.pid)

        postgres.stop()

        wait_until_gone(processes)

    def test_a_port_that_was_taken_meanwhile_is_given_up_for_another(
        self, folder: DataFolder, postgres: EmbeddedPostgres
    ) -> None:
        with socket.socket() as squatter:
            squatter.bind(("127.0.0.1", 0))
            squatter.listen()
            folder.write("postgres-port", str(squatter.getsockname()[1]))

            url = postgres.start()

            assert str(squatter.getsockname()[1]) not in url
            assert ask(url, "SELECT 1") == 1

    def test_a_pid_file_that_names_a_stranger_does_not_keep_it_from_starting(
        self, folder: DataFolder, postgres: EmbeddedPostgres
    ) -> None:
        postgres.start()
        pid_file = folder.place / "postgres" / "cluster" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        postgres.stop()
        with subprocess.Popen(["sleep", "60"]) as stranger:  # not us: Postgres knows its parent for a stranger
            pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
            if folder.account is not None:
                os.chown(pid_file, folder.account.uid, folder.account.gid)

            url = postgres.start()

            assert ask(url, "SELECT 1") == 1
            assert stranger.poll() is None
            stranger.kill()

    @linux_only
    def test_the_password_is_in_no_command_line(self, folder: DataFolder, postgres: EmbeddedPostgres) -> None:
        postgres.start()
        password = folder.read("postgres-password")

        assert password
        assert postgres.pid is not None
        assert password not in process.command_line(postgres.pid)
        assert stat.S_IMODE((folder.path / "postgres-password").stat().st_mode) == 0o600

    def test_data_of_another_major_version_is_refused_in_a_sentence(
        self, folder: DataFolder, new_postgres: EmbeddedPostgres
    ) -> None:
        cluster = folder.make_for_servers("postgres") / "cluster"
        cluster.mkdir()
        (cluster / "PG_VERSION").write_text("12\n")

        with pytest.raises(StartError, match=r"was made by PostgreSQL 12.+ brings PostgreSQL 18") as refusal:
            new_postgres.start()

        assert "\n" not in str(refusal.value)

    def test_a_user_without_a_passwd_entry_is_told_so_in_a_sentence(
        self, new_postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unknown(uid: int) -> pwd.struct_passwd:
            raise KeyError(uid)

        monkeypatch.setattr(pwd, "getpwuid", unknown)

        with pytest.raises(StartError, match=r"has no entry in /etc/passwd"):
            new_postgres.start()

    def test_why_a_cluster_does_not_start_is_said_in_its_own_words(
        self, folder: DataFolder, postgres: EmbeddedPostgres
    ) -> None:
        postgres.start()
        postgres.stop()
        (folder.place / "postgres" / "cluster" / "global" / "pg_control").unlink()

        with pytest.raises(StartError, match=r"PostgreSQL did not start: .+pg_control.+ \(its log is "):
            postgres.start()


class TestRedis:
    def test_it_keeps_its_commands_evicts_nothing_and_wants_a_password(self, valkey: EmbeddedRedis) -> None:
        url = valkey.start()

        with redis.Redis.from_url(url) as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        address = url.rpartition("@")[2]
        with redis.Redis.from_url(f"redis://{address}") as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()

    def test_a_later_start_has_the_same_address_and_the_same_keys(self, valkey: EmbeddedRedis) -> None:
        url = valkey.start()
        with redis.Redis.from_url(url) as client:
            client.set("kept", "42")
        valkey.stop()

        assert valkey.start() == url
        with redis.Redis.from_url(url) as client:
            assert client.get("kept") == b"42"

    def test_it_starts_again_after_it_was_killed(self, valkey: EmbeddedRedis) -> None:
        url = valkey.start()
        valkey.kill()

        valkey.start()

        with redis.Redis.from_url(url) as client:
            assert client.ping()

    def test_it_starts_empty_rather_than_not_at_all_when_its_log_cannot_be_read(
        self, folder: DataFolder, valkey: EmbeddedRedis
    ) -> None:
        url = valkey.start()
        with redis.Redis.from_url(url) as client:
            client.set("lost", "42")
        valkey.stop()
        for log in (folder.place / "redis" / "appendonlydir").glob("*.incr.aof"):
            log.write_bytes(b"this is no log of commands\r\n" * 20)

        valkey.start()

        with redis.Redis.from_url(url) as client:
            assert client.get("lost") is None

    @linux_only
    def test_the_password_is_in_no_command_line(self, folder: DataFolder, valkey: EmbeddedRedis) -> None:
        valkey.start()
        password = folder.read("redis-password")

        assert password
        assert valkey.pid is not None
        assert password not in process.command_line(valkey.pid)


class TestDataFolder:
    def test_a_second_owner_is_refused_in_a_sentence_that_names_the_first(
        self, folder: DataFolder, data_dir: Path
    ) -> None:
        with pytest.raises(StartError, match=rf"in use by another Hookledger \(process {os.getpid()}\)"):
            DataFolder.open(data_dir)

    def test_a_closed_folder_can_be_opened_again(self, data_dir: Path) -> None:
        DataFolder.open(data_dir).close()
        DataFolder.open(data_dir).close()

    def test_a_folder_that_holds_something_else_is_left_as_it_is(self, tmp_path: Path) -> None:
        foreign = tmp_path / "foreign"
        foreign.mkdir(mode=0o755)
        (foreign / "mine.txt").write_text("hi")

        with pytest.raises(StartError, match="holds something else: give an empty one"):
            DataFolder.open(foreign)

        assert foreign.stat().st_mode & 0o777 == 0o755
        assert [each.name for each in foreign.iterdir()] == ["mine.txt"]

    def test_a_file_in_its_way_is_told_in_a_sentence(self, data_dir: Path) -> None:
        data_dir.write_text("I am a file")

        with pytest.raises(StartError, match="cannot be made: a file is in its way"):
            DataFolder.open(data_dir / "below")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_permission_is_told_in_a_sentence(self, data_dir: Path) -> None:
        data_dir.mkdir(mode=0o500)

        with pytest.raises(StartError, match=r"cannot be used \(no permission\)"):
            DataFolder.open(data_dir / "below")

    @linux_only
    def test_a_place_that_takes_no_folders_is_told_in_a_sentence(self) -> None:
        with pytest.raises(StartError, match=r"cannot be used \(.+\): give another one"):
            DataFolder.open(Path("/proc/hookledger"))

    def test_git_is_told_to_leave_it_alone(self, folder: DataFolder) -> None:
        assert (folder.path / ".gitignore").read_text() == "*\n"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root's servers run as another user")
    def test_below_a_folder_that_is_closed_to_roots_servers_they_keep_their_data_elsewhere(
        self, tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o700)
        with DataFolder.open(tmp_path / "data") as folder:
            assert not folder.place.is_relative_to(tmp_path)
            try:
                server = EmbeddedPostgres(folder, fast=True)
                assert ask(server.start(), "SELECT 1") == 1
                server.stop()
            finally:
                shutil.rmtree(folder.place)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root's servers run as another user")
    def test_data_that_was_kept_elsewhere_and_is_gone_is_missed_in_a_sentence(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        with DataFolder.open(tmp_path / "data") as folder:
            shutil.rmtree(folder.place)

        with pytest.raises(StartError, match="The data of the embedded servers is gone"):
            DataFolder.open(tmp_path / "data")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root's servers run as another user")
    def test_programs_that_are_closed_to_roots_servers_are_copied_to_where_they_are_not(
        self, folder: DataFolder, tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o700)
        package = tmp_path / "package"
        package.mkdir()
        (package / "program").write_text("#!/bin/sh\necho well\n")
        (package / "program").chmod(0o700)

        program = folder.reachable(package / "program", [package], "package-1")

        assert program.is_relative_to(folder.place)
        assert process.run_to_end([str(program)], account=folder.account, folder=Path("/")) == "well\n"


@linux_only
class TestDeathOfTheOwner:
    def test_its_sigkill_takes_both_servers_with_it_and_the_next_start_is_clean(self, data_dir: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", OWNER_PROGRAM, str(data_dir)], stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            pids = json.loads(owner.stdout.readline())
            processes = family(owner.pid)
            assert {each.pid for each in processes} >= {owner.pid, *pids}

            owner.send_signal(signal.SIGKILL)

        with DataFolder.open(data_dir) as folder:
            server = EmbeddedPostgres(folder, fast=True)
            assert ask(server.start(), "SELECT 1") == 1
            server.stop()
        wait_until_gone(processes)

    def test_a_child_whose_parent_is_gone_before_it_begins_does_not_begin(self) -> None:
        line = process.launch_line(["/bin/echo", "began"], signal.SIGKILL, None)
        another_parent = [str(os.getppid()) if word == str(os.getpid()) else word for word in line]

        done = subprocess.run(another_parent, capture_output=True, check=False)

        assert done.stdout == b""
        assert done.returncode != 0

    def test_what_an_earlier_owner_left_running_is_ended_at_the_next_start(
        self, folder: DataFolder, postgres: EmbeddedPostgres
    ) -> None:
        postgres.start()
        assert postgres.pid is not None
        left_over = sight(postgres.pid)
        assert left_over is not None
        next_owner = EmbeddedPostgres(folder, fast=True)

        url = next_owner.start()

        assert not left_over.alive
        assert ask(url, "SELECT 1") == 1
        next_owner.stop()
