"""Predictions beside recorded times: cells, statistics, and a recording whose times are known."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lib.common import Report
from benchmarks.predictions import __main__ as command
from benchmarks.predictions.cells import ORDER, POLICIES, SETUPS, Cell, Folder, Ran, cells
from benchmarks.predictions.figures import Errors, Times, components, inside, order, verdict
from benchmarks.predictions.load import arriving, user, users_for
from benchmarks.predictions.predict import Replayed, of_links, of_memory, pace, slower
from benchmarks.predictions.report import AIMS, Tables, by_turn
from sglang_ext.cost_model import CostModel, Profile, save
from sglang_ext.cost_model.estimated import estimated
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.recording import Choice, Fill, Head, Member, Namer, Request, Writer
from sglang_ext.simulator.outcome import STAGES
from sglang_ext.simulator.run import simulate, url
from sglang_ext.simulator.settings import Settings
from sglang_ext.simulator.trace import Trace, TracedSession
from sglang_ext.simulator.workload import Turn

REFERENCES, WARM, COUNT = 2, 4, 40
SETTINGS = Settings(instances=2, requests=REFERENCES + WARM + COUNT, policy="cost", hbm=1024, dram=1024)


def profile() -> Profile:
    """Of a small model on one core."""
    config = {
        "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 3584, "vocab_size": 4096, "dtype": "float32",
    }  # fmt: skip
    return estimated(config, "cpu, 1 cores", model="small")


def recorded(cell: Cell, made: Profile, rate: float = 4.0) -> Ran:
    """A cell as a fleet with exactly these costs would have recorded it."""
    trace = Trace(instances=[url(number) for number in range(2)])
    at = 0.0
    for number, asked in enumerate(arriving(cell.seed, REFERENCES + WARM + COUNT)):
        at += asked.gap / rate
        answer = encode_tokens([number] * asked.answer)
        turn = Turn(encode_tokens(asked.prompt), answer, id=str(number))
        trace.sessions.append(TracedSession(asked.session, 0, at, turn))
    outcome = simulate(replace(SETTINGS, policy=cell.policy), CostModel(made), trace)
    namer, writer = Namer(b"k" * 16, 16), Writer()
    tiers = {"hbm": Fill(0, SETTINGS.hbm), "dram": Fill(0, SETTINGS.dram)}
    lines = [writer.line(Head(0.0, 1, "r", namer.key_id, 16, cell.policy))]
    lines += [writer.line(Member(0.0, name, "colocated", tiers, "kv", 2048)) for name in trace.instances]
    for each in trace.sessions:
        turn, found = each.turn, outcome.decided[each.turn.id]
        names = namer.names("space", turn.key + turn.answer)
        blocks = writer.blocks("space", len(turn.key) // 4, names, len(names) - len(turn.key) // 64)
        queue, prefill = found.stages["queue"], found.stages["prefill"]
        first = found.stages["way"] + queue + prefill
        line = Request(
            1000.0 + each.start_s, id=turn.id, path="/generate", status=200, prompts=(blocks,),
            session=each.name, stream=True, completion_tokens=len(turn.answer) // 4,
            choices=(Choice(found.instance, "cost"),), tiers=dict(found.hits), first_byte_s=first,
            ended_s=first + found.stages["decode"], stages={"prefill_queue": queue, "prefill": prefill},
        )  # fmt: skip
        lines.append(writer.line(line))
    facts = {
        "warm": WARM, "reference_places": list(range(REFERENCES)), "rate": rate, "users": 0, "load_1m": 0.0,
        "reference_s": [[(0.1, 0.2)] * 2, [(0.11, 0.2)] * 2],
    }  # fmt: skip
    return Ran(cell, facts, lines)


def test_cells_are_whole_tables_seed_by_seed() -> None:
    found = list(cells(SETUPS, (1, 2)))
    assert len(found) == len(set(found)) == 2 * (3 * 4 + len(POLICIES))
    assert {cell.seed for cell in found[: len(found) // 2]} == {1}
    assert {cell.load for cell in found if cell.setup == ORDER} == {"0.6"}


def test_a_cell_is_kept_with_its_recording_and_half_a_cell_is_none(tmp_path: Path) -> None:
    folder, cell = Folder(tmp_path / "cells"), Cell("1P1D", "0.6", 3)
    assert folder.ran(cell) is None
    folder.recording(cell).write_bytes(b"one\ntwo\n")
    assert folder.ran(cell) is None
    folder.add(cell, {"rate": 2.0})
    found = folder.ran(cell)
    assert found is not None
    assert (found.facts["rate"], found.lines) == (2.0, [b"one\n", b"two\n"])
    assert folder.ran(replace(cell, seed=1)) is None


def test_requests_are_the_same_for_a_seed_and_grow_in_their_sessions() -> None:
    found = arriving(5, 120)
    assert found == arriving(5, 120)
    assert found != arriving(6, 120)
    last: dict[str, list[int]] = {}
    for asked in found:
        before = last.get(asked.session, [])
        assert asked.prompt[: len(before)] == before
        last[asked.session] = asked.prompt
    assert sum(asked.gap for asked in found) / 120 == pytest.approx(1.0, rel=0.3)
    assert max(len(asked.prompt) for asked in found) < 2400
    asks = user(1, 2)
    assert len({next(asks).session for _ in range(20)}) == 1
    assert users_for(3.0, 1.0) == 9


def times(session: str, ttft: float) -> Times:
    return Times(session, dict(zip(STAGES, (0.0, 0.0, ttft, 0.0, 1.0), strict=True)))


def test_errors_have_signs_and_components_add_up() -> None:
    found = Errors.of([2.0, 4.0], [1.0, 3.0])
    assert (found.mean, found.p90, found.each) == (0.5, pytest.approx(1 / 3), 0.5)
    real = [times("a", 1.0), replace(times("b", 2.0), below=16)]
    ours = [times("a", 1.5), times("b", 4.0)]
    parts = components(ours, real)
    assert parts["prefill"] == 1.25
    assert parts["load"] == 1.0
    assert parts["queue"] == parts["decode"] == 0.0
    assert inside(2.0, [1.0, 3.0])
    assert not inside(3.5, [1.0, 3.0])


def test_a_policy_is_faster_only_where_its_sessions_are() -> None:
    rng = random.Random(1)
    one = {str(n): times(str(n % 40), 1.0 + rng.random()) for n in range(200)}
    slower_by = {id: times(each.session, each.ttft + 0.05) for id, each in one.items()}
    noise = {id: times(each.session, each.ttft + rng.gauss(0, 0.2)) for id, each in one.items()}
    assert verdict(one, slower_by) == -1
    assert verdict(slower_by, one) == 1
    assert verdict(one, noise) == 0
    assert verdict(one, one) == 0
    # All of the difference is in one session: it may be chance.
    late = {id: times(e.session, e.ttft + (2.0 if e.session == "7" else 0.0)) for id, e in one.items()}
    assert verdict(one, late) == 0
    assert order({"a": one, "b": slower_by, "c": one}) == {("a", "b"): -1, ("a", "c"): 0, ("b", "c"): 1}


def test_a_fleet_with_the_profile_s_costs_is_predicted_exactly() -> None:
    made = profile()
    replayed = Replayed.of(recorded(Cell("2-colocated", "0.6", 1), made))
    assert len(replayed.counted) == len(replayed.truth) == COUNT
    predicted = replayed.predicted(CostModel(made))
    for id, real in replayed.truth.items():
        assert predicted[id].ttft == pytest.approx(real.ttft, abs=1e-4)
        assert predicted[id].jct == pytest.approx(real.jct, abs=1e-4)
        assert predicted[id].below == real.below


def test_changed_costs_show(tmp_path: Path) -> None:
    """The twin: other constants give other times."""
    made = profile()
    replayed = Replayed.of(recorded(Cell("2-colocated", "0.6", 1), made))
    real = [each.jct for each in replayed.truth.values()]

    def error(model: CostModel, **changes: float) -> float:
        found = replayed.predicted(model, **changes)
        return Errors.of([found[id].jct for id in replayed.truth], real).mean

    assert error(slower(made, 2.0, 2.0)) > 0.9
    # Of requests that come one at a time; else a step waits for prompts, too.
    alone = Replayed.of(recorded(Cell("2-colocated", "0.3", 1), made, rate=0.02))
    late = alone.predicted(slower(made, 1.0, 2.0))
    assert pace(alone.truth, late) == pytest.approx((1.0, 2.0), rel=0.05)
    assert error(of_links(made), network=2.0) <= 1e-9
    assert of_memory(made) is None, "an estimate has no operators"
    links = of_links(made)
    assert links.transfer_s(1000) < CostModel(made).transfer_s(1000)


def test_the_report_has_all_figures_and_their_aims() -> None:
    made = profile()
    found = [recorded(Cell("2-colocated", load, 1), made) for load in ("0.3", "0.85")]
    found += [recorded(Cell(ORDER, "0.6", 1, policy), made) for policy in ("cost", "round-robin")]
    report = Report("predictions", AIMS)
    Tables(report, made).add(found)
    assert set(AIMS) <= set(report.summary)
    assert all(verdict["met"] for verdict in report.verdicts().values())
    assert report.summary["pairs_compared"] == 1
    by = Counter(row.get("by") for row in report.rows)
    assert by["simulator"] == 4
    assert by["null: the mean of the set-up's other cells"] == 2


def test_requests_of_policies_are_paired_by_session_and_turn() -> None:
    one = {"7": times("a", 1.0), "3": times("b", 2.0), "9": times("a", 3.0)}
    assert {name: each.ttft for name, each in by_turn(one).items()} == {"a 1": 1.0, "b 1": 2.0, "a 2": 3.0}


def test_the_command_reports_what_is_there_and_names_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, folder = profile(), Folder(tmp_path)
    save(made, folder.profile)
    cell = Cell("2-colocated", "0.3", 1)
    ran = recorded(cell, made)
    folder.recording(cell).write_bytes(b"".join(ran.lines))
    folder.add(cell, ran.facts)
    arguments = ["--folder", str(tmp_path), "--minutes", "0", "--setups", "2-colocated", "--seeds", "1"]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "3 cells were not run: 2-colocated_0.6_cost_1" in out
    assert "ttft_mean_error" in out
