"""Whole simulations: the books of all parts agree at the end, and known results come out."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_ext.cost_model import ArchLevel, CostModel, Decode, Identity, Profile, Quality
from sglang_ext.cost_model.batch import Batching
from sglang_ext.cost_model.profile import SCHEMA
from sglang_ext.errors import ConfigError
from sglang_ext.simulator import command
from sglang_ext.simulator.command import REPORT_S, Reports
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.run import Simulation
from sglang_ext.simulator.settings import Settings, changed
from sglang_ext.simulator.virtual_time import VirtualLoop
from sglang_ext.simulator.workload import Session, Turn, mixed
from sglang_ext.tiers import Tier
from tests.simulator.small_fleet import AS_RECORDED, PAIRS, check_parts, write_recording

SMALL = "hbm=700,dram=1500,requests=150"


def simulated(text: str, sessions: Iterator[Session] | None = None, decode: Decode | None = None) -> Outcome:
    """The outcome, after all invariants were verified."""
    settings = changed(Settings(), text)
    model = CostModel()
    if decode is not None:
        model = CostModel(msgspec.structs.replace(PROFILE, decode=decode))
    loop = VirtualLoop()
    try:
        run = Simulation(settings, model, loop, sessions or mixed(settings))
        loop.run_until_complete(run.run())
        run.check()
        return run.outcome
    finally:
        loop.close()


PROFILE = Profile(
    schema=SCHEMA,
    identity=Identity("a/model", "a device", "bfloat16"),
    arch=ArchLevel((0.02, 0.0, 1e-4, 0.0, 0.0, 0.0)),
    quality=Quality(1, 0.0),
    longest_prompt=4096,
    kv_bytes_per_token=4096,
)


@dataclass(frozen=True)
class Fixed:
    """A session with known requests."""

    requests: tuple[Turn, ...]
    start_s: float = 0.0
    name: str = "fixed"
    tenant: int = 0

    def turns(self) -> Iterator[Turn]:
        return iter(self.requests)


def text(tokens: int, mark: int = 0) -> bytes:
    return b"".join((mark * 1_000_003 + at).to_bytes(4, "little") for at in range(tokens))


@pytest.mark.parametrize(
    "what",
    [
        "instances=1,policy=round-robin,fetch=off",
        "instances=3,policy=prompt-tree",
        "instances=3,policy=cost,hints=0.5,tenants=2,most_running=4",
        "instances=4,policy=cost,failures=200,restart_s=5",
        "instances=4,policy=session,dram=900,for_others=500,spill_above=0.7,failures=100,restart_s=5",
    ],
)
def test_every_request_is_answered_and_all_books_agree(what: str) -> None:
    found = simulated(f"{SMALL},{what}")
    assert found.requests + sum(found.failed.values()) == 150
    assert found.requests >= (130 if "failures" in what else 148)
    figures = found.as_json()
    assert 0 < figures["reused"] <= figures["regret"]["infinite_reused"] + 0.01
    assert figures["counts"]["choose"] >= 150
    assert figures["counts"]["events applied"] > 0
    assert figures["counts"]["evicted blocks of HBM"] > 0
    if "hints" in what:
        assert figures["counts"]["hints accepted"] > 0
        assert found.reasons["advised"] > 0


def test_requests_of_a_dead_instance_are_retried_before_their_first_token_only() -> None:
    found = simulated(f"{SMALL},instances=4,policy=cost,failures=400,restart_s=2,rate=8")
    assert found.counts["deaths"] > 2
    assert found.retried > 0
    assert found.failed["broken_off"] > 0
    assert found.requests + sum(found.failed.values()) == 150
    assert found.counts["choose"] == 150 + found.retried


def test_one_request_takes_the_time_that_the_cost_model_gives_it() -> None:
    turn = Turn(text(1000), text(11, 1))
    found = simulated("instances=1,requests=1,lag_ms=0", iter([Fixed((turn,))]))
    model, settings = CostModel(), Settings()
    assert found.ttft[0] == pytest.approx(model.exec_s(1000, 0, Batching(chunk=settings.chunk)))
    assert found.jct[0] - found.ttft[0] == pytest.approx(10 * model.decode_s(1))


def test_a_step_takes_longer_behind_a_long_prompt() -> None:
    decode = Decode.linear(0.01, 0.001, per_token_s=1e-6)
    for tokens in (1000, 3000):
        turn = Turn(text(tokens), text(41, 1))
        found = simulated("instances=1,requests=1", iter([Fixed((turn,))]), decode=decode)
        # 40 steps, by their mean context.
        step_s = 0.011 + (tokens + 1 + 19.5) * 1e-6
        assert found.jct[0] - found.ttft[0] == pytest.approx(40 * step_s, rel=1e-4)


def test_late_results_wait_for_the_next_step_or_pass() -> None:
    """Where a server hands a token out when the next pass or step has run (`Decode.late`)."""
    linear = Decode.linear(0.01, 0.001)
    late = msgspec.structs.replace(linear, late=True)

    def times(answers: tuple[int, ...], decode: Decode) -> list[tuple[float, float]]:
        """TTFT and JCT; each request but the first comes while the pass of the one before runs."""
        sessions = (
            Fixed((Turn(text(1000, number), text(answer, 100 + number)),), 0.01 * number, f"s{number}")
            for number, answer in enumerate(answers)
        )
        found = simulated(f"instances=1,requests={len(answers)},hints=0", sessions, decode=decode)
        return list(zip(found.ttft, found.jct, strict=True))

    ((ttft, jct),) = times((11,), linear)
    # A step later; the last step's result leaves at once, because no other follows it.
    assert times((11,), late) == [pytest.approx((ttft + 0.011, jct))]
    # The only token of an answer comes with its pass.
    assert times((1,), late) == times((1,), linear)
    # The pass of a second request holds the first one's token back, and both end no later.
    early, held = sorted(times((11, 11), linear)), sorted(times((11, 11), late))
    assert held[0][0] - early[0][0] == pytest.approx(early[1][0] - early[0][0] + 0.01, abs=1e-3)
    assert max(jct for _, jct in held) == pytest.approx(max(jct for _, jct in early))


@pytest.mark.parametrize(
    "more",
    [
        "instances=3,policy=cost,hints=0.5,tenants=2,most_running=4,disk=4000",
        "instances=4,policy=cost,failures=200,restart_s=5",
        "instances=4,prefill=2,decode=2,pd_caching=3",
    ],
)
def test_no_late_result_is_lost(more: str) -> None:
    decode = Decode.linear(0.01, 0.001, per_token_s=1e-6, late=True)
    found = simulated(f"{SMALL},{more}", decode=decode)
    assert found.requests + sum(found.failed.values()) == 150


def test_a_prompt_that_hbm_can_never_hold_is_refused_and_an_answer_ends_where_hbm_does() -> None:
    """By SGLang's limits: either would wait for ever."""
    long = [Fixed((Turn(text(tokens), text(100, 1)),)) for tokens in (640, 634, 633, 600)]
    found = simulated("instances=1,requests=4,hbm=40", iter(long))
    assert found.failed == {"prompt_too_long": 2}
    assert (found.requests, found.output_tokens) == (2, 5 + 38)


