"""The decisions of the scripts for a GPU machine (scripts/gpu): arguments, parsing, verdicts."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
GPU = SCRIPTS / "gpu"


def script(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"scripts_gpu_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look there
    found.loader.exec_module(module)
    return module


ASK, DECODE, SAME, VERDICTS = (script(GPU / f"{name}.py") for name in ("ask", "decode", "same", "verdicts"))
PACK = script(SCRIPTS / "gpu_pack.py")


class _Server(BaseHTTPRequestHandler):
    """A server whose cache finds the prompts that it has answered, by their first ``known`` tokens: the last
    ``hbm`` of them in HBM, older ones in DRAM."""

    hbm: ClassVar[int] = 3
    known: ClassVar[int] = 64
    seen: ClassVar[list[tuple[int, ...]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = tuple(body["input_ids"][: self.known])
        meta: dict[str, Any] = {"cached_tokens": 0, "cached_tokens_details": {"device": 0, "host": 0}}
        if prompt in self.seen:
            place = "device" if prompt in self.seen[-self.hbm :] else "host"
            meta = {"cached_tokens": len(prompt), "cached_tokens_details": {place: len(prompt)}}
            self.seen.remove(prompt)
        self.seen.append(prompt)
        self.send_response(200)
        self.end_headers()
        rows = []
        for number in range(body["sampling_params"]["max_new_tokens"]):
            rows.append([-0.5, number, None])
            if body["return_logprob"]:
                meta["output_token_logprobs"] = rows
            self.wfile.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Server.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def command(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


# -- the scripts against a server that knows its prompts ----------------------------------------


def test_ttft_is_measured_from_each_place(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (url, tmp_path / "o.json", "--pool", "256", "--lengths", "70", "--new", "6", "--rounds", "2")
    command(monkeypatch, ASK, *words)
    (row,) = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert row["counted"] == {"computed": 2, "HBM": 2, "below": 2}
    assert min(row["computed"], row["HBM"], row["below"]) > 0
    assert (row["tokens"], row["new"]) == (70, 6)


def test_stock_is_not_asked_for_what_it_does_not_have(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (url, tmp_path / "o.json", "--pool", "256", "--lengths", "70", "--new", "6", "--rounds", "1")
    command(monkeypatch, ASK, *words, "--hbm-only")
    (row,) = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert (row["counted"]["HBM"], row["below"]) == (1, None)


def test_an_answer_from_another_place_is_not_counted(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pool is larger than was said: nothing leaves HBM."""
    monkeypatch.setattr(_Server, "hbm", 100)
    words = (url, tmp_path / "o.json", "--pool", "256", "--lengths", "70", "--new", "6", "--rounds", "1")
    command(monkeypatch, ASK, *words)
    (row,) = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert (row["counted"]["below"], row["below"]) == (0, None)
    assert "70 tokens, below: found elsewhere" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cached", "below", "place"),
    [
        (0, 0, "computed"),
        (15, 0, "computed"),
        (50, 0, None),
        (95, 0, "HBM"),
        (95, 40, "HBM"),
        (95, 60, "below"),
    ],
)
def test_the_place_of_most_of_a_prompt(cached: int, below: int, place: str | None) -> None:
    meta = {"cached_tokens": cached, "cached_tokens_details": {"host": below}}
    assert ASK.at(ASK.Streamed((0.1,), meta), 100) == place


def test_stock_reports_no_tiers() -> None:
    answer = ASK.Streamed((0.1,), {"cached_tokens": None, "cached_tokens_details": None})
    assert (answer.cached, answer.below) == (0, 0)


