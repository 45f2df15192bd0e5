"""What is generated and committed is what the code says now."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.api.app import openapi_document
from service.domain.delivery import TRANSITIONS
from tools.verify import GENERATED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_file_says_what_the_code_says(name: str) -> None:
    assert (ROOT / name).read_text() == GENERATED[name](), "run ./run verify and commit what it wrote"


def test_the_state_diagram_draws_every_transition() -> None:
    diagram = (ROOT / "docs/states.md").read_text()
    for transition in TRANSITIONS:
        assert transition.value in diagram


def test_the_import_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_route_says_what_it_answers_and_that_it_answers_problems() -> None:
    document = openapi_document()
    found = operations(document)
    assert len(found) > 20
    for method, path, operation in found:
        assert operation["summary"], (method, path)
        assert "default" in operation["responses"], (method, path)
        for answer in operation["responses"].values():
            assert answer.get("content"), (method, path)


def test_every_reference_in_the_contract_leads_somewhere() -> None:
    document = openapi_document()
    names = set(document["components"]["schemas"])
    text = json.dumps(document)
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= names


@pytest.mark.parametrize("path", ["/deliveries", "/deliveries/{delivery_id}", "/dlq", "/dlq/redrive", "/destinations"])
def test_the_contracts_routes_are_there(path: str) -> None:
    assert path in openapi_document()["paths"]