def test_a_second_turn_finds_the_first_in_hbm_or_pays_for_loading_it() -> None:
    first, second = (
        Turn(text(1000), text(21, 1)),
        Turn(text(1000) + text(21, 1) + text(40, 2), text(2, 3), 1.0),
    )
    found = simulated("instances=1,requests=2", iter([Fixed((first, second))]))
    # Of 1,021 tokens, the last has no KV: 1,020 are 63 whole blocks.
    assert found.hits == {Tier.HBM: 63 * 16}
    other = Fixed((Turn(text(11_000, 7), text(2, 8)),), start_s=3.0, name="other")
    late = Turn(second.key, second.answer, 10.0)
    found = simulated("instances=1,requests=3,hbm=720", iter([Fixed((first, late)), other]))
    assert found.hits[Tier.DRAM] > 400
    assert found.link_bytes["DRAM to HBM"] > 0


def test_a_prompt_that_another_instance_has_is_fetched_and_not_without_fetching() -> None:
    prompt = text(6000)
    sessions = [
        Fixed(
            (Turn(prompt + text(32, 10 + number), text(400, number)),),
            0.0 if not number else 3.0,
            f"s{number}",
        )
        for number in range(4)
    ]
    found = simulated("instances=2,requests=4,policy=round-robin,hbm=2000", iter(sessions))
    assert found.counts["fetched blocks"] == 6000 // 16
    assert found.link_bytes["between instances"] == pytest.approx(375 * 16 * CostModel().kv_bytes_per_token)
    alone = simulated("instances=2,requests=4,policy=round-robin,hbm=2000,fetch=off", iter(sessions))
    assert alone.counts["fetched blocks"] == 0
    assert sum(alone.hits.values()) < sum(found.hits.values())