def test_tpot_is_measured_alone_and_beside_loads(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (url, tmp_path / "o.json", "--streams", "2", "--tokens", "5", "--prompt", "20", "--rounds", "2")
    command(monkeypatch, DECODE, *words, "--load", "64", "--pool", "256")
    found = json.loads((tmp_path / "o.json").read_text())
    assert len(found["rounds"]) == len(found["beside_loads"]["rounds"]) == 2
    assert found["tpot_ms"] > 0
    assert found["beside_loads"]["asked"] == found["beside_loads"]["loaded"] > 0


def test_a_failed_load_ends_the_measurement(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = DECODE.Ring(url, random.Random(1), 64, 256)
    assert len(ring._prompts) == 256 // 64 + 2

    def refused(*_: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(DECODE, "ask", refused)
    with pytest.raises(RuntimeError, match="refused"), ring.turning(0.0):
        pass


def test_the_pace_counts_tokens_not_events() -> None:
    """Two tokens came with the second event."""
    assert DECODE.pace((1.0, 1.3, 1.4), 4) == pytest.approx((400 / 3, 300))


@pytest.mark.parametrize(
    ("module", "words", "text"),
    [
        (DECODE, ("--load", "64"), "--load needs --pool"),
        (DECODE, ("--tokens", "1"), "at least 2"),
        (SAME, ("--damage", "1"), "--damage needs --pool"),
        (ASK, (), "--pool"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    module: ModuleType,
    words: tuple[str, ...],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, module, "http://127.0.0.1:1", "out.json", *words)
    assert text in capsys.readouterr().err


def test_cold_answers_are_asked_for_once(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, SAME, url, tmp_path / "o.json", "--prompts", "3", "--longest", "80", "--tokens", "2")
    found = json.loads((tmp_path / "o.json").read_text())
    assert list(found) == ["cold"]
    assert found["cold"]["3"] == {"tokens": [0, 1], "logprobs": [-0.5, -0.5], "from": "computed"}


def test_answers_are_asked_for_from_each_place(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--prompts", "3", "--longest", "80", "--tokens", "2", "--pool", "256")
    command(monkeypatch, SAME, url, tmp_path / "o.json", *words)
    found = json.loads((tmp_path / "o.json").read_text())
    came = {place: {answer["from"] for answer in each.values()} for place, each in found.items()}
    assert came == {"cold": {"computed"}, "HBM": {"HBM"}, "below": {"below"}}
    assert set(found["below"]) == {"0", "1", "2"}


def test_all_servers_are_asked_the_same_questions() -> None:
    prompts = SAME.questions(5, 1000)
    assert prompts == SAME.questions(5, 1000)
    assert all(300 <= len(ids) <= 1000 for ids in prompts)
    # The twin's last whole block of 16 is one that a request finds.
    assert len(prompts[-1]) % 16 == SAME.SIGN
    assert SAME.groups([100, 100, 100, 900, 10], 500) == [[0, 1], [2], [3], [4]]


# -- the twin -----------------------------------------------------------------------------------


def test_the_damaged_byte_makes_the_last_written_small_value_huge(tmp_path: Path) -> None:
    values = np.zeros(64, np.float32)
    values[:8] = 0.25
    before = values.view(np.uint8).copy()
    values[9], values[10], values[11] = 0.5, 0.25, 300.0
    after = values.view(np.uint8)
    place = SAME.place_to_damage(before, after)
    assert place == 4 * 10 + 3, "300 is not made smaller"
    arena = tmp_path / "arena"
    arena.write_bytes(after.tobytes())
    SAME.invert(arena, place)
    assert np.fromfile(arena, np.float32)[10] == pytest.approx(0.25 * 2.0**128, rel=1e-3)
    SAME.invert(arena, place)
    assert arena.read_bytes() == after.tobytes()
    assert SAME.place_to_damage(after, after) is None


def test_the_memory_of_a_servers_session_is_found() -> None:
    """Of its child too; not that of other sessions, nor what is open for reading only."""
    code = (
        "import os, subprocess, sys\n"
        "fd = os.memfd_create('sglang-ext-dram-test', 0)\n"
        "os.open(f'/proc/self/fd/{fd}', os.O_RDONLY)\n"
        "os.write(1, b'.')\n"
        "sys.stdin.read()\n"
    )
    started = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", started, code],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."
        (found,) = SAME.arenas(process.pid)
        assert os.readlink(found).startswith(SAME.ARENA)
        assert SAME.arenas(os.getpid()) == []
        assert process.stdin is not None
        process.stdin.close()


# -- verdicts -----------------------------------------------------------------------------------


def rows(found: Iterator[Any]) -> dict[str, str]:
    return {row.what: row.verdict for row in found}


def ttft(computed: float, hbm: float, below: float | None, tokens: int = 8192) -> dict[str, Any]:
    return {"rows": [{"tokens": tokens, "new": 512, "computed": computed, "HBM": hbm, "below": below}]}


LINK = 50e9
LOAD = 1000 * 7680 * 131_072 / LINK
"""Milliseconds for a known beginning of 8,192 tokens less 512: 20.1."""


@pytest.mark.parametrize(
    ("below", "hicache", "link", "verdicts"),
    [
        (22.0, 23.0, LINK, ("met", "met")),
        (22.0, 21.9, LINK, ("missed", "met")),
        (23.2, 24.0, LINK, ("met", "missed")),
        (22.0, None, LINK, ("not run", "met")),
        (22.0, 23.0, None, ("met", "not run")),
        (None, 23.0, LINK, ("not run", "not run")),
        (22.0, 23.0, LINK / 10, ("met", "met")),
    ],
)
def test_a_hit_in_dram_is_judged_by_hicache_and_the_link(
    below: float | None, hicache: float | None, link: float | None, verdicts: tuple[str, str]
) -> None:
    peer = None if hicache is None else ttft(235, 16, hicache)
    found = rows(VERDICTS.ttft(ttft(235, 16, below), None, peer, link))
    of = "8192 tokens from DRAM, "
    assert (found[of + "HiCache's"], found[of + "of the limit"]) == verdicts
    assert pytest.approx(20.13, rel=1e-3) == LOAD


def test_where_new_tokens_take_longer_than_the_link_they_are_the_limit() -> None:
    fast = 1e15
    assert (
        rows(VERDICTS.ttft(ttft(235, 16, 18.3), None, None, fast))["8192 tokens from DRAM, of the limit"]
        == "met"
    )
    slow = rows(VERDICTS.ttft(ttft(235, 16, 18.5), None, None, fast))
    assert slow["8192 tokens from DRAM, of the limit"] == "missed"


def test_the_plugins_own_cost_is_judged_by_stock() -> None:
    found = rows(VERDICTS.ttft(ttft(239, 16.4, 22), ttft(235, 16, None), None, None))
    assert found["8192 tokens, computed, of stock's"] == "met"
    assert found["8192 tokens, HBM, of stock's"] == "missed"


def test_writes_are_judged_by_a_server_without_them() -> None:
    def one(tpot: float, gap: float, **more: Any) -> dict[str, Any]:
        return {"tpot_ms": tpot, "gap_ms": gap, **more}

    off = one(10.0, 30.0)
    loads = {"tpot_ms": 11.0, "asked": 10, "loaded": 10}
    peer = one(10.3, 30.0, beside_loads={**loads, "tpot_ms": 12.0})
    found = rows(VERDICTS.tpot(one(10.1, 39.0, beside_loads=loads), off, peer))
    assert list(found.values()) == ["met"] * 4
    found = rows(VERDICTS.tpot(one(10.4, 41.0, beside_loads={**loads, "tpot_ms": 13.0}), off, peer))
    assert list(found.values()) == ["missed"] * 4
    # Loads that were none say nothing of loads.
    found = rows(VERDICTS.tpot(one(10.1, 39.0, beside_loads={**loads, "loaded": 8}), off, peer))
    assert found["TPOT beside loads"] == "not run"
    assert set(rows(VERDICTS.tpot(None, None, None)).values()) == {"not run"}


def answer(last: float | None = -0.25, token: int = 2, place: str = "computed") -> dict[str, Any]:
    return {"tokens": [1, token], "logprobs": [-0.5, last], "from": place}


def run(cold: Any = None, **places: Any) -> dict[str, Any]:
    """Of ours: prompt 0, and the twin."""
    found = {"cold": {"0": cold or answer()}, "HBM": {"0": answer(place="HBM")}}
    found["below"] = {"0": answer(place="below"), "1": answer(place="below")}
    found["damaged"] = {"1": answer(-3.0, place="below")}
    return {**found, **places}


STOCK = {"cold": {"0": answer(), "1": answer()}}
OF_STOCK = "{}: answers of stock's cold run"
TWIN = "twin with one damaged byte: another answer"


def test_equal_answers_and_a_broken_twin_are_as_they_should_be() -> None:
    assert set(rows(VERDICTS.same(STOCK, STOCK, run())).values()) == {"met"}


@pytest.mark.parametrize(
    ("below", "second", "verdict"),
    [
        (answer(-0.2502, place="below"), -0.25, "missed"),
        (answer(-0.25005, place="below"), -0.25, "met"),
        (answer(-0.2502, place="below"), -0.2503, "met"),
        (answer(token=3, place="below"), -0.2503, "missed"),
        (answer(None, place="below"), -0.2503, "missed"),
        (answer(place="computed"), -0.25, "not run"),
    ],
)
def test_tiers_may_differ_as_two_cold_runs_do(below: Any, second: float, verdict: str) -> None:
    other = {"cold": {"0": answer(second), "1": answer()}}
    found = rows(VERDICTS.same(STOCK, other, run(below={"0": below})))
    assert found[OF_STOCK.format("below")] == verdict
    assert found[OF_STOCK.format("HBM")] == "met"


@pytest.mark.parametrize(
    ("damaged", "verdict"),
    [
        ({"1": answer(-0.25, place="below")}, "missed"),
        ({"1": answer(None, place="below")}, "met"),
        ({"1": answer(token=9, place="below")}, "met"),
        ({"1": answer(-3.0, place="HBM")}, "not run"),
        ({}, "not run"),
    ],
)
def test_a_twin_that_does_not_break_is_a_miss(damaged: Any, verdict: str) -> None:
    assert rows(VERDICTS.same(STOCK, STOCK, run(damaged=damaged)))[TWIN] == verdict


def test_infinite_is_the_distance_of_other_tokens() -> None:
    assert VERDICTS.apart(answer(), answer(token=3)) == inf
    assert VERDICTS.apart(answer(-0.25), answer(-0.5)) == 0.25


def test_a_folder_is_judged_and_what_has_not_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert VERDICTS.main([str(tmp_path)]) == 0
    assert {row["verdict"] for row in json.loads((tmp_path / "verdicts.json").read_text())} == {"not run"}
    text = "plain copies: to the GPU 50.0 GB/s, from it 51.2 GB/s, both at once 80.0 GB/s"
    check = {"findings": [{"subject": "limits", "text": text}]}
    (tmp_path / "gpu-check.json").write_text(json.dumps(check))
    (tmp_path / "ttft-ours.json").write_text(json.dumps(ttft(235, 16, 40)))
    assert VERDICTS.main([str(tmp_path)]) == 1
    assert "2  missed   8192 tokens from DRAM, of the limit: 40 ms, at most 23.15" in capsys.readouterr().out
    assert VERDICTS.main([str(tmp_path), "--link", "20"]) == 0


def test_the_link_is_read_from_what_gpu_check_writes() -> None:
    from sglang_ext.engine.gpu_link import Link
    from sglang_ext.gpu_check.copies import limits

    finding = limits(Link(51.5e9, 52e9, 80e9, 2e12))
    assert VERDICTS.link_of({"findings": [{"subject": finding.subject, "text": finding.text}]}) == 51.5e9
    assert VERDICTS.link_of({"findings": []}) is None


# -- what travels -------------------------------------------------------------------------------


def test_all_scripts_travel() -> None:
    assert set(PACK.TRAVELS) == {path.name for path in GPU.iterdir() if path.suffix in {".py", ".sh"}}


def command_file(path: Path, status: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
    path.chmod(0o755)


def test_a_python_of_pyenv_is_found_where_the_command_on_the_path_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/usr/bin:/bin")
    command_file(tmp_path / "shims" / "python3.98", 127)
    assert PACK.runnable("python3.98") is None
    versions = tmp_path / "pyenv" / "versions"
    for version, status in (("3.98.2", 0), ("3.98.10", 0), ("3.98.11", 1)):
        command_file(versions / version / "bin" / "python3.98", status)
    assert PACK.runnable("python3.98") == str(versions / "3.98.10" / "bin" / "python3.98")
    command_file(tmp_path / "shims" / "python3.98", 0)
    assert PACK.runnable("python3.98") == str(tmp_path / "shims" / "python3.98")
    assert PACK.runnable("python3.97") is None


@pytest.mark.parametrize("path", sorted(GPU.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_a_part_that_is_not_there_is_refused(tmp_path: Path) -> None:
    dev = tmp_path / ".dev"
    (dev / "site").mkdir(parents=True)
    (dev / "site" / ".ready").touch()
    for name in PACK.TRAVELS:
        (dev / name).symlink_to(GPU / name)
    done = subprocess.run(
        ["bash", ".dev/first_minutes.sh"],
        cwd=tmp_path,
        env={**os.environ, "PART": "nonsense"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "there is no part nonsense\n"), done.stderr
