"""Agents in a closed loop: beyond memory, goodput falls off a cliff, and does not with admission."""

from __future__ import annotations

import json

import pytest

from sglang_ext.simulator import command
from sglang_ext.simulator.crowd import agents_of, alone, goodput, median_s
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import simulate
from sglang_ext.simulator.settings import Settings, changed

LOAD = "instances=1,requests=100000,hbm=1200,dram=2400,seconds=150"


def played(crowd: float, more: str = "") -> tuple[Settings, Outcome]:
    settings = changed(Settings(), f"{LOAD},crowd={crowd},{more}")
    return settings, simulate(settings)


@pytest.fixture(scope="module")
def unloaded_s() -> float:
    return median_s(simulate(alone(changed(Settings(), LOAD))).served)


def test_agents_go_from_turn_to_turn_and_from_session_to_session() -> None:
    settings, found = played(1.0)
    assert agents_of(settings) == 4
    names = {each.session for each in found.served}
    assert {name.partition("/")[0] for name in names} == set("0123")
    assert "0/1" in names, "the second session of the first agent"
    by_session: dict[str, list[int]] = {}
    for each in found.served:
        by_session.setdefault(each.session, []).append(each.prompt)
        assert each.begins is (each.known == 0)
        assert each.known <= each.prompt
    assert all(sorted(prompts) == prompts for prompts in by_session.values())
    assert max(each.sent_s for each in found.served) < settings.seconds


def test_beyond_memory_there_is_a_cliff_and_admission_takes_it_away(unloaded_s: float) -> None:
    def figures(crowd: float, more: str) -> dict[str, float]:
        settings, found = played(crowd, more)
        return goodput(found.served, unloaded_s, settings.seconds)

    few, without, admitted = figures(2, ""), figures(12, ""), figures(12, "program_share=2")
    assert few["in_time"] > 0.8
    assert without["goodput"] < 0.2 * few["goodput"]
    assert admitted["goodput"] > 0.5 * few["goodput"], "in a run as short as this"
    assert admitted["longest_wait_vs_mean"] < 2.0


def test_the_command_prints_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--settings", f"{LOAD},crowd=1,seconds=60", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["outcomes"]["as given"]["agents"]
    assert told["goodput"] > 0
    assert told["in_time"] > 0.8
