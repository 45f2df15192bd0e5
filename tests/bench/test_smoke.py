"""The benchmark runs, what it counts adds up, and the relations between its figures hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import meter, wrk
from bench.load import Plan
from bench.messages import PAYLOAD_BYTES_MIN, Requests, read_payload
from bench.quantiles import quantiles
from bench.report import Check, Report
from bench.scenarios import ALL, SMOKE

ROOT = Path(__file__).resolve().parents[2]
SMOKE_SECONDS_MAX = 300  # a minute on a machine that is not also running other tests
PNG = b"\x89PNG"


@pytest.mark.timeout(SMOKE_SECONDS_MAX + 10)
def test_the_smoke_run_ends_with_one_sentence_of_figures_and_writes_its_files(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "--smoke", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SMOKE_SECONDS_MAX,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2_000:] + ended.stderr[-2_000:]
    last = ended.stdout.rstrip().rpartition("\n")[2]
    assert last.startswith("Every relation held: ")
    assert last.endswith(".")
    for name in SMOKE:
        told = json.loads((tmp_path / f"{name}.json").read_text())
        assert told["rows"]
        assert all(check["held"] for check in told["checks"])
        assert told["about"]["commit"]
        assert told["about"]["python"]
        assert f"| {next(iter(told['rows'][0]))} |" in (tmp_path / f"{name}.md").read_text()
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_a_relation_that_does_not_hold_is_said() -> None:
    report = Report("x", "X", checks=[Check("one is more than two", held=False)])
    about = {"at": "2026-01-01T00:00:00+00:00", "commit": "c", "cpus": 1, "cpu": "c", "kernel": "6"}
    text = report.as_markdown({**about, "python": "3", "postgres": "1", "valkey": "1"})
    assert "**not held**: one is more than two" in text


@pytest.mark.parametrize(("batch_count", "payload_bytes"), [(1, 1_000), (1, PAYLOAD_BYTES_MIN), (3, 200)])
def test_a_rendered_request_is_what_its_length_says_and_its_payload_reads_back(
    batch_count: int, payload_bytes: int
) -> None:
    requests = Requests(
        key="hlk_k",
        run="r1",
        destination_ids=["dst_a", "dst_b"],
        payload_bytes=payload_bytes,
        batch_count=batch_count,
    )
    head, _, body = requests.render(7, 123_456_789).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    document = json.loads(body)
    items = document["deliveries"] if batch_count > 1 else [document]
    assert [item["destination_id"] for item in items] == ["dst_b", "dst_a", "dst_b"][:batch_count]
    start = body.index(b'{"n"')
    assert read_payload(body[start : start + payload_bytes]) == (7, 123_456_789)
    assert body[start : start + payload_bytes].count(b"}") == 1
    assert len(json.dumps(items[0]["payload"], separators=(",", ":"))) == payload_bytes


def test_quantiles_are_those_of_the_samples() -> None:
    assert quantiles([]) == {}
    assert quantiles(range(1, 1_001)) == {"p50": 501, "p90": 901, "p99": 991, "p99.9": 1000, "p100": 1000}


def test_the_meter_counts_what_a_child_spent_after_it_has_ended() -> None:
    before = meter.cpu_seconds([meter.own_pid()])
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert meter.cpu_seconds([meter.own_pid()]) - before >= 0.25


@pytest.mark.skipif(not wrk.is_there(), reason="no wrk here: the built-in load is used")
def test_wrk_fails_loudly_when_nobody_listens() -> None:
    with pytest.raises((RuntimeError, subprocess.CalledProcessError)):
        wrk.run(Plan(port=9, key="hlk_k", run="r", destination_ids=["dst_a"], seconds=0.2))


def test_every_scenario_of_the_issue_is_there() -> None:
    assert set(SMOKE) <= set(ALL)
    assert len(ALL) == 9
