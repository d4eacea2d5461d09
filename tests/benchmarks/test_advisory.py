"""The advisory benchmark plays its input, against a stand-in for a router, and reports its figures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.advisory.__main__ import Benchmark, main
from benchmarks.advisory.figures import Advised, Served
from benchmarks.advisory.fleet import BY_LAYER, HINTED, SYSTEMS, WHOLE, Tiers, server_flags
from benchmarks.advisory.graphs import Call, Edge
from benchmarks.advisory.parts import Parts
from benchmarks.advisory.plan import TINY, AdvisoryOptions
from benchmarks.advisory.play import Player, Scene
from benchmarks.advisory.plots import _missing
from benchmarks.advisory.slow_link import slowed
from benchmarks.advisory.talks import Ask, Shape, Talk
from benchmarks.lib.common import Report


class StandIn:
    """Answers as our router does: each answer is the prompt's last token, again and again."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], int | None]] = []
        self.hints: list[dict[str, object]] = []
        self.order: list[str] = []
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        session, prompt = request.headers["x-session-id"], body["input_ids"]
        self.asked.append((session, prompt, body.get("priority")))
        self.order.append(f"ask {session}")
        answer = [prompt[-1]] * body["sampling_params"]["max_new_tokens"]
        known = len(prompt) // 16 * 16
        details = {"device": known // 2, "host": known - known // 2, "storage": 0}
        response = web.StreamResponse(headers={"x-kv-instance": f"http://i{len(self.asked) % 2}"})
        await response.prepare(request)
        for end in range(1, len(answer) + 1):
            meta = {
                "prompt_tokens": len(prompt), "completion_tokens": end, "cached_tokens": known,
                "cached_tokens_details": details,
            }  # fmt: skip
            event = {"output_ids": answer[:end], "meta_info": meta}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def advisory(self, request: web.Request) -> web.Response:
        self.hints.append(await request.json())
        self.order.append(f"hint {self.hints[-1]['session']}")
        if len(self.hints) == 1:
            return web.json_response({}, status=404)
        return web.json_response({"id": f"h{len(self.hints)}"})

    async def hint(self, request: web.Request) -> web.Response:
        where = {"hbm": 5, "dram": 2, "disk": 1, "elsewhere": 4, "nowhere": 8}
        state = "used" if request.match_info["id"] != "h3" else "expired"
        return web.json_response({"state": state, "ready_after_s": 0.25, "tokens": where})


@pytest.fixture
def router() -> Iterator[StandIn]:
    stand_in = StandIn()
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", stand_in.generate)
        app.router.add_post("/v1/advisory", stand_in.advisory)
        app.router.add_get("/v1/advisory/{id}", stand_in.hint)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stand_in.url = site.name
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield stand_in
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()


def talk(name: str, turns: int, past: int = 20) -> Talk:
    asks = tuple(Ask((7, 8, turn), 3, 0.0, 0.01) for turn in range(turns))
    return Talk(name, tuple(range(100, 100 + past)), asks)


def test_a_user_goes_on_from_what_was_answered(router: StandIn) -> None:
    scene = Scene("a", 1, 30.0, hints=True)
    Player(router.url, scene).people([iter([talk("s", 2), talk("t", 1, past=0)])])
    first, second, third = router.asked
    assert first == ("a/s", [*range(100, 120), 7, 8, 0], None)
    assert second == ("a/s", [*range(100, 120), 7, 8, 0, 0, 0, 0, 7, 8, 1], None)
    assert third[0] == "a/t"
    # Nothing is known of a session before its first request.
    assert [hint["session"] for hint in router.hints] == ["a/s", "a/s"]
    assert router.order.index("hint a/s") < router.order.index("ask a/s")
    assert (scene.hints_sent, scene.hints_refused) == (2, 1)
    served = scene.served[1]
    assert (served.prompt, served.known, served.answer, served.turn) == (29, 26, 3, 2)
    assert (served.hbm, served.dram, served.computed) == (8, 8, 13)
    assert served.instance == "http://i0"
    assert served.sent < served.first <= served.ended
    assert [one.hinted for one in scene.served] == [True, True, False]
    # The first hint was refused.
    assert [one.advised is not None for one in scene.served] == [False, True, False]
    advised = served.advised
    assert advised is not None
    assert advised == Advised(ready=True, below=7, gap_s=advised.gap_s, ready_s=0.25)
    assert 0.01 <= advised.gap_s < 30.0


def test_a_hint_that_ended_otherwise_says_nothing_of_its_request(router: StandIn) -> None:
    scene = Scene("a", 1, 30.0, hints=True)
    Player(router.url, scene).people([iter([talk("s", 4)])])
    assert [one.advised is not None for one in scene.served] == [False, True, False, True]


def test_a_measurement_marks_what_is_new_in_it(router: StandIn) -> None:
    for number in range(2):
        scene = Scene("a", 1, 30.0, hints=True, mark=500 + number)
        Player(router.url, scene).people([iter([talk("s", 2)])])
    past = list(range(100, 120))
    assert [prompt[:22] for _, prompt, _ in router.asked] == [
        [*past, mark, 7] for mark in (500, 500, 501, 501)
    ]
    assert router.asked[1][1][20:] == [500, 7, 8, 0, 0, 0, 0, 500, 7, 8, 1]
    # The router remembers the session as the measurement before has left it.
    assert [hint.get("input_ids") for hint in router.hints] == [past, None, past, None]


def test_what_was_said_before_is_warmed_up_once(router: StandIn) -> None:
    scene = Scene("a", 1, 1.0)
    Player(router.url, scene).warm([talk("s", 1), talk("t", 1, past=0), talk("u", 1, past=9)], 2)
    assert sorted((session, len(prompt)) for session, prompt, _ in router.asked) == [("a/s", 20), ("a/u", 9)]
    assert not scene.served


def test_missing_hints_are_missing_and_without_hints_there_are_none(router: StandIn) -> None:
    scene = Scene("a", 1, 30.0, hints=True, levels=(1.0,), missing=lambda level: level)
    Player(router.url, scene).people([iter([talk("s", 3)])])
    Player(router.url, Scene("b", 1, 30.0)).people([iter([talk("s", 3)])])
    assert not router.hints
    assert len(router.asked) == 6
    assert {one.level for one in scene.served} == {1.0}
    assert not any(one.hinted for one in scene.served)


def test_priorities_are_sent_with_hints_and_requests(router: StandIn) -> None:
    scene = Scene("a", 1, 30.0, hints=True, levels=(0.5,), urgent=lambda level: level)
    Player(router.url, scene).people([iter([talk(f"s{number}", 1)]) for number in range(20)])
    urgent = {session for session, _, priority in router.asked if priority}
    assert 0 < len(urgent) < 20
    assert {hint["session"] for hint in router.hints if hint.get("priority")} == urgent


def test_a_measurement_ends(router: StandIn) -> None:
    scene = Scene("a", 1, 0.3)
    endless = (talk(f"s{number}", 1) for number in itertools.count())
    Player(router.url, scene).people([endless])
    assert scene.served


def test_hints_go_ahead_of_requests_that_take_turns(router: StandIn) -> None:
    scene = Scene("a", 1, 0.0, hints=True)
    Player(router.url, scene).in_turn([talk(f"s{number}", 2) for number in range(4)], 2)
    assert router.order == [
        *("hint a/s2", "ask a/s0", "ask a/s0", "ask a/s1", "hint a/s3", "ask a/s1"),
        *("ask a/s2", "ask a/s2", "ask a/s3", "ask a/s3"),
    ]
    assert [one.level for one in scene.served] == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [(one.session, one.turn) for one in scene.served if one.hinted] == [("s2", 1), ("s3", 1)]


def test_all_hints_go_ahead_of_all_requests_of_what_is_announced(router: StandIn) -> None:
    scene = Scene("a", 1, 0.0, hints=True)
    Player(router.url, scene).announced([talk(f"s{number}", 2) for number in range(2)], 0.0)
    assert router.order == ["hint a/s0", "hint a/s1", *(["ask a/s0"] * 2), *(["ask a/s1"] * 2)]
    assert [(one.session, one.turn) for one in scene.served if one.hinted] == [("s0", 1), ("s1", 1)]


def test_a_slow_link_takes_as_long_as_its_bytes() -> None:
    begun = time.perf_counter()
    assert slowed(lambda nbytes: nbytes, 1e6)(20_000) == 20_000
    assert time.perf_counter() - begun >= 0.02


def test_agents_hint_along_the_edges_at_sessions_that_are_known(router: StandIn) -> None:
    run = [
        Call("plan", 0, (1, 2, 3), 2, edges=(Edge("code", 0.5),)),
        Call("code", 0, (4, 5), 1, after=(0,), edges=(Edge("plan", 0.25), Edge("test", 0.25))),
        Call("plan", 4, (6,), 1, 0.02, after=(1,)),
    ]
    scene = Scene("a", 1, 0.0, hints=True)
    (seconds,) = Player(router.url, scene).agents([run])
    assert seconds >= 0.02
    assert [prompt for _, prompt, _ in router.asked] == [[1, 2, 3], [4, 5], [1, 2, 3, 3, 6]]
    assert [(hint["session"], hint["earliest_s"]) for hint in router.hints] == [("a/plan", 0.25)]
    assert [one.hinted for one in scene.served] == [False, False, True]


def test_agents_that_are_called_at_once_are_hinted_at_and_waited_for_together(router: StandIn) -> None:
    def turn(at: int, readers: list[str]) -> list[Call]:
        edges = tuple(Edge(reader) for reader in readers)
        lead = Call("lead", 2 * at, (1, 2), 1, after=tuple(range(3 * at - 2, 3 * at)), edges=edges)
        return [lead, *(Call(each, 2 * at, (3, 4), 1, after=(3 * at,)) for each in readers)]

    run = [*turn(0, ["a", "b"]), *turn(1, ["a", "b"])]
    run[0] = replace(run[0], after=())
    scene = Scene("x", 1, 0.0, hints=True)
    Player(router.url, scene).agents([run])
    order = router.order
    assert sorted(order[1:3]) == ["ask x/a", "ask x/b"]
    # Of agents that have not been called nothing can be moved; the second time both are hinted at, once.
    assert sorted(each for each in order if each.startswith("hint")) == ["hint x/a", "hint x/b"]
    assert order.index("ask x/lead", 1) == 3
    assert sorted(each for each in order[4:] if each.startswith("ask")) == ["ask x/a", "ask x/b"]
    Player(router.url, Scene("y", 1, 0.0)).agents([run])
    assert len(router.hints) == 2


def test_a_request_that_fails_ends_the_measurement(router: StandIn) -> None:
    with pytest.raises(RuntimeError, match="404"):
        Player(router.url + "/nowhere", Scene("a", 1, 5.0)).people([iter([talk("s", 1)])])


def test_systems_differ_in_what_keeps_kv_and_nothing_else() -> None:
    flags = {kind: server_flags(kind, Tiers(), 1234) for kind in {system.servers for system in SYSTEMS}}
    assert flags["stock"] == flags["no cache"][: len(flags["stock"])] == flags["ours"][: len(flags["stock"])]
    assert flags["no cache"][len(flags["stock"]) :] == ("--disable-radix-cache",)
    assert "--kv-router" in flags["ours"]
    whole, layers = (server_flags(system.servers, Tiers(), 1234) for system in (WHOLE, BY_LAYER))
    assert whole[:-1] == layers[:-1] == (*flags["ours"], "--kv-layer-region-size")


def test_a_disk_tier_and_another_model_are_options() -> None:
    options = AdvisoryOptions.of(
        ["--quick", "--model", "tiny-mla", "--dram-tokens", "4096", "--disk-tokens", "65536"], "advisory", ""
    )
    assert options.tiers(Tiers(hbm=100)) == Tiers(hbm=100, dram=4096, disk=65_536)
    assert AdvisoryOptions.of([], "advisory", "").tiers(Tiers(hbm=100)) == Tiers(hbm=100)
    flags = server_flags("ours", options.tiers(Tiers()), 1234, options.model, Path("/d"))
    found = dict(itertools.pairwise(flags))
    token_bytes = 4 * (64 + 32) * 4
    assert found["--kv-dram-size"] == str(4096 * token_bytes)
    assert (found["--kv-disk-path"], found["--kv-disk-size"]) == ("/d", str(65_536 * token_bytes))
    assert "--kv-disk-path" not in server_flags("ours", Tiers(), 1234, "tiny-mla", Path("/d"))
    assert "--kv-disk-path" not in server_flags("stock", options.tiers(Tiers()), 1234, disk=Path("/d"))


@pytest.mark.parametrize("levels", [(0.0,), (0.5,), (0.0, 0.5)])
def test_a_report_names_levels_that_had_no_request(levels: tuple[float, ...], tmp_path: Path) -> None:
    """A slow machine gets through no request in a slice."""
    asked = [
        Served("s", turn, turn, turn + 0.5, turn + 2.0, 100, 80, 4, 48, 16, 16, level=level)
        for turn in range(2)
        for level in levels
    ]

    class Played(Parts):
        def _people(self, fleet, system, url, scene, count, shape) -> float:  # type: ignore[no-untyped-def]
            scene.served += asked
            return 0.0

    report = Report("advisory")
    Played(TINY, report, Shape(), tmp_path, lambda text: []).missing(None, HINTED, "")  # type: ignore[arg-type]
    rows = {row["case"]: row for row in report.rows}
    assert len({tuple(rows[f"{level:.0%} of hints missing"]) for level in TINY.missing}) == 1, "one table"
    for level in TINY.missing:
        row = rows[f"{level:.0%} of hints missing"]
        there = level in levels
        assert row["requests"] == (2 if there else 0)
        assert (row["normalized_ms"], row["ttft_p50_ms"]) == ((500.0, 500.0) if there else (None, None))
        assert (row["cost"] is not None) == (there and 0.0 in levels)
    assert (rows["50% of hints missing, by the line"]["cost"] is not None) == (len(levels) == 2)
    report.print()
    assert _missing(report.rows) is not None, "a figure of those that were asked"


def test_a_run_in_pieces_measures_what_is_asked_for(tmp_path: Path) -> None:
    def groups(*flags: str) -> list[tuple[str, int, list[str], list[str]]]:
        options = AdvisoryOptions.of(["--data", str(tmp_path), *flags], "advisory", "")
        found = list(Benchmark(options, Report("advisory"))._groups())
        return [
            (each.kind, each.instances, [system.word for system in each.systems], sorted(each.parts))
            for each in found
        ]

    assert groups("--parts", "missing") == [("ours", 2, ["ours"], ["missing"])]
    assert groups("--parts", "balance", "--systems", "sticky", "ours") == [
        ("ours", 4, ["sticky", "ours"], ["balance"])
    ]
    assert groups("--parts", "priority") == [
        ("ours", 2, ["ours"], ["priority"]),
        ("no cache", 2, ["recompute"], ["priority"]),
    ]
    assert groups("--parts", "layers") == [
        (system.servers, 1, [system.word], ["layers"]) for system in (WHOLE, BY_LAYER)
    ]
    everything = [kind for kind, *_ in groups()]
    assert everything == ["ours", "no cache", "ours", WHOLE.servers, BY_LAYER.servers], (
        "stock: no interpreter"
    )


@pytest.mark.long
def test_quick_run(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        flags = ["--quick", "--json", str(tmp_path / "out.json"), "--plots", str(tmp_path)]
        assert main([*flags, "--systems", "recompute", "sticky", "ours"]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["name"] == "advisory"
    assert set(report["summary"]) == {
        "share_within_1_1_of_hbm_hit", "users_vs_recompute", "users_vs_stock_router", "max_over_median_load",
        "max_over_median_load_sticky", "missed10_cost", "missed10_noise", "missed30_cost", "missed30_noise",
        "missed50_cost", "missed50_noise", "hidden_share",
    }  # fmt: skip
    assert 0.0 < report["summary"]["hidden_share"] <= 1.0
    assert (tmp_path / "figure_17_missing.svg").exists()
    assert report["summary"]["users_vs_recompute"] > 1.0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_stopped_reports_what_it_measured(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(benchmark: Benchmark) -> None:
        benchmark.report.add("hidden", users=8, hidden=0.5, hbm_wanted=0.9)
        signal.raise_signal(sent)
        raise AssertionError("goes on")

    monkeypatch.setattr(Benchmark, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    # As at a terminal: a shell that starts tests in the background may ignore SIGINT.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert main(["--quick", "--data", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["summary"] == {"hidden_share": 0.5}
    assert "interrupted" in report["notes"][-1]
    assert signal.getsignal(signal.SIGTERM) is before
    signal.signal(signal.SIGINT, ignored)
