"""The load of agents: as long as the logs, each call behind those that it reads, with the graph's edges."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.advisory.graphs import LEAD, LEAD_BEGINS, NEW_TOKENS, READERS, Edge, fan_out, logged
from benchmarks.advisory.talks import Shape
from tests.benchmarks.test_traces import call, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path / "chatdev_logs/calls.jsonl.gz",
        [
            call("short", 0, 0, 4, "Plan", 100),
            call("long", 0, 0, 8, "Plan", 300),
            call("long", 1, 16, 20, "Code", 200),
            call("long", 2, 20, 36, "Plan", 400),
            call("long", 3, 36, 40, "Plan", 100),
        ],
    )
    return tmp_path


def test_agents_repeat_what_their_session_has_said(folder: Path) -> None:
    long, short, again = logged(folder, 3, 4, 7, Shape(pace=2.0, answer_scale=1, most_past=350))
    assert len(long) == 4
    assert len(short) == 1
    assert [call.session for call in long] == ["0/long/Plan", "0/long/Code", "0/long/Plan", "0/long/Plan"]
    assert again[0].session == "2/long/Plan"
    first, code, third, fourth = long
    assert (first.keeps, len(first.new)) == (0, 300)
    assert (code.keeps, len(code.new)) == (0, 200)
    # 300 tokens and an answer of 4 are there; the prompt has 350 at most, of which some are new.
    assert (third.keeps, len(third.new)) == (350 - NEW_TOKENS, NEW_TOKENS)
    assert (fourth.keeps, len(fourth.new)) == (100 - NEW_TOKENS, NEW_TOKENS)
    assert [call.pause_s for call in long] == [0.0, 4.0, 0.0, 0.0]
    # Planning took 4 s at least, in whatever run.
    assert first.edges == (Edge("0/long/Code", 2.0),)


def test_agents_are_played_from_where_they_take_turns(tmp_path: Path) -> None:
    order = ["Plan", "Plan", "Code", "Review", "Modify", "Review", "Modify", "Manual"]
    write(
        tmp_path / "chatdev_logs/calls.jsonl.gz",
        [call("run", at, 10 * at, 10 * at + 4, phase, 200) for at, phase in enumerate(order)],
    )
    (chain,) = logged(tmp_path, 1, 4, 7, Shape(pace=2.0))
    assert [each.session for each in chain] == ["0/run/Review", "0/run/Modify"] * 2
    assert [each.keeps > 0 for each in chain] == [False, False, True, True]
    # The time of answers before the first of them is no pause of theirs.
    assert [each.pause_s for each in chain] == [0.0, 3.0, 3.0, 3.0]


def test_hints_go_to_who_is_called_next_or_to_all_who_ever_were(tmp_path: Path) -> None:
    runs = {
        "a": ["Review", "Modify", "Review", "Modify", "Review", "Review", "Manual"],
        "b": ["Modify", "Test"],
    }
    write(
        tmp_path / "chatdev_logs/calls.jsonl.gz",
        [
            call(run, at, 10 * at, 10 * at + 4, phase, 200)
            for run, phases in runs.items()
            for at, phase in enumerate(phases)
        ],
    )
    shape = Shape(pace=2.0, answer_scale=1)
    (known,) = logged(tmp_path, 1, 7, 7, shape)
    assert [[edge.session for edge in each.edges] for each in known] == [
        *([f"0/a/{phase}"] for phase in runs["a"][1:]), [],
    ]  # fmt: skip
    (graph,) = logged(tmp_path, 1, 7, 7, shape, all_edges=True)
    # The other run has gone on to tests; an agent that works needs no hint for itself.
    review = (Edge("0/a/Modify", 2.0), Edge("0/a/Manual", 2.0))
    modify = (Edge("0/a/Review", 2.0), Edge("0/a/Test", 2.0))
    assert [each.edges for each in graph] == [review, modify, review, modify, review, review, ()]
    assert [each.after for each in graph] == [(), (0,), (1,), (2,), (3,), (4,), (5,)]
    assert [(each.session, each.new) for each in graph] == [(each.session, each.new) for each in known]


def test_a_lead_calls_all_readers_at_once_and_reads_all_of_them(tmp_path: Path) -> None:
    lengths = {LEAD_BEGINS: 300, LEAD: 400, **{phase: 100 + at for at, phase in enumerate(READERS)}}
    write(
        tmp_path / "chatdev_logs/calls.jsonl.gz",
        [
            {**call("run", at, 10 * at, 10 * at + 8, phase, prompt), "completion_tokens": 40 + at}
            for at, (phase, prompt) in enumerate(lengths.items())
        ],
    )
    shape = Shape(pace=2.0, answer_scale=2, most_past=700)
    runs = fan_out(tmp_path, 2, 2, 7, shape)
    assert runs == fan_out(tmp_path, 2, 2, 7, shape)
    assert not {each.session for each in runs[0]} & {each.session for each in runs[1]}
    run = runs[0]
    round_ = ["0/lead", *(f"0/{phase}" for phase in READERS)]
    assert [each.session for each in run] == [*round_, *round_, "0/lead"]
    assert [each.after for each in run] == [(), (0,), (0,), (0,), (1, 2, 3), (4,), (4,), (4,), (5, 6, 7)]
    everybody = tuple(Edge(session, 2.0) for session in round_[1:])
    assert [each.edges for each in run] == [everybody, *[(Edge("0/lead", 2.0),)] * 3] * 2 + [()]
    # First prompts have logged lengths; later ones have the answers, in full, or the least number of tokens.
    assert [(each.keeps, len(each.new)) for each in run[:4]] == [(0, 300), (0, 100), (0, 101), (0, 102)]
    answers = 42 + 43 + 44
    assert (run[4].keeps, len(run[4].new)) == (300 + 40 // 2, answers)
    assert (run[5].keeps, len(run[5].new)) == (100 + 42 // 2, NEW_TOKENS)
    # Of a prompt that would be too long, the end of the past is left out.
    assert (run[8].keeps, len(run[8].new)) == (320 + answers + 41 // 2, answers)
    (short,) = fan_out(tmp_path, 1, 2, 7, Shape(most_past=400))
    assert [each.keeps + len(each.new) for each in short if each.session == "0/lead"] == [300, 400, 400]
