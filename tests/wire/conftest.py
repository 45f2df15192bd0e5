"""What every wire test is given: both event loops, certificates, and a spy on every connection made."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import uvloop

from service.domain.address import AllowList, IPAddress
from service.egress.sender import HttpSender
from tests.wire.certificates import Authority

_spies: list[list[Any]] = []


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Production runs on uvloop; asyncio's own loop is the fallback and differs in its errors."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        for spy in _spies:
            spy.append(arguments[1])


sys.addaudithook(_audit)  # cannot be removed, so it is added once


@pytest.fixture(autouse=True)
def leaves_no_socket_behind() -> Iterator[None]:
    """A test whose sender or receiver forgets a socket fails itself, not the one in which the collector finds it."""
    yield
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    assert not [str(each.message) for each in caught if "unclosed" in str(each.message)]


@pytest.fixture
def dialled() -> Iterator[list[Any]]:
    """Every address that any code of this process connects a socket to, whichever library it uses."""
    spy: list[Any] = []
    _spies.append(spy)
    yield spy
    _spies.remove(spy)


@pytest.fixture
async def sender(authority: Authority) -> AsyncIterator[HttpSender]:
    """A sender that may use the loopback and trusts the tests' authority alone."""
    made = HttpSender(AllowList.parse("127.0.0.0/8:*,::1/128:*"), tls=authority.client_context())
    yield made
    await made.close()


@pytest.fixture
async def named(authority: Authority) -> AsyncIterator[HttpSender]:
    """A sender for which every name is this machine, and may be."""

    async def everything_is_here(host: str, port: int) -> list[IPAddress]:
        return [ip_address("127.0.0.1")]

    made = HttpSender(AllowList.parse("127.0.0.0/8:*"), tls=authority.client_context(), resolve=everything_is_here)
    yield made
    await made.close()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A certificate authority of the tests' own."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    return Authority(folder)
