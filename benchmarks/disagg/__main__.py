"""Costs and savings of prefill and decode apart, by the side that keeps KV: MemServe's designs beside one
server.

Each turn of each session is asked of every design, in an order that changes, so that what disturbs the
machine disturbs all of them. The prompts are the first design's (the answers of a server that finds nothing
are the truth), so that every design computes the same, and every token is compared. The peer is SGLang's own
hand-over with mooncake_tcp, behind its own router where that is installed.

A run takes `--minutes`; sessions that would not fit are not begun. `--designs`, `--loads` and `--sessions`
choose, so that the whole can be had in several runs.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.disagg import elsewhere, split
from benchmarks.disagg import figures as disagg_figures
from benchmarks.disagg.loads import LOADS, Session, Size, sessions
from benchmarks.disagg.loads import Turn as Said
from benchmarks.disagg.report import Leg, Turn, complete_summary, report_on
from benchmarks.disagg.roles import figure, roles
from benchmarks.disagg.servers import (
    COLOCATED,
    DESIGNS,
    LATE_DESIGN,
    ROUTED,
    STOCK,
    STOCK_DESIGN,
    STOCK_LATE,
    STOCK_ROUTED,
    TRUTH,
    AskError,
    Group,
    GroupSpec,
    ask,
    mooncake_missing,
    pair,
    routed,
    running,
    stock,
)
from benchmarks.lib.common import SEED, Options, Report, at_most
from benchmarks.lib.data import data_flag, data_folder
from benchmarks.lib.quiet import undisturbed
from benchmarks.router.processes import peer_missing
from sglang_ext.errors import ConfigError
from sglang_ext.flags import flag

NAME = "disagg"
AIMS = {
    "wrong_answers": at_most(0),
    "ttft_c3_vs_c1_turn3": at_most(0.6),
    "jct_c3_vs_basic": at_most(1.0),
    "ttft_c3_vs_stock_mooncake_tcp": at_most(0.8),
    "ttft_new_pair_vs_warm": at_most(1.1),
    split.FIGURE: at_most(0.8),
    elsewhere.FETCHED: at_most(0.6),
    elsewhere.SPILLED: at_most(0.7),
}
FIGURES = ("pull_vs_push", "layers", "xpyd", "joins", "coalescing")
ALL = {design.name: design for design in (*DESIGNS, ROUTED, STOCK_ROUTED, STOCK_DESIGN, LATE_DESIGN)}
TIE = 1e-4
"""How close two log probabilities are between which rounding may decide."""
SECONDS_FOR_PUSH = 110.0
"""Seconds for pull against push at the end of the default form."""


def play(
    legs: Sequence[Leg], groups: Mapping[str, Group], played: Sequence[Session], until: float = float("inf")
) -> None:
    """Every session, turn by turn, on every design.

    Args:
        until: by `time.monotonic`; sessions that would take longer, judged by earlier sessions of their load,
            are left out.
    """
    rng = random.Random(SEED)
    took: dict[str, float] = {}
    for servers in {leg.design.servers for leg in legs}:  # others may have ended in the warm-up
        groups[servers].flush()
    for name, session in enumerate(played):
        begin = time.monotonic()
        if begin + took.get(session.load, 0.0) > until:
            continue
        history = list(session.first)
        for number, said in enumerate(session.turns, 1):
            prompt = [*history, *said.added]
            order = [legs[0], *rng.sample(legs[1:], len(legs) - 1)]
            expected: list[int] | None = None
            for leg in order:
                got = _turn(leg, groups, rng, f"{name}", session, number, said, prompt)
                expected = expected or got
                if got != expected and not _tie(groups[legs[0].design.servers], prompt, expected, got):
                    sys.stderr.write(f"wrong answer of {leg.design.name}: {got} instead of {expected}\n")
                    leg.wrong += 1
                seen = leg.turns[-1]
                sys.stderr.write(
                    f"{session.load} {number} {leg.design.name}: {seen.cached} of {seen.prompt} cached, "
                    f"ttft {seen.ttft * 1e3:.0f} ms, jct {seen.jct * 1e3:.0f} ms\n"
                )
            assert expected is not None
            if session.grows:
                history = [*prompt, *expected]
        took[session.load] = max(took.get(session.load, 0.0), time.monotonic() - begin)


def _turn(
    leg: Leg,
    groups: Mapping[str, Group],
    rng: random.Random,
    name: str,
    session: Session,
    number: int,
    said: Said,
    prompt: Sequence[int],
) -> list[int]:
    design = leg.design
    group = groups[design.servers]
    before = group.read_bytes()
    bootstrap_room = rng.randrange(1, 1 << 62)
    found = asyncio.run(
        ask(group, prompt, said.answer, bootstrap_room, design.keys(name, number), by_router=design.routed)
    )
    group.settle()
    leg.turns.append(
        Turn(
            session.load,
            name,
            number,
            len(prompt),
            len(said.added),
            found.ttft,
            found.jct,
            found.tpot,
            found.cached,
            group.read_bytes() - before,
            found.stages,
        )
    )
    return found.tokens


def _tie(truth: Group, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> bool:
    """Whether rounding decided the first difference of two answers; the tokens after it have no meaning then.
    The server that finds nothing is asked once more, with log probabilities.
    """
    if len(got) != len(expected):
        return False
    place = next(at for at, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
    again = asyncio.run(ask(truth, prompt, place + 1, 0, ("", f"tie/{place}/{len(prompt)}"), margins=True))
    return again.margins[place] <= TIE


@dataclass(frozen=True, kw_only=True)
class DisaggOptions(Options):
    """The measurements to run."""

    data: str | None = data_flag()
    mooncake: Path | None = flag(
        None,
        "Where `pip install --no-deps --target FOLDER mooncake-transfer-engine-non-cuda` was run, to measure "
        "stock SGLang with mooncake_tcp too.",
        metavar="FOLDER",
    )
    sglang_router_python: Path | None = flag(
        None,
        "Interpreter of an environment with sglang-router==0.3.2, to put it in front of stock SGLang.",
        metavar="PYTHON",
    )
    designs: str | None = flag(
        None, f"Only these, of {', '.join(ALL)}; {TRUTH} is always asked.", metavar="A,B"
    )
    loads: str | None = flag(None, f"Only these, of {', '.join(LOADS)}.", metavar="A,B")
    sessions: int | None = flag(None, "Of each load at most.")
    minutes: float = flag(9.0, "How long a run may take, about; fewer sessions or rounds are played in less.")
    pull_vs_push: bool = flag(False, "Only compare pull with push (KVDirect, figure 16).")
    layers: bool = flag(False, "Only compare by layer, by request and aggregated (MemServe 12).")
    coalescing: bool = flag(False, "Only compare with and without coalescing (KVDirect, figure 17).")
    xpyd: bool = flag(False, "Only compare numbers of servers (KVDirect, figure 12).")
    roles: bool = flag(
        False, "Only compare fixed roles with ones that change with the load (KVDirect, section 7)."
    )
    figure: Path | None = flag(None, "With --roles: where to write it as a figure (SVG).", metavar="FILE")
    split: bool = flag(
        False,
        "Only compare a long prompt on one instance with a prompt that two compute (MemServe, table 3).",
    )
    fetching: bool = flag(
        False, "Only compare fetching with computing where a session moves between prefill servers."
    )
    spilling: bool = flag(
        False, "Only compare a server whose evicted KV an idle one keeps with one by itself (KVDirect, 7)."
    )
    joins: bool = flag(False, "Only compare the first request through a new pair with later ones.")


def chosen(given: str | None, known: Sequence[str], field: str) -> list[str]:
    """The names of a list on the command line, in the order in which they are known.

    Raises:
        ConfigError: one is unknown.
    """
    if given is None:
        return list(known)
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no {name!r}", field=field, hint=f"Choose from {', '.join(known)}")
    return [name for name in known if name in names]


class Designs:
    """The default form: loads by design."""

    def __init__(self, options: DisaggOptions, report: Report) -> None:
        self.report = report
        self.why: dict[str, str] = {}
        """Why keys of the summary are null."""
        self.legs: list[Leg] = []
        self._peer_python = options.sglang_router_python
        self._specs: dict[str, GroupSpec] = {"colocated": COLOCATED, "pull": pair()}
        names = chosen(options.designs, list(ALL), "--designs")
        missing, router_missing = mooncake_missing(options.mooncake), peer_missing(self._peer_python)
        reason = f"stock SGLang with mooncake_tcp {missing}" if missing else ""
        if missing is None:
            self._specs[STOCK] = stock(options.mooncake)
            self._specs[STOCK_LATE] = stock(options.mooncake, late=True)
            if router_missing is not None:
                report.note(f"no router in front of stock SGLang or of ours: sglang-router {router_missing}")
        for key in ("ttft_c3_vs_stock_mooncake_tcp", "jct_c3_vs_stock_mooncake_tcp"):
            if reason:
                self.why[key] = reason
        designs = []
        for name in names:
            design = ALL[name]
            if design.servers in (STOCK, STOCK_LATE) and missing is not None:
                continue
            if design is LATE_DESIGN and options.designs is None:
                continue  # two more servers, for a configuration that is not SGLang's default
            if design.routed and (router_missing is not None or missing is not None):
                continue
            if design is STOCK_DESIGN and options.designs is None and router_missing is None:
                # Behind its router is how it is used; without, it is measured when asked for.
                continue
            designs.append(design)
        if ALL[TRUTH] not in designs:
            designs.insert(0, ALL[TRUTH])
        self.designs = designs
        used = {design.servers for design in designs}
        self._specs = {name: spec for name, spec in self._specs.items() if name in used}
        self.size = Size(*options.pick((5, 256, 128, 2000), quick=(4, 64, 64, 1000), tiny=(3, 32, 8, 200)))
        loads = chosen(options.loads, list(LOADS), "--loads")
        count = options.sessions or options.rounds(4, quick=1)
        self.played = sessions(data_folder(options.data), count, self.size, loads)

    def run(self, until: float) -> None:
        """Measure; the results so far are in `legs`, also after an exception."""
        with running(self._specs) as groups, ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-routers-")))
            for name, python in (("pull", None), (STOCK, self._peer_python)):
                if any(design.routed and design.servers == name for design in self.designs):
                    stack.enter_context(routed(groups[name], folder, python))
            self._warm_up(groups)
            self.report.note(f"a core was ours for {undisturbed():.0%} of the time when sessions began")
            play(self.legs, groups, self.played, until)

    def conditions(self) -> str:
        """The played sessions, in words."""
        played = len({(turn.load, turn.session) for leg in self.legs for turn in leg.turns})
        return (
            f"{played} of {len(self.played)} sessions of at most {self.size.turns} turns, one request at a "
            f"time; questions are cut at {self.size.question} tokens (observations at twice that), answers "
            f"at {self.size.answer}, documents and few-shot prefixes at {self.size.document}; designs basic "
            "to 3 share a pair of servers"
        )

    def _warm_up(self, groups: Mapping[str, Group]) -> None:
        """Play one session, so that nothing is compiled or connected in timed turns; leaves out designs that
        cannot serve."""
        warm = Session("sharegpt", [7] * 300, (Said([8] * 40, 4), Said([9] * 40, 4)))
        legs = [Leg(design) for design in self.designs]
        play([leg for leg in legs if groups[leg.design.servers].ours], groups, [warm])
        for leg in [leg for leg in legs if not groups[leg.design.servers].ours]:
            try:
                play([legs[0], leg], groups, [warm])
            except (AskError, httpx.HTTPError) as error:  # a server that ended leaves an HTTPError
                reason = f"{leg.design.name} was left out: {str(error).splitlines()[0]}"
                self.report.note(reason)
                ends = groups[leg.design.servers].log_ends()
                sys.stderr.write(f"{leg.design.name}: {error}\n{ends}\n")
                leg.turns.clear()
        self.legs = [Leg(leg.design) for leg in legs if leg.turns]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit status."""
    begin = time.monotonic()
    options = DisaggOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    figures = [name for name in FIGURES if getattr(options, name)]
    alone = options.roles or options.split or options.fetching or options.spilling
    designs = None if figures or alone else Designs(options, report)
    # End every process that was started, and report the results so far.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    whole = options.designs is None and options.loads is None and not options.quick
    end = begin + 60 * options.minutes
    try:
        for name in figures:
            getattr(disagg_figures, name)(options, report, end)
        if options.split:
            split.split(options, report, end)
        if options.fetching:
            elsewhere.fetching(options, report, end)
        if options.spilling:
            elsewhere.spilling(options, report, end)
        if options.roles:
            roles(options, report, end)
            if options.figure is not None:
                options.figure.write_text(figure(report.rows), encoding="utf-8")
        if designs is not None:
            designs.run(end - SECONDS_FOR_PUSH * whole)
            if whole:
                disagg_figures.pull_vs_push(options, report, end, short=True)
    except KeyboardInterrupt:
        report.note("interrupted: only the measurements until then")
    finally:
        signal.signal(signal.SIGTERM, before)
    why = designs.why if designs is not None else {}
    if designs is not None:
        report.note(designs.conditions())
        report_on(report, designs.legs)
    complete_summary(
        report,
        {
            "pull_vs_push_jct": "--pull-vs-push measures it, or the form without choices",
            "ttft_new_pair_vs_warm": "--joins measures it",
            split.FIGURE: "--split measures it",
            elsewhere.FETCHED: "--fetching measures it",
            elsewhere.SPILLED: "--spilling measures it",
        }
        | why,
    )
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
