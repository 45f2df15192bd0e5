"""Only `service/egress` may open a connection to a receiver: every other way out would pass no guard."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import service

SERVICE = Path(service.__file__).parent
HTTP_CLIENTS = {
    *("aiohttp", "h11", "h2", "http.client", "httpcore", "httptools", "httpx", "pycurl", "pyreqwest", "requests"),
    *("treq", "urllib.request", "urllib3", "websockets", "hyperlink", "niquests", "httpx_aiohttp"),
}
# Development mode asks the API it started itself, on an address it chose; no destination's URL comes near it.
OWN_API_CLIENTS = {"dev.py": {"http.client"}}
MODULES = sorted(path.relative_to(SERVICE) for path in SERVICE.rglob("*.py"))


def _imports(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value))
    return names


def _clients(source: str) -> set[str]:
    return {
        client
        for client in HTTP_CLIENTS
        for name in _imports(source)
        if name == client or name.startswith(f"{client}.")
    }


# Servers of our own on the loopback, asked whether they listen.
OWN_CONNECTIONS = {"embedded/redis.py": {"create_connection"}}
CONNECTS = {
    "create_connection",
    "open_connection",
    "open_unix_connection",
    "sock_connect",
    "connect_ex",
    "create_datagram_endpoint",
}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_module_outside_egress_opens_a_connection_of_its_own(module: Path) -> None:
    if module.parts[0] == "egress":
        return
    tree = ast.parse((SERVICE / module).read_text(encoding="utf-8"))
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in CONNECTS}
    assert found == OWN_CONNECTIONS.get(module.as_posix(), set())


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_module_outside_egress_imports_an_http_client(module: Path) -> None:
    found = _clients((SERVICE / module).read_text(encoding="utf-8")) - OWN_API_CLIENTS.get(str(module), set())
    assert not found or module.parts[0] == "egress", f"{module} imports {sorted(found)}"


@pytest.mark.parametrize(
    "source",
    [
        "import httpx",
        "import urllib.request as r",
        "from urllib import request",
        "from http.client import HTTPConnection",
        "def f():\n    import aiohttp.client",
        "import importlib\nimportlib.import_module('requests')",
    ],
)
def test_the_check_sees_every_way_of_importing_one(source: str) -> None:
    assert _clients(source)


def test_the_check_lets_the_rest_of_the_standard_library_pass() -> None:
    assert not _clients("import urllib.parse\nfrom http import HTTPStatus\nfrom urllib.parse import urlsplit")


def test_egress_itself_is_seen_to_import_one() -> None:
    assert _clients((SERVICE / "egress" / "transport.py").read_text(encoding="utf-8")) == {"httpx"}
