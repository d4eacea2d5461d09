"""KV that is on another instance than the chosen one: fetched from there, or computed again.

`fetching`: two prefill servers and a decode server, under a policy by which a session moves between the
prefill servers (MemServe, equation 2). Its second turn is asked under its own name, so that the KV is read
from its holder, and under another, so that all is computed.

`spilling`: one of two servers is asked everything, more than its DRAM holds; the other one is idle (KVDirect,
section 7). One router has its DRAM used, one has not.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks.disagg.loads import FIRST_ID, LAST_ID
from benchmarks.disagg.servers import Asked, Group, GroupSpec, ask, routed, running
from benchmarks.lib.common import SEED, Options, Report
from benchmarks.tiers.servers import WrongTierError
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.router.policies import Costs, Decision, Fleet, Matches, PolicyOptions, Prompt, Reason
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.ports import free_port

FETCHED, SPILLED = "ttft_2p1d_fetched_vs_computed", "ttft_spilled_vs_not"
LENGTHS = (1024, 4096)
ADDED, ANSWER = 64, 4
PAUSE_S = 0.7
"""After a turn: the router receives placement events, and looks twice a second for full instances."""
SESSIONS, PREFIX = 8, 1024
"""Of `spilling`: more than the five that one server's DRAM holds, and less than that of both."""
DRAM, FOR_OTHERS = "22020096", "18874368"
SPILLED_FROM = 2
"""The turn from which it may be of use: a conversation is spilled when it was continued once."""


