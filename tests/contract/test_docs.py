"""The docs' picture is true: links lead somewhere, examples decode, tables say what the code computes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from service.api.app import openapi_document
from service.api.dlq_schemas import RedriveRequest
from service.api.problems import Problem
from service.api.schemas import DeliveryRequest, DestinationPatch, DestinationRequest, ResolveRequest
from service.domain import limits
from service.domain.delivery import DeadReason
from service.domain.outcome import Outcome
from service.domain.retry import DEADLINE_SECONDS_DEFAULT, RetryPolicy, backoff_seconds
from service.settings import Settings
from service.telemetry import events

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OPERATORS = [ROOT / "Dockerfile", ROOT / ".dockerignore", *sorted((ROOT / "deploy").iterdir())]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("folder", ["docs/adr", "docs/runbooks"])
def test_every_page_of_a_folder_is_in_its_index(folder: str) -> None:
    names = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([^)/]+\.md)\)", page(f"{folder}/README.md"))) == names


def test_every_direct_dependency_is_justified_and_no_other() -> None:
    project = tomllib.loads(page("pyproject.toml"))
    required = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    names = {re.split(r"[\[<>=; ]", requirement)[0] for requirement in required}
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", page("docs/dependencies.md"), re.MULTILINE)
    assert {name for name, _ in rows} == names
    assert [name for name, sentence in rows if not sentence.endswith(".")] == []


# What is written like a setting and is none: of other programs.
OTHER_NAMES = frozenset({"HTTP_PROXY", "SSL_CERT_DIR", "SSL_CERT_FILE", "POSTGRES_PASSWORD"})


@pytest.mark.parametrize("path", [*PAGES, *OPERATORS], ids=ids)
def test_every_setting_that_is_named_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    written = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?:=[^`]*)?`", text))
    if path.name == "compose.yaml":
        written |= set(re.findall(r"^    ([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+):", text, re.MULTILINE))
    known = {name.upper() for name in Settings.model_fields} | {name for name in vars(limits) if name.isupper()}
    assert written - known - OTHER_NAMES == set()


def bodies(text: str) -> list[tuple[str, str]]:
    """The path and the JSON body of each curl example that has one: they are here-documents."""
    found = re.findall(r'"\$api(/[^"]*)"[^\n]*-d @- <<END\n(.*?)\n *END', text, re.DOTALL)
    assert len(found) == text.count("<<END"), "an example that is not of this form"
    return found


KINDS: dict[str, type[msgspec.Struct]] = {
    "/deliveries": DeliveryRequest,
    "/deliveries/$delivery/resolve": ResolveRequest,
    "/destinations": DestinationRequest,
    "/destinations/$destination": DestinationPatch,
    "/dlq/redrive": RedriveRequest,
}


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_the_curl_examples_are_requests_the_api_takes(path: Path) -> None:
    for target, body in bodies(path.read_text(encoding="utf-8")):
        msgspec.json.decode(body, type=KINDS[target])


def test_the_readme_shows_a_destination_a_delivery_and_a_redrive() -> None:
    assert [target for target, _ in bodies(page("README.md"))] == ["/destinations", "/deliveries", "/dlq/redrive"]


def test_the_json_examples_are_json() -> None:
    for path in PAGES:
        for text in re.findall(r"^```json\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            json.loads(text)


def in_words(seconds: float) -> str:
    """As the schedule in docs/retries.md writes a time."""
    for unit, unit_seconds in (("h", 3_600), ("min", 60)):
        if seconds >= unit_seconds:
            return f"{seconds / unit_seconds:.1f} {unit}"
    return f"{seconds:g} s"


def test_the_default_schedule_is_the_one_that_is_computed() -> None:
    least_total, most_total = 0.0, 0.0
    expected = ["| 1 | none | 0 s |"]
    for number in range(1, limits.ATTEMPTS_MAX_DEFAULT):
        least = backoff_seconds(RetryPolicy(), number, 1.0)
        most = backoff_seconds(RetryPolicy(), number, 0.0)
        least_total, most_total = least_total + least, most_total + most
        expected.append(
            f"| {number + 1} | {in_words(least)} – {in_words(most)} "
            f"| {in_words(least_total)} – {in_words(most_total)} |"
        )
    assert re.findall(r"^\| \d+ \|[^`\n]*\|$", page("docs/retries.md"), re.MULTILINE) == expected
    # What the page concludes from it: the attempts run out before the deadline does.
    assert most_total < DEADLINE_SECONDS_DEFAULT


def test_every_outcome_and_every_reason_is_explained() -> None:
    text = page("docs/retries.md")
    assert [name for name in [*Outcome, *DeadReason] if f"`{name}`" not in text] == []
    reasons = re.findall(
        r"`([a-z_]+)`", "".join(re.findall(r"^\| (.*?) \|", page("docs/runbooks/dlq-growing.md"), re.M))
    )
    assert set(reasons) == set(DeadReason)


def test_every_problem_is_in_the_contract_with_its_status() -> None:
    rows = re.findall(r"^\| `/problems/([a-z-]+)` \| (\d+) \|", page("docs/api.md"), re.MULTILINE)
    assert {(slug, int(status)) for slug, status in rows} == {problem.value[:2] for problem in Problem}


def test_every_route_is_in_the_contract() -> None:
    text = page("docs/api.md")
    routes = [(method.upper(), path) for path, methods in openapi_document()["paths"].items() for method in methods]
    missing = []
    for method, path in routes:
        short = re.sub(r"\{[a-z_]+\}", "{id}", path)
        # A table of deeds on one thing names the rest of them by their last step alone.
        deed = f"`/{short.rsplit('/', 1)[1]}`" if short.startswith("/deliveries/{id}/") else "\0"
        if not re.search(rf"{method}\s+{re.escape(short)}`", text) and deed not in text:
            missing.append((method, path))
    assert missing == []


def test_every_event_of_the_log_is_explained_to_operators() -> None:
    known = {value for name, value in vars(events).items() if name.isupper()}
    cells = re.findall(
        r"^\| (`[a-z_]+\.[a-z_]+`(?:, `[a-z_]+\.[a-z_]+`)*) \|", page("docs/operations.md"), re.MULTILINE
    )
    assert set(re.findall(r"`([^`]+)`", " ".join(cells))) == known


def test_the_image_runs_as_a_numeric_user_that_is_not_root() -> None:
    users = re.findall(r"^USER (\S+)", page("Dockerfile"), re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])


def test_a_container_is_given_longer_to_stop_than_a_worker_takes() -> None:
    compose = page("deploy/compose.yaml")
    worker = re.search(r"^  worker:\n(?:    .*\n)*?    stop_grace_period: (\d+)s", compose, re.MULTILINE)
    grace = re.search(r'WORKER_GRACE_SECONDS: "(\d+)"', compose)
    assert worker is not None
    assert grace is not None
    assert int(grace[1]) == Settings.model_fields["worker_grace_seconds"].default
    assert int(worker[1]) >= int(grace[1]) + 10


@pytest.mark.parametrize("path", [*PAGES, *OPERATORS], ids=ids)
def test_nothing_tells_of_the_machine_it_was_written_on(path: Path) -> None:
    assert re.findall(r"(?:^|[\s`'\"(=])/(?:work|root|home|Users)/", path.read_text(encoding="utf-8")) == []
