"""Replays of recordings: of a simulated router's, of which all is known."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_ext.cost_model import ArchLevel, Batch, CostModel, Identity, Profile, Quality
from sglang_ext.cost_model.model import DefaultExecution
from sglang_ext.cost_model.profile import SCHEMA
from sglang_ext.errors import ConfigError
from sglang_ext.protocol.recording import Applied, Choice, Fill, Head, Loaded, Member, Namer, Request, Writer
from sglang_ext.simulator import command
from sglang_ext.simulator.command import Arguments, settings_of
from sglang_ext.simulator.outcome import STAGES
from sglang_ext.simulator.run import simulate, url
from sglang_ext.simulator.settings import Settings, changed
from sglang_ext.simulator.trace import Trace, TracedSession, read_trace
from sglang_ext.simulator.workload import Announcement, Observed, Turn, mixed
from tests.simulator.small_fleet import write_recording

FLEET = changed(Settings(), "instances=3,requests=250,policy=prompt-tree,hbm=700,dram=2000,rate=3,fetch=off")
ARRIVALS_S = 0.3


class Around:
    """The defaults, with half a second around each pass: an `Execution`."""

    around_s = 0.5

    def __init__(self) -> None:
        self._plain = DefaultExecution()

    def batch_s(self, batch: Batch) -> float:
        return self._plain.batch_s(batch) + self.around_s

    def adding_s(self, batch: Batch) -> float:
        return self._plain.adding_s(batch)


def load() -> Trace:
    """Requests of the mix, each at a fixed time."""
    trace = Trace(instances=[url(number) for number in range(3)])
    sessions = mixed(FLEET)
    for session in sessions:
        for turn in session.turns():
            number = len(trace.sessions)
            if number == FLEET.requests:
                return trace
            named = replace(turn, id=str(number), think_s=0.0)
            trace.sessions.append(TracedSession(session.name, 0, number * ARRIVALS_S, named))
    raise AssertionError("the mix has no end")


PROFILE = Profile(
    schema=SCHEMA,
    identity=Identity("a/model", "a device", "bfloat16"),
    arch=ArchLevel((0.1, 0.0, 2e-5, 0.0, 0.0, 0.0)),
    quality=Quality(1, 0.0),
    longest_prompt=4096,
    kv_bytes_per_token=1 << 20,
)


def recorded(*, blank: bool = False, policy: str = FLEET.policy, costs: Profile | None = None) -> bytes:
    """The recording that a router of that fleet would have written.

    Args:
        blank: without choices and hits.
        costs: that it expects; the defaults without.
    """
    trace = load()
    outcome = simulate(replace(FLEET, policy=policy), CostModel(costs), trace)
    namer, writer = Namer(b"k" * 16, 16), Writer()
    tiers = {"hbm": Fill(0, FLEET.hbm), "dram": Fill(0, FLEET.dram)}
    head = Head(0.0, 1, "r", namer.key_id, 16, policy, {}, msgspec.to_builtins(costs) if costs else {})
    lines: list[bytes] = [writer.line(head)]
    lines += [writer.line(Member(0.0, name, "colocated", tiers)) for name in trace.instances]
    for session in trace.sessions:
        turn, decided = session.turn, outcome.decided[session.turn.id]
        # The order of answers differs from that of arrivals; times of each are looked up by its arrival.
        at = min(
            range(len(outcome.arrivals)), key=lambda n: abs(outcome.arrivals[n] - 0.008 - session.start_s)
        )
        names = namer.names("space", turn.key + turn.answer)
        blocks = writer.blocks("space", len(turn.key) // 4, names, len(names) - len(turn.key) // 64)
        hits = {} if blank else dict(decided.hits)
        choices = () if blank else (Choice(decided.instance, "prefix"),)
        line = Request(
            1000.0 + session.start_s, id=turn.id, path="/generate", status=200, prompts=(blocks,),
            session=session.name, stream=True, completion_tokens=len(turn.answer) // 4, choices=choices,
            tiers=hits, first_byte_s=outcome.ttft[at], ended_s=outcome.jct[at],
        )  # fmt: skip
        lines.append(writer.line(line))
    return b"".join(lines)


@pytest.fixture(scope="module")
def recording() -> bytes:
    return recorded()


def test_a_replay_decides_as_was_recorded(recording: bytes) -> None:
    trace = read_trace(recording.splitlines(keepends=True))
    assert (trace.policy, len(trace.instances), trace.tiers) == ("prompt-tree", 3, {"hbm": 700, "dram": 2000})
    found = simulate(FLEET, trace=trace).agreement
    assert found["requests"] == FLEET.requests
    assert found["instance"] >= 0.95
    assert found["exact_hits"] >= 0.8
    assert abs(found["hbm_points"]) < 3
    assert abs(found["dram_points"]) < 3


def test_another_policy_does_not_agree(recording: bytes) -> None:
    """The twin: agreement is not of itself."""
    trace = read_trace(recording.splitlines(keepends=True))
    other = simulate(replace(FLEET, policy="round-robin"), trace=trace).agreement
    assert other["instance"] < 0.6


def test_what_was_chosen_and_found_is_not_read(recording: bytes) -> None:
    whole = read_trace(recording.splitlines(keepends=True))
    rows = [json.loads(line) for line in recording.splitlines()]
    for row in rows:
        for column in ("choices", "tiers", "instance"):
            if row["type"] == "request":
                row.pop(column, None)
    blank = read_trace([json.dumps(row).encode() + b"\n" for row in rows])
    assert blank.sessions == whole.sessions
    assert not blank.decided
    assert simulate(FLEET, trace=blank).decided == simulate(FLEET, trace=whole).decided


def test_prompts_share_in_a_replay_what_they_shared(recording: bytes) -> None:
    before, after = load().sessions, read_trace(recording.splitlines(keepends=True)).sessions

    def shared(one: bytes, other: bytes) -> int:
        """Whole blocks with which both begin."""
        blocks = min(len(one), len(other)) // 64
        return next(
            (n for n in range(blocks) if one[64 * n : 64 * n + 64] != other[64 * n : 64 * n + 64]), blocks
        )

    for number in range(1, 60):
        one = (before[number].turn.key, before[number - 1].turn.key + before[number - 1].turn.answer)
        other = (after[number].turn.key, after[number - 1].turn.key + after[number - 1].turn.answer)
        assert shared(*one) == shared(*other)
        assert len(one[0]) == len(other[0])


def test_the_command_takes_the_fleet_of_a_recording(
    recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "day.jsonl"
    path.write_bytes(recording)
    found = printed(capsys, "--trace", str(path), "--settings", "fetch=off", "--what-if", "dram=2x")
    assert found["settings"]["as given"]["instances"] == 3
    assert found["settings"]["dram=2x"]["dram"] == 4000
    found = printed(capsys, "--trace", str(path), "--settings", "fetch=off")
    assert found["outcomes"]["as given"]["agreement"]["instance"] >= 0.95


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of the command."""
    assert command.main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_changed_fleet_does_not_take_the_recorded_times(
    recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One instance in the place of three: its requests wait. With the recorded times, none would."""
    path = tmp_path / "day.jsonl"
    path.write_bytes(recording)
    recorded = ["--trace", str(path), "--settings", "fetch=off"]

    def mean_s(found: dict[str, Any], title: str) -> float:
        mean: float = found["outcomes"][title]["ttft_s"]["mean"]
        return mean

    found = printed(capsys, *recorded, "--what-if", "instances=1")
    assert {each["times"] for each in found["outcomes"].values()} == {"by the cost model (defaults)"}
    assert not any(each["observed"] for each in found["settings"].values())
    assert mean_s(found, "instances=1") > 2 * mean_s(found, "as given")
    # The twin, in which the recorded times are asked for.
    both = ["--settings", "fetch=off,observed=on", "--what-if", "instances=1"]
    found = printed(capsys, *recorded[:2], *both)
    assert {each["times"] for each in found["outcomes"].values()} == {"as recorded"}
    assert mean_s(found, "instances=1") == pytest.approx(mean_s(found, "as given"))
    assert command.main([*recorded[:2], *both]) == 0
    shown = capsys.readouterr().out
    assert "times of requests" in shown
    assert "instances=1: the fleet is not the recorded one" in shown
    assert "as given: the fleet" not in shown


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        (["--settings", "fetch=off"], {"as given": True}),
        (["--settings", "fetch=off", "--requests", "50", "--seed", "3"], {"as given": True}),
        (["--policy", "round-robin"], {"as given": False}),
        (["--settings", "hbm=2x"], {"as given": False}),
        (["--what-if", "dram=1x"], {"as given": True, "dram=1x": True}),
        (["--what-if", "observed=off"], {"as given": True, "observed=off": False}),
        (["--what-if", "fetch=off"], {"as given": True, "fetch=off": True}),
        (["--what-if", "fetch=on"], {"as given": False, "fetch=on": False}),
        (["--what-if", "hbm=2x,observed=on"], {"as given": False, "hbm=2x,observed=on": True}),
    ],
)
def test_recorded_times_are_those_of_the_recorded_fleet(
    arguments: list[str],
    recorded: dict[str, bool],
    recording: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "day.jsonl"
    path.write_bytes(b"".join(recording.splitlines(keepends=True)[:60]))
    found = printed(capsys, "--trace", str(path), *arguments)["outcomes"]
    assert {title: each["times"] == "as recorded" for title, each in found.items()} == recorded


def test_a_recorded_fleet_that_fetches_nothing_fetches_nothing(
    recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "day.jsonl"
    path.write_bytes(recording)
    found = printed(capsys, "--trace", str(path), "--policy", "round-robin", "--what-if", "fetch=on")
    assert not found["settings"]["as given"]["fetch"]
    fetched = {title: each["counts"]["fetched blocks"] for title, each in found["outcomes"].items()}
    assert fetched["as given"] == 0
    assert fetched["fetch=on"] > 0


def test_an_instance_beyond_the_recorded_ones_fetches_like_them(recording: bytes) -> None:
    rows = [json.loads(line) for line in recording.splitlines()]
    for row in rows:
        if row["type"] == "member":
            row["kv"] = "one"
    trace = read_trace([json.dumps(row).encode() + b"\n" for row in rows])
    settings = replace(FLEET, fetch=True, observed=False, policy="round-robin", requests=120)
    alone = simulate(replace(settings, instances=4), trace=replace(trace, instances=trace.instances[:1]))
    assert alone.counts["fetched blocks"] > 0
    trace.kinds = dict.fromkeys(trace.instances, "")
    assert simulate(settings, trace=trace).counts["fetched blocks"] == 0


def test_a_replay_takes_the_costs_of_its_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The twin has lost them: the router expects the defaults, and chooses otherwise."""
    path = tmp_path / "day.jsonl"

    def replayed(lines: list[bytes], *more: str) -> tuple[float, str]:
        path.write_bytes(b"".join(lines))
        both = ["--settings", "fetch=off", "--what-if", "observed=off"]
        found = printed(capsys, "--trace", str(path), *both, *more)["outcomes"]
        return found["as given"]["agreement"]["instance"], found["observed=off"]["times"]

    lines = recorded(policy="cost", costs=PROFILE).splitlines(keepends=True)
    agrees, times = replayed(lines)
    assert agrees >= 0.95
    assert times == "by the cost model (calibrated)"
    head = json.loads(lines[0])
    costs = head.pop("costs")
    without = [json.dumps(head).encode() + b"\n", *lines[1:]]
    lost, times = replayed(without)
    assert lost < 0.8
    assert times == "by the cost model (defaults)"
    profile = tmp_path / "profile.json"
    profile.write_bytes(json.dumps(costs).encode())
    assert replayed(without, "--cost-profile", str(profile))[0] == agrees
    other = json.dumps(head | {"costs": costs | {"schema": 1}}).encode() + b"\n"
    path.write_bytes(b"".join([other, *lines[1:]]))
    assert command.main(["--trace", str(path)]) == 2
    said = capsys.readouterr().err
    assert "the costs of the recording is a profile of schema 1" in said
    assert "--cost-profile" in said
    assert command.main(["--trace", str(path), "--requests", "1", "--cost-profile", str(profile)]) == 0


def test_a_replay_by_the_cost_model_has_the_times_of_each_stage(recording: bytes) -> None:
    trace = read_trace(recording.splitlines(keepends=True))
    outcome = simulate(replace(FLEET, observed=False), trace=trace)
    assert outcome.requests == FLEET.requests
    sums = sorted(sum(each.stages.values()) for each in outcome.decided.values())
    assert sums == pytest.approx(sorted(outcome.jct))
    for each in outcome.decided.values():
        assert tuple(each.stages) == STAGES
        assert min(each.stages.values()) >= 0.0
        assert each.stages["way"] == pytest.approx(2 * FLEET.lag_ms / 1e3)
        assert each.stages["transfer"] == 0.0


def test_what_is_around_a_pass_delays_its_request_and_no_other() -> None:
    """Of two prompts that come at once, the second waits for the first one's pass alone."""
    key = bytes(range(64)) * 40
    turns = [Turn(key, b"abcd", id=id) for id in "01"]
    trace = Trace(sessions=[TracedSession(turn.id, 0, 0.0, turn) for turn in turns])
    settings = replace(FLEET, instances=1, requests=2, chunk=640)
    model = CostModel()
    before = simulate(settings, model, trace).decided
    model.execution = Around()
    after = simulate(settings, model, trace).decided
    for id in before:
        for stage in ("queue", "prefill", "decode"):
            assert after[id].stages[stage] == pytest.approx(before[id].stages[stage]), stage
        assert after[id].stages["way"] == pytest.approx(before[id].stages["way"] + Around.around_s)
    assert max(each.stages["queue"] for each in after.values()) > 0.05


def test_requests_of_a_session_come_after_their_answers() -> None:
    """A recorded pause of 2 s stays one, however long the answer takes now."""
    observed = Observed(0.0, 0.1, 0.2, 0.2, 1.0)
    turns = [Turn(bytes(range(64)) * 20, b"abcd" * 30, id=id, observed=observed) for id in "01"]
    trace = Trace(sessions=[TracedSession("one", 0, 3.0 * n, turn) for n, turn in enumerate(turns)])
    settings = replace(FLEET, instances=1, requests=2, observed=False, closed=True)
    found = simulate(settings, trace=trace)
    assert found.jct[0] > 0.3
    assert found.arrivals[1] - found.arrivals[0] == pytest.approx(found.jct[0] - FLEET.lag_ms / 1e3 + 2.0)
    (session,) = trace.load(observed=True, closed=True)
    assert [(turn.think_s, turn.observed) for turn in session.turns()] == [(0.0, observed), (2.0, observed)]
    (session,) = trace.at_rate(2.0).load(observed=True, closed=True)
    assert [turn.think_s for turn in session.turns()] == [0.0, 2.0], "more users do not think faster"
    again = simulate(replace(settings, closed=False), trace=trace)
    assert again.arrivals[1] - again.arrivals[0] == pytest.approx(3.0)


def test_more_arrivals_in_a_time(recording: bytes) -> None:
    trace = read_trace(recording.splitlines(keepends=True))
    faster = trace.at_rate(1.25)
    assert faster.sessions[100].start_s == pytest.approx(trace.sessions[100].start_s / 1.25)
    assert faster.sessions[100].turn == trace.sessions[100].turn


def test_the_rate_of_a_recorded_load_is_multiplied(
    recording: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "day.jsonl"
    path.write_bytes(b"".join(recording.splitlines(keepends=True)[:104]))
    given = ["--trace", str(path), "--settings", "fetch=off", "--what-if", "rate=1x", "--what-if", "rate=20x"]
    found = printed(capsys, *given)["outcomes"]
    same, faster = found["rate=1x"], found["rate=20x"]
    assert same == found["as given"]
    assert faster["virtual_seconds"] < 0.5 * same["virtual_seconds"]
    assert faster["ttft_s"]["mean"] > 2 * same["ttft_s"]["mean"]
    # Near the capacity, with the mean times at a little less and a little more load.
    assert not same["warnings"]
    low, high = faster["interval"]["ttft_s"]
    assert low < faster["ttft_s"]["mean"] < high
    (warning,) = faster["warnings"]
    assert warning.startswith("rate=20x: ")
    # Times that were recorded are known; the twin has no interval.
    found = printed(capsys, "--trace", str(path), "--settings", "fetch=off,observed=on,rate=20x")
    assert found["outcomes"]["as given"]["capacity_used"] > command.SURE
    assert "interval" not in found["outcomes"]["as given"]


@pytest.mark.parametrize(
    ("arguments", "field", "said"),
    [
        (["--settings", "tenants=3"], "--settings", "tenants is of the built-in load"),
        (["--what-if", "crowd=2"], "--what-if", "crowd is of the built-in load"),
        (["--what-if", "hbm=2x,pause_s=3"], "--what-if", "pause_s is of the built-in load"),
        (["--settings", "learnt_hints=0.5"], "--settings", "learnt_hints is of the built-in load"),
        (["--settings", "rate=5"], "--settings", "such as rate=2x"),
        (["--requests", "51"], "--requests", "there are 50 in the trace"),
        (["--what-if", "requests=2x"], "--what-if", "there are 50 in the trace"),
    ],
)
def test_settings_that_a_recorded_load_does_not_have_are_refused(
    arguments: list[str],
    field: str,
    said: str,
    recording: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "day.jsonl"
    path.write_bytes(b"".join(recording.splitlines(keepends=True)[:54]))
    assert command.main(["--trace", str(path), *arguments]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert field in shown


@pytest.mark.parametrize("what", ["observed=on", "closed=on"])
def test_settings_of_recordings_are_refused_without_what_they_need(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a recording, and with a trace that has neither times nor sessions."""
    assert command.main(["--settings", what]) == 2
    assert "--trace" in capsys.readouterr().err
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    assert command.main(["--trace", str(path), "--settings", what]) == 2
    assert f"leave {what} out" in capsys.readouterr().err


def test_pairs_of_a_recording_are_simulated_as_pairs(recording: bytes) -> None:
    rows = [json.loads(line) for line in recording.splitlines()]
    members = [row for row in rows if row["type"] == "member"]
    for row, role in zip(members, ("decode", "decode", "prefill"), strict=True):
        row["role"] = role
    trace = read_trace([json.dumps(row).encode() + b"\n" for row in rows])
    assert trace.instances[0] == members[2]["instance"]
    settings = command.settings_of(command.Arguments(), trace)
    assert (settings.prefill, settings.decode) == (1, 2)
    for text in ("instances=2", "instances=2x"):
        with pytest.raises(ConfigError, match="prefill and decode together, 3 here"):
            changed(settings, text)
    assert changed(settings, "instances=4, decode=3").instances == 4
    found = simulate(replace(settings, observed=False, requests=60, policy="cost"), trace=trace)
    assert {each.instance for each in found.decided.values()} == {members[2]["instance"]}
    assert all(each.stages["transfer"] > 0 for each in found.decided.values())


def test_stages_that_were_recorded_are_kept(recording: bytes) -> None:
    rows = [json.loads(line) for line in recording.splitlines()]
    request = next(row for row in rows if row["type"] == "request")
    stages = {"route": 0.01, "prefill_queue": 0.02, "prefill": 0.1, "transfer": 0.03, "decode_queue": 0.01}
    request |= {"first_byte_s": 0.2, "ended_s": 0.5, "stages": stages}
    trace = read_trace([json.dumps(row).encode() + b"\n" for row in rows])
    found = trace.decided[trace.sessions[0].turn.id].stages
    expected = {"way": 0.04, "queue": 0.02, "prefill": 0.1, "transfer": 0.04, "decode": 0.3}
    assert found == pytest.approx(expected)
    assert not trace.decided[trace.sessions[1].turn.id].stages


def test_limits_that_were_recorded_refuse_requests_of_a_faster_load(tmp_path: Path) -> None:
    """Of one tenant. Without its limits, the twin, all are answered."""
    path = tmp_path / "day.jsonl"
    write_recording(path)
    head, *rest = path.read_bytes().splitlines(keepends=True)
    settings = {"--queue-size": 50, "--queue-timeout-secs": 20.0, "--queue-policy": "shortest-first"}
    limited = msgspec.json.decode(head) | {
        "settings": settings | {"--max-concurrent-requests": 99, "bytes-per-minute": 10**9},
        "limits": {"1": {"requests_per_second": 1.3, "burst": 3, "priority": 2}},
    }

    def refused(first: bytes, rate: float) -> dict[str, int]:
        trace = read_trace([first, *rest]).at_rate(rate)
        found = settings_of(Arguments(), trace)
        outcome = simulate(replace(found, observed=False, policy="round-robin"), trace=trace)
        return {name: sum(each.failed.values()) for name, each in outcome.tenants.items()}

    slow, fast = (refused(msgspec.json.encode(limited) + b"\n", rate) for rate in (1.0, 3.0))
    assert not sum(slow.values())
    assert fast["tenant-0"] == 0
    assert fast["tenant-1"] > 5
    assert not sum(refused(head, 3.0).values())
    found = settings_of(Arguments(), read_trace([msgspec.json.encode(limited) + b"\n", *rest]))
    assert (found.queue_size, found.queue_timeout_secs, found.queue_policy) == (50, 20.0, "shortest-first")
    assert (found.max_concurrent_requests, found.bytes_per_minute) == (99, 10**9)
    assert (found.requests_per_second, found.priority) == ((0.0, 1.3), (0.0, 2.0))


def test_moments_of_decisions_and_of_load_reports_are_those_recorded() -> None:
    namer, writer = Namer(b"k" * 16, 16), Writer()
    prompt = writer.blocks("space", 100, namer.names("space", b"p" * 400))
    lines = [
        writer.line(Head(0.0, 1, "r", namer.key_id, 16, "cost")),
        writer.line(Loaded(999.5, "a", 0, 0, 0)),
        writer.line(
            Request(
                1000.0, id="1", path="/generate", status=200, prompts=(prompt,), queued_s=0.25, routed_s=0.5,
                decided_s=0.375, sent_s=0.5, first_byte_s=1.0, ended_s=2.0,
            )
        ),
        *(writer.line(Applied(1000.5, "a", 1, age_s=age)) for age in (0.001, 0.0, 0.003, 9.0)),
        writer.line(Loaded(1000.75, "a", 1, 2, 300)),
    ]  # fmt: skip
    trace = read_trace(lines)
    observed = trace.sessions[0].turn.observed
    assert observed is not None
    assert observed.decided_s == 0.125, "the wait for admission is simulated"
    assert observed.sending_s == 0.125
    assert trace.settings["lag_ms"] == 3.0, "the median of the ages that are known"
    assert trace.reports == {"a": [-0.5, 0.75]}


def test_answers_that_are_replayed_take_slots_as_they_grow() -> None:
    """A second prompt fits beside half of the first one's answer, by its observed times, and not beside all
    of it: HBM loses blocks of another conversation only then."""
    settings = changed(Settings(), "instances=1,requests=3,policy=round-robin,hbm=64,dram=1,fetch=off")

    def request(number: int, at_s: float, tokens: int, answer: int, last_s: float) -> TracedSession:
        key = bytes([number]) * (4 * tokens)
        times = Observed(0.0, 0.1, 0.2, 0.2, last_s)
        turn = Turn(key, bytes([number + 100]) * (4 * answer), id=str(number), observed=times)
        return TracedSession(f"s{number}", 0, at_s, turn)

    def found(at_s: float) -> int:
        """Tokens of the first conversation that are in HBM after the third prompt, sent at this time."""
        first = request(1, 0.0, 320, 1, 0.3)
        trace = Trace(instances=[url(0)])
        trace.sessions = [
            first, request(2, 1.0, 160, 320, 11.0), request(3, at_s, 288, 1, 0.3),
            replace(first, start_s=at_s + 0.5, turn=replace(first.turn, id="again")),
        ]  # fmt: skip
        outcome = simulate(replace(settings, requests=4), trace=trace)
        return sum(outcome.decided["again"].hits.values())

    assert found(1.5) > found(10.5)


@pytest.mark.parametrize("fetch_s", [0.5, 1.5], ids=["in time", "late"])
def test_a_recorded_fetch_does_not_wait_for_a_pass_of_its_source(fetch_s: float) -> None:
    """The recorded time has that wait in it. The last request, whose pass begins after a second, has the
    first one's KV from the other instance, which computes another prompt meanwhile."""
    settings = changed(Settings(), "instances=2,requests=4,policy=round-robin,hbm=512,dram=512,fetch=on")
    rng = random.Random(1)

    def request(
        number: int, at_s: float, key: bytes, computed_s: float, took_s: float | None = None
    ) -> TracedSession:
        times = Observed(0.0, 1.0, computed_s, computed_s, computed_s + 0.1, took_s)
        return TracedSession(f"s{number}", 0, at_s, Turn(key, b"abcd", id=str(number), observed=times))

    def prompt() -> bytes:
        return rng.randbytes(4 * 2048)

    first = prompt()
    trace = Trace(instances=[url(0), url(1)])
    trace.sessions = [
        request(0, 0.0, first, 1.2), request(1, 2.0, prompt(), 1.2),
        request(2, 4.0, prompt(), 9.0), request(3, 6.0, first + prompt()[:64], 1.2, fetch_s),
    ]  # fmt: skip
    found = simulate(settings, trace=trace).decided
    assert [found[str(number)].instance for number in range(4)] == [url(0), url(1), url(0), url(1)]
    assert found["3"].hits == ({"dram": 2048} if fetch_s < 1 else {})


def test_a_mooncake_trace_is_a_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"timestamp": 100 * n, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 100 + n]}
        for n in range(20)
    ]
    trace = read_trace([json.dumps(row).encode() + b"\n" for row in rows])
    first, second = trace.sessions[0].turn.key, trace.sessions[1].turn.key
    assert len(first) == 1100 * 4
    assert first[: 1024 * 4] == second[: 1024 * 4]
    assert first[1024 * 4 :] != second[1024 * 4 :]
    found = simulate(replace(FLEET, requests=20), trace=trace)
    assert found.requests == 20
    assert found.as_json()["reused"] > 0.5


@pytest.mark.parametrize("line", [b"", b"{}\n", b'{"hash_ids": 3}\n', b"no json\n"])
def test_another_file_is_refused(line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other"
    path.write_bytes(line)
    if line:
        with pytest.raises(ConfigError, match="line 1"):
            read_trace([line])
        assert command.main(["--trace", str(path)]) == 2
        assert "--trace" in capsys.readouterr().err
    assert command.main(["--trace", str(tmp_path / "none")]) == 2


def test_a_replayed_request_is_looked_for_on_disk_when_it_has_come() -> None:
    """The first prompt comes back when HBM and DRAM have others. Its read takes a third of a second, and its
    pass begins after half a second; in the twin, at once."""
    blocks, block_bytes = 40, 16 * CostModel().kv_bytes_per_token
    rng = random.Random(1)
    prompts = [rng.randbytes(64 * blocks + 4) for _ in range(12)]
    fleet = changed(Settings(), "instances=1,requests=13,hbm=100,dram=100,disk=9000,fetch=off,lag_ms=1")
    fleet = replace(fleet, disk_read=3.0 * blocks * block_bytes)

    def found(began_s: float) -> dict[str, int]:
        observed = Observed(0.0, began_s, began_s + 0.1, began_s + 0.1, began_s + 0.2)
        trace = Trace()
        for number, key in enumerate([*prompts, prompts[0]]):
            turn = Turn(key, b"abcd", id=str(number), observed=observed)
            trace.sessions.append(TracedSession(str(number), 0, 20.0 * number, turn))
        return dict(simulate(fleet, trace=trace).decided["12"].hits)

    assert found(began_s=0.5) == {"disk": 16 * blocks}
    assert found(began_s=0.0) == {}


@pytest.mark.parametrize("hinted", [True, False], ids=["hints", "none, the twin"])
def test_hints_bring_kv_to_hbm_at_an_instance_that_is_idle(hinted: bool) -> None:
    """Of two prompts at once, one after the other. Nothing else wakes the instance until they come again."""
    blocks = 40
    rng = random.Random(1)
    prompts = [rng.randbytes(64 * blocks + 4) for _ in range(12)]
    fleet = changed(Settings(), "instances=1,requests=14,hbm=100,dram=1000,fetch=off")
    observed = Observed(0.0, 0.01, 0.1, 0.1, 0.2)
    trace = Trace()
    for number, key in enumerate([*prompts, *prompts[:2]]):
        turn = Turn(key, b"abcd", id=str(number), observed=observed)
        trace.sessions.append(TracedSession(f"s{number % 12}", 0, 20.0 * number, turn))
        if hinted and number < 2:
            trace.announcements.append(Announcement(20.0 * 12 - 1.0, f"s{number}", 0, key + b"abcd", 0.0))
    decided = simulate(fleet, trace=trace).decided
    tier = "hbm" if hinted else "dram"
    assert [dict(decided[again].hits) for again in ("12", "13")] == [{tier: 16 * blocks}] * 2