def test_an_idle_instance_keeps_what_a_full_one_would_lose() -> None:
    """By-session routing has all sessions at one of two instances, whose memory is too small for them."""

    def at_first(name: str) -> bool:
        found = simulated(
            "instances=2,policy=session,requests=1", iter([Fixed((Turn(text(40), text(2)),), name=name)])
        )
        return next(iter(found.by_instance)).endswith("0.0:30000")

    sessions = []
    for number, name in enumerate([each for each in map(str, range(24)) if at_first(each)][:8]):
        first, answer = text(1600, number), text(16, 100 + number)
        again = first + answer + text(16, 200 + number)
        turns = Turn(first, answer), Turn(again, text(4, 300 + number), 40.0)
        sessions.append(Fixed(turns, 2.0 * number, name))
    fleet = "instances=2,policy=session,hbm=300,dram=500,requests=16"
    kept = simulated(f"{fleet},for_others=450", iter(sessions))
    assert kept.counts["blocks kept for others"] > 500
    assert kept.counts["fetched blocks"] > kept.counts["blocks kept for others"] + 300, "and given back"
    assert kept.as_json()["reused"] > 0.25
    for without in ("for_others=0", "for_others=450,spill_blocks=0"):
        found = simulated(f"{fleet},{without}", iter(sessions))
        assert found.counts["blocks kept for others"] == sum(found.hits.values()) == 0


def test_a_policy_that_follows_prefixes_reuses_more_than_turns() -> None:
    by_turns = simulated(f"{SMALL},instances=4,policy=round-robin,fetch=off")
    by_prefix = simulated(f"{SMALL},instances=4,policy=prompt-tree,fetch=off")
    assert by_prefix.as_json()["reused"] > by_turns.as_json()["reused"] + 0.05


def written_twice(*arguments: str) -> Any:
    """The JSON of the command, which two runs write alike under other hashes of strings: those decide the
    order of sets."""
    words = [sys.executable, "-m", "sglang_ext.cli", "simulate", "--json", "--seed", "3", *arguments]
    written = [
        subprocess.run(
            words, capture_output=True, check=True, cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed, "SGLANG_EXT_NATIVE": "0"},
        ).stdout
        for seed in ("1", "4711")
    ]  # fmt: skip
    assert written[0] == written[1]
    return json.loads(written[0])["outcomes"]


def test_two_runs_of_one_seed_write_the_same_bytes() -> None:
    limits = "requests_per_second=0.5/0,concurrent=3/0,tokens_per_minute=50000/0,queue_size=4,most_running=3"
    found = written_twice(
        "--requests", "80", "--instances", "3", "--policy", "cost",
        "--settings", "hbm=500,dram=900,hints=0.4,failures=150,tenants=3",
        "--what-if", f"greedy=3,rate=5,{limits}",
    )  # fmt: skip
    assert found["as given"]["requests"] > 70
    tenants = found[f"greedy=3,rate=5,{limits}"]["tenants"]
    assert tenants["tenant-0"]["refused"] > 5
    assert tenants["tenant-1"]["requests"] > 5


def test_two_runs_with_changes_of_roles_write_the_same_bytes() -> None:
    roles = "role_controller=on,role_dwell_secs=3"
    found = written_twice(
        "--requests", "120", "--what-if", roles,
        "--settings", "prefill=2,decode=2,pd_caching=3,rate=4,hbm=700,tenants=2,concurrent=40",
    )  # fmt: skip
    assert found[roles]["role_changes"]
    assert not found["as given"]["role_changes"]


def test_two_runs_of_a_recording_write_the_same_bytes(tmp_path: Path) -> None:
    """With disks; and with pairs and returns beside it."""
    path = tmp_path / "day.jsonl"
    write_recording(path)
    found = written_twice("--trace", str(path), "--settings", AS_RECORDED, "--what-if", PAIRS)
    check_parts(found["as given"], found[PAIRS])


