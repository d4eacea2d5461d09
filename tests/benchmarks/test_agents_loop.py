"""The load of the agents' benchmarks: recorded sessions, cut and divided, and what counts of their turns."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.loop import Load, Served, lines_of
from benchmarks.agents.recorded import FILE, LONGEST_PAUSE_S, held_out, programs, tokens
from benchmarks.agents.replay import (
    KINDS,
    Counts,
    Expected,
    GuessedReplay,
    Memory,
    OrderedReplay,
    Replay,
    SwappedReplay,
)


def request(t: float, tokens_in: int, out: int, stop: str = "tool_use") -> dict[str, Any]:
    return {"agent": "main", "t": t, "in": tokens_in, "out": out, "stop": stop, "api_time": 2.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sessions of each kind: the first grows by 640 tokens a turn, the second is compacted half-way."""
    path = tmp_path / FILE
    path.parent.mkdir()
    found: list[dict[str, Any]] = []
    for number in range(40):
        grown = [request(10.0 * at, 3200 + 960 * at, 320) for at in range(20)]
        if number % 2:
            grown[10:] = [request(1000.0 + 10 * at, 1600 + 960 * at, 320) for at in range(10)]
        found.append({"id": f"trace_{number}", "requests": grown})
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in found)))
    return tmp_path


def test_sessions_are_of_one_kind_and_lengths_divided(folder: Path) -> None:
    tuned = programs(folder, held=False, steps=6, pace=4.0, most_tokens=10_000)
    held = programs(folder, held=True, steps=6, pace=4.0, most_tokens=10_000)
    assert {each.id.partition("/")[0] for each in tuned}.isdisjoint(
        each.id.partition("/")[0] for each in held
    )
    assert tuned
    assert all(held_out(each.id.partition("/")[0]) for each in held)
    for program in tuned:
        assert len(program.steps) == 6
        for step in program.steps:
            assert (step.new, step.answer, step.pause_s, step.tool) == (20, 10, 2.0, True)


def test_a_compacted_conversation_is_cut_there(folder: Path) -> None:
    for each in programs(folder, held=False, steps=6, pace=1.0, most_tokens=10_000):
        assert max(step.pause_s for step in each.steps) <= LONGEST_PAUSE_S
        assert each.tokens == each.past + 6 * 30


def test_long_stretches_are_left_out(folder: Path) -> None:
    everything = programs(folder, held=False, steps=6, pace=1.0, most_tokens=10_000)
    short = programs(folder, held=False, steps=6, pace=1.0, most_tokens=400)
    assert 0 < len(short) < len(everything)
    assert all(each.tokens <= 400 for each in short)


def test_the_same_name_gives_the_same_tokens() -> None:
    assert tokens("a", 50) == tokens("a", 50) != tokens("b", 50)


def test_each_agent_has_a_line_of_its_own(folder: Path) -> None:
    found = programs(folder, held=False, steps=6, pace=1.0, most_tokens=10_000)
    assert len(lines_of(found, 100)) == 100


def served(sent: float, **more: Any) -> Served:
    given: dict[str, Any] = {
        "program": "0/0/x", "sent": sent, "first": sent + 0.5, "ended": sent + 1, "prompt": 100, "known": 90,
        "hbm": 64, "below": 0, "answer": 4, "first_of_program": False, "tool": True,
    }  # fmt: skip
    return Served(**given | more)


def test_turns_count_after_the_warm_up_but_not_a_sessions_first() -> None:
    load = Load("0", 10.0, warm_s=2.0, began=100.0)
    load.served = [served(101), served(103, first_of_program=True), served(104, status=503), served(105)]
    assert [turn.sent for turn in load.counted] == [105]


def test_a_turn_is_in_hbm_up_to_its_last_block() -> None:
    assert served(0).in_hbm
    assert not served(0, hbm=48).in_hbm


def test_certain_hints_find_more_than_none_and_a_guess_lies_between(folder: Path) -> None:
    """All pauses of these sessions are alike, so that learnt hints are nearly certain, too."""
    found = programs(folder, held=False, steps=6, pace=4.0, most_tokens=10_000)
    fits = 3 * max(each.tokens for each in found)
    counts = {kind: Replay(found, 12, fits, kind).run(150.0) for kind in KINDS}
    guess = GuessedReplay(found, 12, fits).run(150.0)
    none, explicit = counts["no hints"], counts["explicit hints"]
    assert none.moved == 0
    assert none.share < explicit.share
    assert guess.share > none.share
    assert 0 <= explicit.vain <= explicit.moved
    certain, guessed = (
        OrderedReplay(found, 12, fits, certain=certain).run(150.0) for certain in (True, False)
    )
    assert certain.moved == guessed.moved == 0
    assert none.share < certain.share
    assert guessed.share <= certain.share
    swaps = SwappedReplay(found, 12, fits).run(150.0)
    assert none.share < swaps.share
    assert swaps.moved > 0


def test_deferred_sessions_go_before_those_used_since_and_the_latest_first() -> None:
    counts = Counts()
    memory = Memory(40, counts)
    for at, name in enumerate("abcd"):
        memory.sizes[name] = 10
        memory.add(name, float(at))
    memory.hints = {"b": Expected(-1, 50.0, 60.0, 1.5), "c": Expected(-1, 70.0, 80.0, 2.5)}
    memory.sizes["new"] = 10
    gone = []
    for number in range(4):
        before = set(memory.used)
        name = f"new{number}"
        memory.sizes[name] = 10
        memory.running.add(name)
        memory.add(name, 10.0)
        gone += sorted(before - set(memory.used))
    assert gone == ["a", "c", "b", "d"]
