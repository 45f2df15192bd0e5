"""Mistakes on the command line get plain sentences and an exit code, never a traceback or a secret."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from service.cli import load_settings
from service.dev import choose_port, make_keyring
from service.embedded import ports
from service.errors import StartError
from service.settings import Settings, parse_keyring

GOOD = {
    "DATABASE_URL": "postgresql://hookledger:very-secret@127.0.0.1:5432/hookledger",
    "REDIS_URL": "redis://127.0.0.1:6379/0",
    "SECRET_KEYS": "k1:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
}


def hookledger(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name.upper() for name in Settings.model_fields}
    clean = {name: value for name, value in os.environ.items() if name.upper() not in known}
    command = [sys.executable, "-P", "-m", "service.cli", *words]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False)


def test_what_is_wrong_with_the_settings_is_said_in_a_line_for_each_and_without_their_values() -> None:
    wrong = GOOD | {"DATABASE_URL": "mysql://very-secret", "API_PORT": "very-secret", "LOG_FORMAT": "very-secret"}
    del wrong["REDIS_URL"]

    done = hookledger("worker", **wrong)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "DATABASE_URL must start with postgresql://.",
        "REDIS_URL is not set.",
        "API_PORT must be a valid integer, unable to parse string as an integer.",
        "LOG_FORMAT must match pattern '^(json|console)$'.",
    ]


def test_settings_that_contradict_each_other_are_named_both() -> None:
    done = hookledger("worker", **GOOD, HEARTBEAT_STALE_SECONDS="5.5", HEARTBEAT_SECONDS="5")

    assert done.returncode == 2
    assert done.stderr == "HEARTBEAT_STALE_SECONDS must be at least three times HEARTBEAT_SECONDS.\n"


def test_a_keyring_that_cannot_be_read_is_not_shown() -> None:
    done = hookledger("worker", **GOOD | {"SECRET_KEYS": "k1:very-secret"})

    assert done.returncode == 2
    assert done.stderr.startswith("SECRET_KEYS: each entry must read id:base64-of-32-bytes")
    assert "very-secret" not in done.stderr


def test_a_proxy_that_cannot_be_read_is_one_sentence_without_its_password() -> None:
    done = hookledger("worker", **GOOD | {"EGRESS_PROXY": "https://user:very-secret@proxy:3128"})

    assert done.returncode == 2
    assert done.stderr == "EGRESS_PROXY must read http://host:port or http://user:password@host:port.\n"


def test_good_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)

    assert load_settings().database_url.get_secret_value() == GOOD["DATABASE_URL"]


def test_a_new_keyring_is_one_that_the_settings_accept() -> None:
    assert len(parse_keyring(make_keyring())) == 1


def test_help_is_given_without_any_setting() -> None:
    done = hookledger("--help")

    assert done.returncode == 0
    for command in ("dev", "up", "api", "worker", "dispatcher", "migrate", "keys", "openapi", "listen", "doctor"):
        assert f"\n  {command} " in done.stdout


def test_a_port_that_is_taken_is_refused_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "is_free", lambda host, port: False)

    with pytest.raises(StartError, match=r"Port 8080 on 127.0.0.1 is in use"):
        choose_port("127.0.0.1", 8080)


def test_a_port_that_is_taken_gives_way_to_the_next_when_none_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ports, "is_free", lambda host, port: port > 8081)

    assert choose_port("127.0.0.1", None) == 8082
    assert capsys.readouterr().err == "Port 8080 is in use, so the API listens on 8082.\n"


def test_up_with_a_database_that_does_not_answer_ends_with_its_sentence() -> None:
    nowhere = {**GOOD, "DATABASE_URL": "postgresql://a:x@127.0.0.1:1/x", "REDIS_URL": "redis://127.0.0.1:1/0"}

    done = hookledger("up", "--api", "0", "--workers", "1", **nowhere)

    assert done.returncode == 1
    assert "The database in DATABASE_URL does not answer" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_an_empty_data_folder_is_no_folder() -> None:
    done = hookledger("dev", "--data-dir", "")

    assert done.returncode != 0
    assert "the folder's name is empty" in done.stderr