def test_the_command_compares_fleets_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    page = tmp_path / "page.html"
    assert (
        command.main(
            ["--requests", "150", "--instances", "2", "--settings", "hbm=500,rate=30", "--what-if",
             "instances=3, dram=2x, policy=cost", "--report", str(page)]
        )
        == 0
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "an infinite cache" in out
    assert "of the capacity is used" in out, "the load is above what two instances can serve"
    written = page.read_text()
    assert written.count("<svg") == 4
    (warning,) = [line for line in out.splitlines() if line.startswith("as given: ")]
    assert f"<p class='warning'>{warning}</p>" in written
    for row in ("times of requests", "mean TTFT at 10 % less and more load", "DRAM to HBM", "tree inserts"):
        (line,) = [line for line in out.splitlines() if line.startswith(row + " ")]
        cells = " ".join(line.removeprefix(row).split())
        (shown,) = re.findall(f"<td>{re.escape(row)}</td>(.*?)</tr>", written)
        assert " ".join(re.findall("<td>(.*?)</td>", shown)) == cells, row


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("instances", "NAME=VALUE"),
        ("size=3", "NAME=VALUE"),
        ("hbm=many", "hbm cannot be"),
        ("rate=0", "rate"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_name(what: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        changed(Settings(), what)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--settings", "pause_s=3"], "--settings: pause_s is of a crowd"),
        (["--what-if", "hbm=2x,learnt_hints=0.5"], "--what-if: learnt_hints is of a crowd"),
        (["--settings", "crowd=0.1", "--what-if", "crowd=0,seconds=30"], "--what-if: seconds is of a crowd"),
        (["--settings", "crowd=0.1,rate=3"], "--settings: rate would change nothing for a crowd"),
        (["--what-if", "crowd=0.1,queue_size=3"], "--what-if: queue_size would change nothing"),
    ],
)
def test_settings_without_a_crowd_or_of_other_loads_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_settings_of_a_crowd_are_taken_where_one_of_the_fleets_has_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--requests", "10", "--settings", "pause_s=3,rate=1", "--what-if", "crowd=0.02,seconds=20"]
    assert command.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"]["crowd=0.02,seconds=20"]["agents"]["turns"] > 0


def test_a_change_multiplies_or_replaces() -> None:
    found = changed(Settings(), "instances=12, dram=2x, policy=cost, fetch=off")
    assert (found.instances, found.dram, found.policy, found.fetch) == (
        12,
        2 * Settings().dram,
        "cost",
        False,
    )


def test_the_help_names_all_settings() -> None:
    (shown,) = [each for each in dataclasses.fields(command.Arguments) if each.name == "settings"]
    flags = {"instances", "requests", "policy", "seed"}
    words = set(re.findall(r"[a-z_]+", str(shown.metadata)))
    assert {each.name for each in dataclasses.fields(Settings)} - flags <= words


def test_the_mix_has_long_prompts() -> None:
    settings = Settings()
    sessions = mixed(settings)
    turns = [turn for _ in range(300) for turn in next(sessions).turns()]
    assert sum(len(turn.key) // 4 for turn in turns) / len(turns) > 2000


def test_a_long_simulation_says_how_far_it_is() -> None:
    lines: list[str] = []
    now = [100.0]
    reports = Reports("as given", 1000, lines.append, lambda: now[0])
    reports(10, 1.0)
    now[0] += 2 * REPORT_S
    reports(100, 12.5)
    reports(101, 12.6)
    assert lines == [
        "as given: 100 of 1,000 requests, 12 s of virtual time in 20 s, about 180 s left\n",
    ]


def test_a_simulation_ends_with_its_last_answer() -> None:
    """And not when the last user has thought about a further request."""
    found = simulated(f"{SMALL},instances=2")
    assert found.seconds == pytest.approx(
        max(a + t for a, t in zip(found.arrivals, found.jct, strict=True)), abs=0.05
    )


def test_an_error_of_a_session_ends_the_simulation() -> None:
    @dataclass(frozen=True)
    class Broken(Fixed):
        def turns(self) -> Iterator[Turn]:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        simulated("instances=1,requests=5", iter((Broken(()),)))


def test_the_index_does_not_keep_expired_guesses() -> None:
    """A router removes them at once. A simulation that does not gets slower with every request."""
    loop = VirtualLoop()
    try:
        settings = changed(Settings(), "instances=8,requests=150,rate=3")
        run = Simulation(settings, CostModel(), loop, mixed(settings))
        loop.run_until_complete(run.run())
        assert run.outcome.requests == 150
        assert len(run.router.index._dead) <= 4 * 8, "guesses of one round of a second"
    finally:
        loop.close()
