"""The table of the wire cases is true: each test that it names exists, and each wire test is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import service

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS / "wire" / "README.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([a-z_/]+\.py)::(test_[a-z0-9_]+)`", TABLE)


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_row_names_tests_and_every_test_it_names_exists() -> None:
    rows = re.findall(r"^\| (?!case |---)(.+?) \| (.*) \|$", TABLE, re.MULTILINE)
    assert [case for case, tests in rows if "::test_" not in tests] == []
    existing = {(name, test) for name, _ in NAMED for test in functions_of(TESTS / name)}
    assert set(NAMED) - existing == set()


def test_every_wire_test_is_in_the_table() -> None:
    wire = {(f"wire/{path.name}", test) for path in (TESTS / "wire").glob("test_*.py") for test in functions_of(path)}
    assert wire - set(NAMED) == set()


@pytest.mark.parametrize(
    ("made", "by"),
    [
        ("HttpSender", {"bootstrap.py"}),
        ("WireTransport", {"egress/sender.py"}),
        ("Guard", {"egress/sender.py"}),
    ],
)
def test_one_place_makes_a_sender(made: str, by: set[str]) -> None:
    """The console, a redrive and a test event have no way around the guard: nobody else could make one."""
    folder = Path(service.__file__).parent
    makers = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _called(node) == made
    }
    assert makers == by


def _called(call: ast.Call) -> str | None:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return str(name)
        case _:
            return None
