"""The docs' picture is true: links lead somewhere, examples decode, tables say what the code computes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from service.api.schemas import DeliveryRequest, DestinationRequest, RedriveRequest
from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_every_direct_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    names = {re.split(r"[\[<>=; ]", requirement)[0] for requirement in named}
    text = (ROOT / "docs/dependencies.md").read_text()
    assert {name for name in names if f"`{name}" not in text} == set()


def test_every_setting_the_docs_name_exists() -> None:
    known = {name.upper() for name in Settings.model_fields}
    pattern = re.compile(r"`([A-Z][A-Z]+(?:_[A-Z]+)+)(?:=[^`]*)?`")
    environment = {
        "EGRESS_PROXY",
        "HTTP_PROXY",
        "ALL_PROXY",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "HINT_VISIBILITY_SECONDS_MAX",
    }
    for page in PAGES:
        named = set(pattern.findall(page.read_text()))
        limits = (ROOT / "service/domain/limits.py").read_text()
        unknown = {name for name in named - known - environment if f"\n{name}:" not in limits}
        assert unknown <= OTHER_NAMES, (page, unknown)


# Of other programs: Postgres' and pip's, and the lexicon of SQL.
OTHER_NAMES = frozenset({"POSTGRES_PASSWORD", "PIP_INDEX_URL", "UV_INDEX_URL", "SO_REUSEPORT", "PR_SET_PDEATHSIG"})


def bodies(text: str) -> list[str]:
    """The JSON bodies of a page's curl examples, which are here-documents."""
    return re.findall(r"-d @- <<END\n(.*?)\nEND", text, re.DOTALL)


def test_the_curl_examples_of_the_readme_are_requests_the_api_takes() -> None:
    found = bodies((ROOT / "README.md").read_text())
    assert len(found) == 3
    for body in found:
        json.loads(body)
        kinds = (DeliveryRequest, DestinationRequest, RedriveRequest)
        assert any(decodes(kind, body) for kind in kinds), body


def decodes(kind: type[msgspec.Struct], body: str) -> bool:
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        return False
    return True


def test_the_image_does_not_run_as_root() -> None:
    users = re.findall(r"^USER (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert users
    assert users[-1].split(":")[0] not in ("root", "0")
