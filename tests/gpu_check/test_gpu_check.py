"""``gpu-check`` on this machine without a GPU, and its logic on an emulated one. The emulator says nothing of
speed or order: that these rows are there, and judge, is tested; their words on a GPU are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_ext.cluster.doctor.findings import Level
from sglang_ext.gpu_check.command import main
from sglang_ext.gpu_check.serving import Answer, _compared, ask, ask_pair

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("emulated.py")


@cache
def everything() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def emulated(change: str = "all") -> dict[str, Any]:
    found: dict[str, Any] = everything()[change]
    return found


def rows(found: dict[str, Any], subject: str) -> list[dict[str, str]]:
    return [row for row in found["findings"] if row["subject"] == subject]


def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (row,) = found["findings"]
    assert row["level"] == "problem"
    assert "no GPU" in row["text"]
    assert "sglang-ext doctor" in row["advice"]


@pytest.mark.timeout(1700)
def test_each_step_has_its_rows() -> None:
    found = emulated()
    subjects = {row["subject"] for row in found["findings"]}
    assert subjects >= {"GPU", "libraries", "locked memory", "DRAM tier", "prefill/decode", "limits"}
    assert "H100" in rows(found, "GPU")[0]["text"]
    assert [row["level"] for row in rows(found, "bytes")] == ["ok"] * 4
    assert len(rows(found, "order")) == 2
    assert {row["text"].partition(":")[0] for row in rows(found, "speed")} == {
        *("load in order", "load scattered", "write in order", "write scattered"),
        "load by SGLang's kernel",
    }
    # SGLang's kernel is compiled for a GPU; ours runs in Triton's interpreter.
    assert any("cannot be used here" in row["text"] for row in rows(found, "speed"))
    assert not any("our kernel" in row["text"] for row in rows(found, "speed"))


def test_a_pair_on_this_host_needs_no_rdma() -> None:
    (row,) = rows(emulated(), "prefill/decode")
    assert row["level"] == "ok"
    assert "cuda_ipc" in row["text"]


def test_a_twin_that_does_not_break_is_no_proof_of_order() -> None:
    """Nothing runs beside anything in the emulator."""
    levels = {row["level"] for row in rows(emulated(), "order")}
    assert levels <= {"warning", "problem"}


def test_a_step_that_ends_is_a_problem_and_the_others_go_on() -> None:
    (row,) = rows(emulated(), "gpu-check")
    assert "ZeroDivisionError" in row["text"]
    assert emulated()["problems"] >= 1


def test_damaged_copies_are_problems() -> None:
    levels = [row["level"] for row in rows(emulated("damage"), "bytes")]
    assert levels == ["problem"] * 4


def test_slow_copies_are_warnings_with_what_they_cost() -> None:
    slow = [row for row in rows(emulated("slow"), "speed") if row["text"].startswith(("load in", "load sc"))]
    assert [row["level"] for row in slow] == ["warning"] * 2
    assert all("hits in DRAM" in row["advice"] for row in slow)


def test_a_pass_reads_layers_that_arrive_while_it_runs() -> None:
    """The mover with its threads; the emulator executes queued operations at once."""
    assert emulated("arrives")["same"] == [True] * 6


def test_a_start_says_in_one_line_what_it_found() -> None:
    line = everything()["line"]
    assert "H100" in line
    assert "DRAM tier pinned" in line
    assert "travels by shm (verbs: no RDMA device)" in line
    assert "\n" not in line


COLD = Answer((1, 2), (-0.5, -0.25), "computed", 0.2)


@pytest.mark.parametrize(
    ("found", "bound", "level", "text"),
    [
        (Answer((1, 2), (-0.5, -0.25), "DRAM", 0.1), 0.0, Level.OK, "the same answer"),
        (Answer((1, 3), (-0.5, -0.25), "DRAM", 0.1), 0.0, Level.PROBLEM, "ANOTHER ANSWER"),
        (Answer((1,), (-0.5,), "DRAM", 0.1), 0.0, Level.PROBLEM, "ANOTHER ANSWER"),
        (Answer((1, 2), (-0.5, -0.2502), "DRAM", 0.1), 0.0, Level.PROBLEM, "2.0e-04 apart; allowed 1.0e-04"),
        (Answer((1, 2), (-0.5, -0.25005), "DRAM", 0.1), 0.0, Level.OK, "5.0e-05 apart; allowed 1.0e-04"),
        (Answer((1, 2), (-0.5, -0.26), "DRAM", 0.1), 0.02, Level.OK, "two computed answers 2.0e-02"),
        (Answer((1, 2), (-0.5, -0.28), "DRAM", 0.1), 0.02, Level.PROBLEM, "allowed 2.0e-02"),
        (Answer((1, 2), (-0.5, nan), "DRAM", 0.1), 0.02, Level.PROBLEM, "ANOTHER ANSWER"),
        (Answer((1, 3), (-0.5, -0.25), "DRAM", 0.1), inf, Level.WARNING, "not compared"),
        (Answer((1, 2), (-0.5, -0.25), "HBM", 0.1), 0.0, Level.WARNING, "from HBM instead"),
    ],
)
def test_a_tiers_answer_is_judged_by_two_computed_ones(
    found: Answer, bound: float, level: Level, text: str
) -> None:
    """The judgement of the step with a server."""
    finding = _compared("DRAM", COLD, found, bound)
    assert finding.level is level
    assert text in finding.text
    assert finding.text.startswith("DRAM: 100 ms to the first token, computed 200")


class _Server(BaseHTTPRequestHandler):
    """Streams an answer of three tokens slowly, or an error, as SGLang does."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        self.send_response(200)
        self.end_headers()
        if body["input_ids"] == [0]:
            self.wfile.write(b'data: {"error": {"message": "too long"}}\n\ndata: [DONE]\n\n')
            return
        rows = []
        for token in range(3):
            rows.append([None if token == 2 else -0.5, token, None])
            meta = {"output_token_logprobs": rows, "cached_tokens_details": {"host": 64}}
            self.wfile.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.2)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Server.bodies.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_answer_is_timed_to_its_first_token(url: str) -> None:
    begin = time.perf_counter()
    answer = ask(url, [5] * 100, extra_key="k")
    whole = time.perf_counter() - begin
    assert (answer.tokens, answer.logprobs[:2], answer.tier) == ((0, 1, 2), (-0.5, -0.5), "DRAM")
    assert isnan(answer.logprobs[2])
    assert answer.seconds < whole - 0.35
    assert (_Server.bodies[0]["stream"], _Server.bodies[0]["extra_key"]) == (True, "k")


def test_a_pair_is_asked_with_one_number(url: str) -> None:
    answer = ask_pair(url, url, 8998, [5] * 100)
    assert (answer.tokens, answer.tier) == ((0, 1, 2), "DRAM")
    first, second = _Server.bodies
    assert first == second
    assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", 8998)
    assert 0 < first["bootstrap_room"] < 1 << 63


def test_an_answer_after_a_hand_over_is_judged_as_a_tiers() -> None:
    finding = _compared("DRAM", COLD, Answer((1, 3), (-0.5, -0.25), "DRAM", 0.1), 0.0, apart=True)
    assert (finding.level, finding.subject) == (Level.PROBLEM, "prefill/decode")
    assert finding.text.startswith("DRAM, handed over: 100 ms to the first token, computed 200")
    assert "prefill and decode apart" in finding.advice


def test_a_prompt_that_the_server_refuses_is_an_error(url: str) -> None:
    with pytest.raises(RuntimeError, match="too long"):
        ask(url, [0])
