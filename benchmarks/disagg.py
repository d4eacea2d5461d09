"""What prefill and decode apart cost and save, by who keeps KV: MemServe's designs beside one server.

Each turn of each session is asked of every design, in an order that changes, so that what disturbs the
machine disturbs all of them. The prompts are the first design's (the answers of a server that finds nothing
are the truth), so that every design computes the same, and every token is compared. The peer is SGLang's own
hand-over with mooncake_tcp, behind its own router where that is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import disagg_figures
from benchmarks.common import SEED, Options, Report, parse, percentile
from benchmarks.data import data_folder
from benchmarks.disagg_loads import Session, Size, sessions
from benchmarks.disagg_loads import Turn as Said
from benchmarks.disagg_servers import (
    COLOCATED,
    DESIGNS,
    ROUTED,
    STOCK,
    STOCK_DESIGN,
    STOCK_ROUTED,
    AskError,
    Design,
    Group,
    GroupSpec,
    ask,
    mooncake_missing,
    pair,
    routed,
    running,
    stock,
)
from benchmarks.router_processes import peer_missing
from sglang_ext.testing.compare import Answer, assert_same

NAME = "disagg"
LATE = 3
"""From this turn on a conversation has grown beyond its first prompts (the aims' "third turn and later")."""
GROWING = ("sharegpt", "react")
"""Loads whose turns come after all that was said before."""
BLOCK = 16
FIGURES = ("pull_vs_push", "layers", "xpyd")


@dataclass
class Turn:
    """What one turn took, in seconds and bytes. added: tokens that are new in its prompt."""

    load: str
    number: int
    prompt: int
    added: int
    ttft: float
    jct: float
    tpot: float
    cached: int
    sent: float


@dataclass
class Leg:
    """A design, and what was seen of it."""

    design: Design
    turns: list[Turn] = field(default_factory=list)
    wrong: int = 0


def play(legs: Sequence[Leg], groups: Mapping[str, Group], played: Sequence[Session]) -> None:
    """Every session, turn by turn, on every design."""
    rng = random.Random(SEED)
    for name, session in enumerate(played):
        for group in groups.values():
            group.flush()
        history = list(session.first)
        for number, said in enumerate(session.turns, 1):
            prompt = [*history, *said.added]
            order = [legs[0], *rng.sample(legs[1:], len(legs) - 1)]
            expected: Answer | None = None
            for leg in order:
                answer = _turn(leg, groups, rng, f"{name}", session, number, said, prompt)
                expected = expected or answer
                leg.wrong += not _same(expected, answer)
                seen = leg.turns[-1]
                sys.stderr.write(
                    f"{session.load} {number} {leg.design.name}: {seen.cached} of {seen.prompt} cached, "
                    f"ttft {seen.ttft * 1e3:.0f} ms, jct {seen.jct * 1e3:.0f} ms\n"
                )
            assert expected is not None
            if session.grows:
                history = [*prompt, *expected.tokens]


def _turn(
    leg: Leg,
    groups: Mapping[str, Group],
    rng: random.Random,
    name: str,
    session: Session,
    number: int,
    said: Said,
    prompt: Sequence[int],
) -> Answer:
    design = leg.design
    group = groups[design.servers]
    before = group.read_bytes()
    room = rng.randrange(1, 1 << 62)
    found = asyncio.run(
        ask(group, prompt, said.answer, room, design.keys(name, number), by_router=design.routed)
    )
    group.settle()
    leg.turns.append(
        Turn(
            session.load,
            number,
            len(prompt),
            len(said.added),
            found.ttft,
            found.jct,
            found.tpot,
            found.answer.cached_tokens,
            group.read_bytes() - before,
        )
    )
    return found.answer


def _same(expected: Answer, got: Answer) -> bool:
    try:
        assert_same(expected, got)
    except AssertionError as error:
        sys.stderr.write(f"wrong answer: {error}\n")
        return False
    return True


def report_on(report: Report, legs: Sequence[Leg]) -> None:
    """Rows of times by load and design, of bytes and reuse by turn, and the summary."""
    for load in sorted({turn.load for leg in legs for turn in leg.turns}):
        for leg in legs:
            turns = [turn for turn in leg.turns if turn.load == load]
            values: dict[str, float] = {}
            for what in ("ttft", "tpot", "jct"):
                seconds = [getattr(turn, what) for turn in turns]
                values |= {
                    f"{what}_mean_ms": statistics.mean(seconds) * 1e3,
                    f"{what}_p50_ms": percentile(seconds, 50) * 1e3,
                    f"{what}_p99_ms": percentile(seconds, 99) * 1e3,
                }
            report.add(load, design=leg.design.name, **values, turns=len(turns))
    for leg in legs:
        for load in GROWING:
            for number in sorted({turn.number for turn in leg.turns if turn.load == load}):
                turns = [t for t in leg.turns if t.load == load and t.number == number]
                report.add(
                    load,
                    design=leg.design.name,
                    turn=number,
                    prompt_tokens=statistics.mean(t.prompt for t in turns),
                    cached_tokens=statistics.mean(t.cached for t in turns),
                    sent_kib=statistics.mean(t.sent for t in turns) / 1024,
                    ttft_ms=statistics.mean(t.ttft for t in turns) * 1e3,
                )
    by = {leg.design.name: leg for leg in legs}
    through = (STOCK_ROUTED.name, ROUTED.name) if STOCK_ROUTED.name in by else (STOCK, "3")
    report.summary |= {
        "ttft_c3_vs_c1_turn3": _ratio(by, "ttft", "3", "1", late=True),
        "jct_c3_vs_basic": _ratio(by, "jct", "3", "basic"),
        "ttft_c3_vs_stock_mooncake_tcp": _ratio(by, "ttft", through[1], through[0]),
        "jct_c3_vs_stock_mooncake_tcp": _ratio(by, "jct", through[1], through[0]),
        "bytes_per_turn_growth_c1": growth(by.get("1")),
        "bytes_per_turn_growth_c3": growth(by.get("3")),
        "pull_vs_push_jct": report.summary.get("pull_vs_push_jct"),
        "wrong_answers": sum(leg.wrong for leg in legs),
        "ttft_c3_vs_c2": _ratio(by, "ttft", "3", "2"),
        "ttft_c2_vs_c1": _ratio(by, "ttft", "2", "1"),
    }


def _ratio(by: Mapping[str, Leg], what: str, over: str, under: str, late: bool = False) -> float | None:
    """Of means; `late`: over the third and later turns of loads that grow."""

    def mean(name: str) -> float | None:
        turns = [
            turn
            for turn in (by[name].turns if name in by else ())
            if not late or (turn.number >= LATE and turn.load in GROWING)
        ]
        return statistics.mean(getattr(turn, what) for turn in turns) if turns else None

    a, b = mean(over), mean(under)
    return None if a is None or not b else a / b


def growth(leg: Leg | None) -> float | None:
    """Bytes sent per token that the user added (and a block, to which both sides round), in the last turns of
    conversations over those in the second turns.
    """
    if leg is None:
        return None
    turns = [turn for turn in leg.turns if turn.load == GROWING[0]]
    last = max((turn.number for turn in turns), default=0)
    if last <= LATE - 1:
        return None

    def per_token(number: int) -> float:
        mine = [turn for turn in turns if turn.number == number]
        return sum(turn.sent for turn in mine) / sum(turn.added + BLOCK for turn in mine)

    first = per_token(LATE - 1)
    return per_token(last) / first if first else None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    parser.add_argument("--data", metavar="FOLDER", help="where the texts of the loads are")
    parser.add_argument(
        "--mooncake",
        type=Path,
        metavar="FOLDER",
        help="where `pip install --no-deps --target FOLDER mooncake-transfer-engine-non-cuda` was run, to "
        "measure stock SGLang with mooncake_tcp too",
    )
    parser.add_argument(
        "--sglang-router-python",
        type=Path,
        metavar="PYTHON",
        help="interpreter of an environment with sglang-router==0.3.2, to put it in front of stock SGLang",
    )
    parser.add_argument(
        "--pull-vs-push", action="store_true", help="only compare pull with push (KVDirect, figure 16)"
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help="only compare by layer, by request and aggregated (MemServe 12)",
    )
    parser.add_argument(
        "--xpyd", action="store_true", help="only compare numbers of servers (KVDirect, figure 12)"
    )


def measure_designs(options: Options, report: Report) -> None:
    """Rows by load and design, and the summary."""
    size = Size(*((4, 64, 64, 1000) if options.quick else (6, 256, 192, 4000)))
    played = sessions(data_folder(options.extra.data), options.rounds(8, quick=1), size)
    specs: dict[str, GroupSpec] = {"colocated": COLOCATED, "pull": pair()}
    designs = list(DESIGNS)
    missing = mooncake_missing(options.extra.mooncake)
    router_missing = peer_missing(options.extra.sglang_router_python)
    if missing is None:
        specs[STOCK] = stock(options.extra.mooncake)
        if router_missing is None:
            designs += [ROUTED, STOCK_ROUTED]
        if router_missing is not None or not options.quick:
            designs.append(STOCK_DESIGN)
        if router_missing is not None:
            report.note(f"no router in front of stock SGLang or of ours: sglang-router {router_missing}")
    else:
        report.note(f"stock SGLang with mooncake_tcp {missing}")
    report.note(
        f"{len(played)} sessions of at most {size.turns} turns, one request at a time; questions are cut at "
        f"{size.question} tokens (observations at twice that), answers at {size.answer}, documents and "
        f"few-shot prefixes at {size.document}; designs basic to 3 share a pair of servers"
    )
    legs = [Leg(design) for design in designs]
    with running(specs) as groups, ExitStack() as stack:
        if ROUTED in designs:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-routers-")))
            stack.enter_context(routed(groups["pull"], folder))
            stack.enter_context(routed(groups[STOCK], folder, options.extra.sglang_router_python))
        # Once, so that nothing is compiled or connected in what is timed.
        warm = Session("sharegpt", [7] * 300, (Said([8] * 40, 4), Said([9] * 40, 4)))
        sys.stderr.write("servers run\n")
        play([leg for leg in legs if groups[leg.design.servers].ours], groups, [warm])
        for leg in [leg for leg in legs if not groups[leg.design.servers].ours]:
            try:
                play([legs[0], leg], groups, [warm])
            except AskError as error:
                report.note(f"{leg.design.name} was left out: {str(error).splitlines()[0]}")
                sys.stderr.write(f"{leg.design.name}: {error}\n")
                leg.turns.clear()
        legs = [leg for leg in legs if leg.turns]
        for leg in legs:
            leg.turns.clear()
            leg.wrong = 0
        play(legs, groups, played)
    report_on(report, legs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit status."""
    # Ends what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse(argv, NAME, __doc__, add_flags)
    report = Report(NAME)
    chosen = [name for name in FIGURES if getattr(options.extra, name)]
    if not options.quick and not chosen:
        disagg_figures.pull_vs_push(options, report)
    for name in chosen:
        getattr(disagg_figures, name)(options, report)
    if not chosen:
        measure_designs(options, report)
        if options.quick:
            report.note("pull_vs_push_jct: --pull-vs-push measures it, or the form without --quick")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
