"""Roles that change by themselves (KVDirect, section 7): three servers under a load that shifts from long
prompts to long answers, as one prefill and two decode servers, the other way round, and with a controller.

One set of servers is played three times, each time behind a router of its own. Requests arrive as a Poisson
process, the same each time, at a share of the capacity of the split that suits each load, measured first.
Decode generates for a few requests at a time, as where memory is short: on two cores that all servers share,
a second decode server would else be of no use.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.disagg.figures import Load
from benchmarks.disagg.loads import FIRST_ID, LAST_ID
from benchmarks.disagg.servers import Asked, Group, ask, pair, routed, running
from benchmarks.lib.common import SEED, Options, Report, Value, percentile
from benchmarks.lib.plots import Axis, bars
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.protocol.cluster import instance_path
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.ports import free_port

SHARE = 0.8
"""Shares of the capacity of the split that suits a load."""
LANES = 8
"""Requests under way while that is measured."""
DWELL_S = 8.0
AT_A_TIME = 3
"""Requests that a decode server generates for."""
ROLES = {"1P2D": ("prefill", "decode", "decode"), "2P1D": ("prefill", "prefill", "decode")}
"""Roles of the servers, by split."""
ONE_PREFILL, ONE_DECODE = ROLES
CONTROLLED = "controller"
HALVES = ("long prompts", "long answers")


def roles(options: Options, report: Report, until: float = math.inf) -> None:
    """Rows of each way to set roles and of each half of the load. until: by `time.monotonic`; no further way
    is begun then."""
    seconds = options.rounds(60, quick=20), options.rounds(120, quick=45)
    prompts, answers = Load(768, 8, 0), Load(64, options.rounds(160, quick=96), 0)
    port = free_port()
    flags = (
        *("--kv-router", f"http://{LOOPBACK}:{port}", "--enable-pd-role-switch"),
        *("--max-running-requests", str(AT_A_TIME)),
    )
    with running({"all": pair(*flags, prefill=1, decode=2, own_ports=True)}) as groups:
        group, rates = groups["all"], []
        for load, split in ((prompts, ONE_DECODE), (answers, ONE_PREFILL)):
            with _router(group, port, split):
                rates.append(SHARE * _capacity(group, load))
        report.note(f"{rates[0]:.2f} requests/s with long prompts, then {rates[1]:.2f} with long answers")
        for name in (CONTROLLED, ONE_PREFILL, ONE_DECODE):
            if time.monotonic() > until:
                report.note(f"{name} was left out: --minutes are over")
                continue
            controls = ("--role-controller", f"on,dwell={DWELL_S}")
            more = controls if name == CONTROLLED else ()
            group.flush()
            with _router(group, port, ONE_PREFILL if name == CONTROLLED else name, *more):
                halves = asyncio.run(_play(group, (prompts, answers), rates, seconds))
                changes = _cluster(group)["roles"]["changes"] if name == CONTROLLED else []
            for case, asked in zip(HALVES, halves, strict=True):
                _row(report, case, name, asked)
            _row(report, "both", name, [one for half in halves for one in half])
            for change in reversed(changes):
                report.note(
                    f"the controller: {change['instance']} to {change['role']}, {change['outcome']} after "
                    f"{change['took_s']:.1f} s, {change['ago_s']:.0f} s before the end {change['text']}"
                )


def figure(rows: Sequence[Mapping[str, Value]]) -> str:
    """As an SVG: seconds to the first token and per 100 further ones, by half of the load and way."""
    found = {(row["case"], row["design"]): row for row in rows if str(row["case"]).startswith("roles, ")}
    halves = [f"roles, {half}" for half in HALVES]
    groups, series = [], {name: list[float | None]() for name in (ONE_PREFILL, ONE_DECODE, CONTROLLED)}
    for half in halves:
        for column, scale, text in (
            ("ttft_p50_ms", 1e-3, "TTFT p50"),
            ("ttft_p99_ms", 1e-3, "TTFT p99"),
            ("tpot_p50_ms", 0.1, "100 x TPOT p50"),
        ):
            groups.append(f"{half.removeprefix('roles, ')}: {text}")
            for name, values in series.items():
                row = found.get((half, name))
                values.append(None if row is None else scale * float(str(row[column])))
    return bars("Fixed roles, and roles that change with the load", Axis("seconds"), groups, series)


@contextmanager
def _router(group: Group, port: int, split: str, *flags: str) -> Iterator[None]:
    """A router before the servers, which have the roles of a split."""
    with (
        tempfile.TemporaryDirectory(prefix="disagg-routers-") as folder,
        routed(group, Path(folder), port=port, flags=("--policy", "cost", *flags)),
    ):
        wait_until(lambda: len(_there(group)) == 3, seconds=60, what="all servers to register")
        _set_roles(group, split)
        yield


def _set_roles(group: Group, split: str) -> None:
    wanted = dict(zip([server.url for server in group.servers], ROLES[split], strict=True))
    # Servers take the prefill role before others take decode: neither role is left without a server.
    for role in ("prefill", "decode"):
        for instance in _there(group):
            if wanted[instance["url"]] == role != instance["role"]:
                _call(group, "POST", instance_path(instance["instance"], "role"), {"role": role})


def _there(group: Group) -> list[dict[str, Any]]:
    return [one for one in _cluster(group)["instances"] if one["usable"] and one["registered"]]


def _cluster(group: Group) -> Any:
    return _call(group, "GET", "/cluster")


def _call(group: Group, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(group.router + path, data, method=method)
    with urllib.request.urlopen(request, timeout=180) as answer:
        return json.load(answer)


def _capacity(group: Group, load: Load) -> float:
    """Requests per second with `LANES` of them always under way."""
    rng = random.Random(SEED + 1)

    async def lane(count: int) -> None:
        for _ in range(count):
            await ask(group, _prompt(rng, load), load.answer, 0, by_router=True)

    async def all_lanes() -> None:
        await asyncio.gather(*(lane(2) for _ in range(LANES)))

    asyncio.run(lane(3))
    begin = time.perf_counter()
    asyncio.run(all_lanes())
    return 2 * LANES / (time.perf_counter() - begin)


async def _play(
    group: Group, loads: Sequence[Load], rates: Sequence[float], seconds: Sequence[float]
) -> list[list[Asked]]:
    """Each load for so long, one after the other without a break; answers by load."""
    rng = random.Random(SEED)
    tasks: list[list[asyncio.Task[Asked]]] = []
    for load, rate, length in zip(loads, rates, seconds, strict=True):
        tasks.append([])
        end = time.monotonic() + length
        while (gap := rng.expovariate(rate)) < end - time.monotonic():
            await asyncio.sleep(gap)
            asked = ask(group, _prompt(rng, load), load.answer, 0, by_router=True)
            tasks[-1].append(asyncio.create_task(asked))
    return [await asyncio.gather(*half) for half in tasks]


def _prompt(rng: random.Random, load: Load) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(load.prompt)]


def _row(report: Report, case: str, name: str, asked: Sequence[Asked]) -> None:
    ttft, tpot = [one.ttft * 1e3 for one in asked], [one.tpot * 1e3 for one in asked]
    jct = [one.jct * 1e3 for one in asked]
    report.add(
        f"roles, {case}",
        design=name,
        ttft_p50_ms=percentile(ttft, 50),
        ttft_p99_ms=percentile(ttft, 99),
        tpot_p50_ms=percentile(tpot, 50),
        tpot_p99_ms=percentile(tpot, 99),
        jct_p50_ms=percentile(jct, 50),
        jct_p99_ms=percentile(jct, 99),
        requests=len(asked),
    )
