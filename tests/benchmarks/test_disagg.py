"""The disagg benchmark: its comparisons, from turns that are made up; and its loads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.disagg.__main__ import chosen
from benchmarks.disagg.loads import Size, middles, sessions, tokens
from benchmarks.disagg.report import Leg, Turn, compare, complete_summary, growth, late, line, report_on
from benchmarks.disagg.servers import DESIGNS, ROUTED, STOCK_DESIGN, STOCK_ROUTED, TRUTH, Design
from benchmarks.lib.common import Report
from sglang_ext.errors import ConfigError

ASKED = {
    "ttft_c3_vs_c1_turn3",
    "jct_c3_vs_basic",
    "ttft_c3_vs_stock_mooncake_tcp",
    "jct_c3_vs_stock_mooncake_tcp",
    "bytes_per_turn_growth_c1",
    "bytes_per_turn_growth_c3",
    "pull_vs_push_jct",
    "ttft_new_pair_vs_warm",
    "ttft_split_16k_vs_alone",
    "ttft_2p1d_fetched_vs_computed",
    "ttft_spilled_vs_not",
    "wrong_answers",
}


def leg(name: str, ttft: float, sent: list[float], wrong: int = 0, load: str = "sharegpt") -> Leg:
    known = (*DESIGNS, ROUTED, STOCK_DESIGN, STOCK_ROUTED)
    design = next(design for design in known if design.name == name)
    turns = [
        Turn(load, "0", number, 100 * number, 34, ttft, 2 * ttft, 0.01, 0, bytes_)
        for number, bytes_ in enumerate(sent, 1)
    ]
    return Leg(design, turns, wrong)


def test_ratios_are_of_means_and_of_late_turns() -> None:
    report = Report("disagg")
    one, three = leg("1", 0.5, [100, 200, 300, 400]), leg("3", 0.2, [100, 100, 100, 100], wrong=2)
    # Turns that do not count: early turns, and loads that do not grow.
    one.turns[0].ttft = 50.0
    one.turns += leg("1", 9.0, [1, 1, 1, 1], load="loogle").turns
    three.turns += leg("3", 9.0, [1, 1, 1, 1], load="loogle").turns
    basic = leg("basic", 0.8, [100, 200, 300, 400])
    basic.turns += leg("basic", 9.0, [1, 1, 1, 1], load="loogle").turns
    truth = leg(TRUTH, 1.0, [0, 0, 0, 0])
    truth.turns += leg(TRUTH, 9.0, [0, 0, 0, 0], load="loogle").turns
    report_on(report, [truth, basic, one, three])
    complete_summary(report, {"jct_c3_vs_stock_mooncake_tcp": "it is not there"})
    summary = report.summary
    assert set(summary) == ASKED
    assert "jct_c3_vs_stock_mooncake_tcp: it is not there" in report.notes
    assert any(note.startswith("pull_vs_push_jct: ") for note in report.notes), "null with a reason"
    assert summary["ttft_c3_vs_c1_turn3"] == pytest.approx(0.4)
    assert summary["jct_c3_vs_basic"] == pytest.approx((0.4 + 18) / (1.6 + 18))
    assert summary["bytes_per_turn_growth_c1"] == pytest.approx(2.0)
    assert summary["bytes_per_turn_growth_c3"] == pytest.approx(1.0)
    assert summary["wrong_answers"] == 2
    assert summary["ttft_c3_vs_stock_mooncake_tcp"] is None, "left out, not zero"


def test_growth_is_by_what_the_user_added() -> None:
    found = leg("3", 1.0, [10, 50, 50, 100])
    found.turns[-1].added = 76
    assert growth(found) == pytest.approx(1.0)
    assert growth(leg("3", 1.0, [10, 50])) is None
    assert growth(None) is None


def test_routers_are_compared_with_routers() -> None:
    report = Report("disagg")
    legs = [
        leg(name, ttft, [1, 1, 1])
        for name, ttft in (
            (TRUTH, 1.0), ("3", 0.5), ("stock-mooncake_tcp", 1.0), ("3-routed", 0.6),
            ("stock-mooncake_tcp-routed", 0.8),
        )
    ]  # fmt: skip
    report_on(report, legs)
    assert report.summary["ttft_c3_vs_stock_mooncake_tcp"] == pytest.approx(0.75)
    report = Report("disagg")
    report_on(report, legs[:3])
    assert report.summary["ttft_c3_vs_stock_mooncake_tcp"] == pytest.approx(0.5)


def test_designs_are_compared_by_the_turns_that_both_were_asked() -> None:
    one, three = leg("1", 0.5, [1, 1, 1, 1]), leg("3", 0.25, [1, 1, 1, 1])
    three.turns[-1].ttft = 9.0
    one.turns.pop()
    found = compare(three, one, "ttft", late)
    assert found is not None
    assert (found.ratio, found.low, found.high, found.pairs) == (0.5, 0.5, 0.5, 1)
    assert compare(three, one, "ttft", lambda turn: turn.number == 4) is None
    one, three = leg("1", 1.0, [1] * 9), leg("3", 0.5, [1] * 9)
    three.turns[0].ttft = 5.0
    found = compare(three, one, "ttft")
    assert found is not None
    assert found.pairs_median == 0.5
    assert found.ratio == pytest.approx(1.0)
    assert found.low < found.ratio < found.high


def test_a_fit_distinguishes_a_line_from_a_curve() -> None:
    assert line([(1, 0.0), (2, 10.0), (3, 20.0)]) == pytest.approx((10.0, 1.0))
    bent = line([(n, float(n**4)) for n in range(9)])
    assert bent is not None
    assert bent[1] < 0.9
    assert line([(1, 1.0), (2, 2.0)]) is None
    assert line([(1, 1.0)] * 3) is None
    assert line([(1, 0.0), (2, 0.0), (3, 0.0)]) == (0.0, 0.0)


def test_few_of_a_row_are_like_all() -> None:
    assert list(middles(7)) == [3, 1, 5, 0, 2, 4, 6]
    assert sorted(middles(100)) == list(range(100))
    assert not list(middles(0))


def test_what_is_chosen_is_known() -> None:
    assert chosen("3, 1", ["1", "2", "3"], "--designs") == ["1", "3"]
    assert chosen(None, ["1"], "--designs") == ["1"]
    with pytest.raises(ConfigError, match="there is no '4'"):
        chosen("4", ["1"], "--designs")


def names(design: Design) -> list[tuple[str, str]]:
    return [design.keys("talk", turn) for turn in (1, 2)]


def test_a_design_finds_what_it_keeps() -> None:
    by = {design.name: names(design) for design in DESIGNS}
    # (does prefill find the last turn's, does decode, does prefill find the KV that decode has returned)
    seen = {
        name: (first[0] == second[0], first[1] == second[1], second[0] == first[1])
        for name, (first, second) in by.items()
    }
    assert seen["basic"] == (False, False, False)
    assert seen["1"] == (True, False, False)
    assert seen["2"] == (True, True, False)
    assert seen["3"] == (True, True, True)
    assert seen[TRUTH][1] is False
    assert seen["colocated-caching"][1] is True
    every = [name for found in by.values() for turn in found for name in set(turn)]
    assert len(set(by)) == len({name.split("/")[0] for name in every}), "names of its own"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(text)


def test_loads_keep_what_is_shared_and_how_long_it_is(tmp_path: Path) -> None:
    talk = [
        {"from": who, "value": text}
        for number in range(3)
        for who, text in (("human", f"question {number}"), ("gpt", "an answer of six words, here"))
    ]
    write(tmp_path / "sharegpt_zh/sharegpt_zh.0000-0499.jsonl.gz", json.dumps({"conversations": talk}) + "\n")
    write(
        tmp_path / "react_hotpotqa/prompts/prompts_naive.json.gz",
        json.dumps({"webthink_simple6": "few shots " * 9}),
    )
    step = "Thought {0}: think\nAction {0}: Search[x]\nObservation {0}: seen {0}\n"
    write(
        tmp_path / "react_hotpotqa/reflexion_logs/ReAct_base_100q_5trials.txt.gz",
        "BEGIN TRIAL 1\n\nQuestion: who?\n"
        + "".join(step.format(n) for n in (1, 2, 3))
        + "Correct answer: y",
    )
    pairs = [{"Q": f"what is {n}?", "A": "a b c d e", "S": ""} for n in range(3)]
    write(
        tmp_path / "loogle/shortdep_qa.jsonl.gz",
        json.dumps({"input": "word " * 50, "qa_pairs": str(pairs)}) + "\n",
    )
    chat, agent, reader = sessions(tmp_path, 1, Size(3, 100, 6, 10))
    assert [turn.added for turn in chat.turns] == [tokens(f"question {n}") for n in range(3)]
    assert [turn.answer for turn in chat.turns] == [6, 6, 6], "seven words and signs, cut at six"
    assert (len(agent.first), agent.grows) == (10, True)
    assert [turn.added for turn in agent.turns] == [
        tokens(text) for text in ("who?", "Observation 1: seen 1", "Observation 2: seen 2")
    ]
    assert (reader.first, reader.grows) == (tokens("word " * 10), False)
    assert [turn.answer for turn in reader.turns] == [5, 5, 5]
    with pytest.raises(ConfigError, match="too few sessions"):
        sessions(tmp_path, 2, Size(3, 100, 6, 10))
