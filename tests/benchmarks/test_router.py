"""The benchmark of the router runs, its parts do as named, and its summary has its keys."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.lib.common import Report
from benchmarks.router.__main__ import main
from benchmarks.router.connections import crowd
from benchmarks.router.load import Job, message
from benchmarks.router.processes import PEER, generator, peer_missing, stand_ins
from benchmarks.router.sessions import Words, conversations, play_arriving, play_rounds
from benchmarks.router.speed import CASES, CROWD, DIRECT, FRESH_CASES, MANY, ONE, OURS, Leg, summarise
from benchmarks.router.standin import FLOOD, HOLD
from sglang_ext.testing.tokenizer import write_tokenizer
from sglang_ext.testing.waiting import wait_until

pytestmark = pytest.mark.slow

CASE_OF_FRESH = FRESH_CASES[0]


@pytest.fixture
def workers(tmp_path: Path):
    with stand_ins(tmp_path, tokenizer=tmp_path, service_s=0.001, count=2, core=None) as ports:
        yield ports


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_the_load_generator_counts_answers(path: str, stream: bool, tmp_path: Path, workers) -> None:
    with generator(tmp_path, core=None) as load:
        result = load.measure(Job(workers[0], path, 1024, stream, 4, seconds=0.3))
    assert set(result["statuses"]) == {"200"}
    assert result["requests"] == result["statuses"]["200"] > 4
    assert 0.001 <= result["first_p50"] <= result["p50"] <= result["p99"]


def test_no_fresh_prompt_is_sent_twice(tmp_path: Path, workers) -> None:
    jobs = [CASE_OF_FRESH.job(workers[0], 0.2, first) for first in (1 << 20, 1 << 21)]
    sent = {message(job, number) for job in jobs for number in range(job.first, job.first + job.fresh)}
    assert len(sent) == sum(job.fresh for job in jobs) > 1000
    with generator(tmp_path, core=None) as load:
        few = dataclasses.replace(jobs[0], fresh=40)
        result = load.measure(few)
    assert result["requests"] == 40


def test_each_request_may_have_a_connection_of_its_own(tmp_path: Path, workers) -> None:
    with generator(tmp_path, core=None) as load:
        result = load.measure(Job(workers[0], "/generate", 1024, False, 4, seconds=0.3, reconnect=True))
    assert result["requests"] == result["statuses"]["200"] > 4


@pytest.mark.parametrize("text", [HOLD, FLOOD])
def test_a_crowd_holds_its_streams(text: str, tmp_path: Path, workers) -> None:
    with crowd(tmp_path, workers[0], 3, text) as statuses:
        assert statuses == {"200": 3}
        to_worker = [
            one for one in psutil.net_connections("tcp") if one.raddr and one.raddr.port == workers[0]
        ]
        assert [one.status for one in to_worker].count(psutil.CONN_ESTABLISHED) == 3


def test_conversations_share_their_beginnings_and_nothing_else(tmp_path: Path) -> None:
    talks = conversations(Words(), 6, 3, shared_by=3, prefix_tokens=50, turn_tokens=10)
    first = [talk.turns[0] for talk in talks]
    write_tokenizer(tmp_path, 4096)
    from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=False)
    ids = [tokenizer(text)["input_ids"] for text in first]
    assert {len(one) for one in ids} == {60}
    assert ids[0][:50] == ids[2][:50] != ids[3][:50] == ids[5][:50]
    assert len({tuple(one) for one in ids}) == 6
    again = conversations(Words(), 6, 3, shared_by=3, prefix_tokens=50, turn_tokens=10)
    assert [talk.turns for talk in again] == [talk.turns for talk in talks]


def test_sessions_are_played_turn_by_turn(workers) -> None:
    talks = conversations(Words(), 4, 3, shared_by=2, prefix_tokens=20, turn_tokens=5)
    assert len(play_rounds(workers[0], talks, 2, at_once=2)) == 8
    assert {talk.next for talk in talks} == {2}
    seen = play_rounds(workers[0], talks, 1, at_once=2)
    assert [(one.prompt, one.cached) for one in seen] == [(300, 0)] * 4
    assert all(one.ttft > 0 for one in seen)
    assert talks[0].said.startswith(talks[0].turns[0])
    assert len(play_arriving(workers[0], conversations(
        Words(), 3, 2, shared_by=1, prefix_tokens=5, turn_tokens=5
    ), 1000.0)) == 6  # fmt: skip


def test_the_summary_takes_the_worst_case() -> None:
    def result(p50: float, requests: int) -> dict[str, object]:
        return {"p50": p50, "p99": p50 * 2, "requests": requests, "seconds": 1.0}

    legs = {name: Leg(0, None) for name in (DIRECT, OURS, PEER)}
    for case in CASES:
        is_worst = case.prompt_bytes > 1024 and case.stream
        legs[DIRECT].results[case] = [result(0.001, 1000)] * 3
        requests = 450 if case.fresh else 100 if is_worst else 900
        legs[OURS].results[case] = [result(0.004 if is_worst else 0.002, requests)] * 3
        legs[PEER].results[case] = [result(0.002, 200)] * 3
    report = Report("router")
    summarise(report, legs)
    assert {case.connections for case in CASES} == {ONE, MANY, CROWD}
    assert report.summary == pytest.approx({
        "added_p50_ms": 3.0,
        "added_p99_ms": 6.0,
        "added_p50_vs_sglang_router": 3.0,
        "added_p99_vs_sglang_router": 3.0,
        "fresh_vs_seen_rps": 0.5,
        "rps_vs_sglang_router": 0.5,
        "rps_fresh_vs_sglang_router": 2.25,
    })  # fmt: skip


def test_a_peer_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    assert "--sglang-router-python" in str(peer_missing(None))
    assert "left out" in str(peer_missing(tmp_path / "python"))


@pytest.mark.long
def test_quick_run(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["name"] == "router"
    assert set(report["summary"]) >= {"added_p50_ms", "added_p99_ms", "p99_ttft_vs_session_share2"}
    assert {row["case"] for row in report["rows"]} >= {
        "ordinary", "scarce pools", "scarce pools, tiers", "restart, tiers", "share ratio 2",
    }  # fmt: skip


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from benchmarks.router.processes import process
with process(["sleep", "300"], core=None, log=Path(sys.argv[1])) as running:
    print(running.pid, flush=True)
    time.sleep(300)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.terminate()  # without a handler of its own
    wait_until(lambda: _ended(child), seconds=10, what="its end")


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