def first_by_name(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """A policy: one server is asked everything."""
    return Decision(min(known.name for known in fleet), Reason.LEAST_LOAD)


@contextmanager
def _behind(spec: GroupSpec, routers: Mapping[str, tuple[str, ...]]) -> Iterator[dict[str, Group]]:
    """Servers, behind a router for each of these names and flags."""
    ports = {name: free_port() for name in routers}
    urls = [word for port in ports.values() for word in ("--kv-router", f"http://{LOOPBACK}:{port}")]
    with running({"all": replace(spec, flags=(*spec.flags, *urls))}) as started, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-routers-")))
        groups = {name: replace(started["all"]) for name in routers}
        for name, group in groups.items():
            stack.enter_context(routed(group, folder, port=ports[name], flags=routers[name]))
        wait_until(
            lambda: all(group.registered() == len(group.servers) for group in groups.values()),
            seconds=60,
            what="all servers to register",
        )
        yield groups


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def _ask(group: Group, prompt: list[int], name: str) -> Asked:
    found = asyncio.run(ask(group, prompt, ANSWER, 0, (name, name), by_router=True))
    group.settle()
    time.sleep(PAUSE_S)
    return found


def _moved_tokens(group: Group) -> float:
    """Tokens that instances have fetched, as reported to the router before them."""
    text = httpx.get(f"{group.router}/metrics", timeout=30, trust_env=False).text
    name = "sglang_ext_router_fetched_tokens_total "
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


def fetching(options: Options, report: Report, until: float = math.inf) -> None:
    """Rows of each length, fetched and computed. until: by `time.monotonic`; rounds that would begin later
    are left out, except for the first one."""
    lengths = (256, 512) if options.tiny else LENGTHS
    rounds = options.rounds(7, quick=3)
    rng, wrong = random.Random(SEED), 0
    seen: dict[tuple[int, str], list[Asked]] = {}
    spec = GroupSpec(
        2,
        1,
        (
            *("--kv-pd-caching", "2", "--kv-dram-size", "512MB", "--enable-cache-report"),
            *("--kv-load-policy", "always", "--chunked-prefill-size", "8192"),
        ),
    )
    with _behind(spec, {"router": ("--policy", "least-load")}) as groups:
        group = groups["router"]
        for number in range(-1, rounds):  # the first, in which servers connect and compile, is not counted
            for length in lengths:
                # So that the first turn makes one of them the fuller, and the second goes to the other.
                group.flush()
                time.sleep(PAUSE_S)
                prompt = _tokens(rng, length)
                said = [*prompt, *_ask(group, prompt, f"{number}/{length}").tokens, *_tokens(rng, ADDED)]
                before = _moved_tokens(group)
                names = {"fetched": f"{number}/{length}", "computed": f"{number}/{length}/other"}
                # In this order: the computed KV makes the second server the fuller one.
                found = {leg: _ask(group, said, name) for leg, name in names.items()}
                moved = _moved_tokens(group) - before
                if moved < length:
                    raise WrongTierError(f"of {length} tokens {moved:.0f} were fetched")
                if number >= 0:
                    wrong += found["fetched"].tokens != found["computed"].tokens
                    for leg, asked in found.items():
                        seen.setdefault((length, leg), []).append(asked)
            if time.monotonic() > until and number >= 0:
                report.note(f"{number + 1} rounds of {rounds}: --minutes are over")
                break
    for length in lengths:
        ratios = _compared(report, f"{length} tokens", seen[length, "computed"], seen[length, "fetched"])
        report.summary[FETCHED] = statistics.median(ratios)
    report.summary["wrong_answers"] = wrong


def _compared(report: Report, row: str, computed: list[Asked], fetched: list[Asked]) -> list[float]:
    """Rows of both; the ratios of the TTFTs."""
    ratios = [two.ttft / one.ttft for one, two in zip(computed, fetched, strict=True)]
    for name, found in (("computed", computed), ("fetched", fetched)):
        report.add(
            row,
            by=name,
            ttft_median_ms=statistics.median(one.ttft for one in found) * 1e3,
            ttft_least_ms=min(one.ttft for one in found) * 1e3,
            ttft_most_ms=max(one.ttft for one in found) * 1e3,
            cached_tokens=statistics.median(one.cached for one in found),
            ratio=statistics.median(ratios) if name == "fetched" else 1.0,
            requests=len(found),
        )
    return ratios


def spilling(options: Options, report: Report, until: float = math.inf) -> None:
    """Rows with and without: the share of prompts that was found, and TTFT, of the turns from SPILLED_FROM
    on. until: by `time.monotonic`; turns that would begin later are left out."""
    turns = SPILLED_FROM + options.rounds(4, quick=1)
    spec = GroupSpec(
        0,
        2,
        (
            *("--radix-cache-backend", "global", "--kv-dram-size", f"{DRAM},for-others={FOR_OTHERS}"),
            *("--max-total-tokens", "4096", "--chunked-prefill-size", "4096", "--enable-cache-report"),
            *("--kv-load-policy", "always"),
        ),
    )
    policy = ("--policy", f"{__name__}:first_by_name")
    routers = {"without": (*policy, "--tenant-limits", "spill-blocks=0"), "spilling": policy}
    seen: dict[str, list[Asked]] = {}
    said: dict[str, list[list[int]]] = {}
    shares: dict[str, float] = {}
    with _behind(spec, routers) as groups:
        for leg, group in groups.items():
            rng = random.Random(SEED)
            group.flush()
            talks = [_tokens(rng, PREFIX) for _ in range(SESSIONS)]
            found: list[Asked] = []
            asked_for = 0
            for turn in range(turns):
                for number, talk in enumerate(talks):
                    asked = _ask(group, talk, f"{leg}/{number}")
                    said.setdefault(leg, []).append(asked.tokens)
                    if turn >= SPILLED_FROM:
                        found.append(asked)
                        asked_for += len(talk)
                    talk += [*asked.tokens, *_tokens(rng, ADDED)]
                if time.monotonic() > until and turn >= SPILLED_FROM:
                    report.note(f"{leg}: {turn + 1} turns of {turns}: --minutes are over")
                    break
            seen[leg] = found
            shares[leg] = sum(one.cached for one in found) / asked_for
    for leg, found in seen.items():
        report.add(
            leg,
            hit_share=shares[leg],
            ttft_median_ms=statistics.median(one.ttft for one in found) * 1e3,
            ttft_mean_ms=statistics.fmean(one.ttft for one in found) * 1e3,
            requests=len(found),
        )
    with_, without = (statistics.fmean(one.ttft for one in seen[leg]) for leg in ("spilling", "without"))
    report.summary[SPILLED] = with_ / without
    pairs = zip(said["without"], said["spilling"], strict=False)
    report.summary["wrong_answers"] = sum(one != other for one, other in pairs)
