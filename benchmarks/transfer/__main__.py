"""GB/s and microseconds per request of one-sided reads, beside the limits and other transfer engines.

Two processes: the owner of a pool in shared memory, and this one, which reads 1024 blocks per request into
its own. Ours is timed from `transfer` until the bytes are in place and their generations verified; COMPLETE's
acknowledgement follows off that path and is a column of its own. Every size has legs that take turns:

    copy        memcpy of the same pattern inside one process, from and to the same kind of memory: the limit
    shm cma tcp our transports           raw cma, raw tcp: their system calls with nothing around them
    message     KVDirect's baseline (figures 3 and 7a): ids, gather, send, scatter, notify, per 256 KiB buffer
    mooncake    Mooncake's engine over TCP, in a network namespace of its own       nixl    NIXL over UCX

Scattered: random blocks on both sides. Contiguous: one run. All legs write to one destination that was
touched before, and a leg has other blocks each time, so that no cache holds them still: buffers that
alternating legs share must not help some of them. Ours are timed inside an event loop that runs. `coalescing`
rows read small blocks in runs of a given length, with coalescing on and off (KVDirect, figure 17).
`granularity` rows compare MemServe's by-layer, by-request and by-request aggregated (section 5.2).
"""

from __future__ import annotations

import asyncio
import collections
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.lib.common import SEED, Options, Report, Samples, at_least, paired
from benchmarks.transfer import legs
from sglang_ext.disagg.memory import SharedMemory
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transports import TransportName
from sglang_ext.flags import COUNT, flag

KIB = 1024
SIZES = [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 256 * KIB, 1024 * KIB]
TINY_SIZES = SIZES[:4]
BLOCKS = 1024
AIMS = {
    "shm_vs_copy": at_least(0.9),
    "cma_vs_raw": at_least(0.9),
    "tcp_vs_raw": at_least(0.9),
    "shm_vs_message_based_4k_32k": at_least(5.0),
    "shm_vs_mooncake_tcp": at_least(1.0),
    "cma_vs_mooncake_tcp": at_least(1.0),
    "tcp_vs_mooncake_tcp": at_least(1.0),
    "shm_vs_nixl": at_least(1.0),
    "cma_vs_nixl": at_least(1.0),
}
"""Of the worst case over sizes and patterns."""
OURS = ("shm", "cma", "tcp")
RUN_SIZES = [2 * KIB, 4 * KIB, 8 * KIB]
"""Blocks of the rows about coalescing, up to the 8 KiB of KVDirect's example (figure 5)."""
POOLS = sorted({*SIZES, *RUN_SIZES})
SPREAD = 64 << 20
"""Bytes over which a leg's blocks are spread at least, one request after the other: beyond the caches."""
NAMESPACE_VARIABLE = "TRANSFER_BENCHMARK_NETNS"


class Reader:
    """This process's end: one endpoint per transport, all over the same destination pool."""

    def __init__(self, found: dict[str, Any], memory: SharedMemory, lanes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory = memory
        self.found = found
        self.lanes = lanes
        self.instances: dict[str, Instance] = {}
        self.endpoints: list[Endpoint] = []
        self.number = 0
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)

    async def connect(self) -> None:
        """Connect by every transport."""
        for name in OURS:
            config = EndpointConfig(
                "reader",
                "bench",
                transports=(TransportName(name),),
                lanes=self.lanes,
                heartbeat=60.0,
                dead_after=600.0,
                piece_bytes=64 << 20,
            )
            endpoint = await Endpoint.start(config, legs.specs(self.memory, POOLS))
            self.endpoints.append(endpoint)
            self.instances[name] = await endpoint.connect([self.found["control"]])

    def without_coalescing(self, transport: str, leg: Callable[[], None]) -> Callable[[], None]:
        """A leg over the same connection, every block a transaction of its own."""
        queue = self.instances[transport].links[0].peer.queue

        def run() -> None:
            queue.coalescing = False
            try:
                leg()
            finally:
                queue.coalescing = True

        return run

    def offer(self, transport: str, request: str, pool: str) -> Offer:
        """The offer that the owner has published for a transport."""
        instance = self.instances[transport]
        return self.loop.run_until_complete(instance.offer(0, f"{request}/{transport}", pool, 30.0))

    def leg(
        self, transport: str, request: str, pool: str, here: legs.Ids, timed_as: str = ""
    ) -> Callable[[], None]:
        """One request: TRANSFER, and the wait until it has landed and is verified."""
        instance = self.instances[transport]
        offer = self.offer(transport, request, pool)

        async def read() -> None:
            self.number += 1
            name = f"{request}#{self.number}"
            start = time.perf_counter()
            instance.transfer(name, [offer], pool, here)
            await instance.landed(name, 120.0)
            self.seconds[timed_as or transport].append(time.perf_counter() - start)

        return lambda: self.loop.run_until_complete(read())

    def paired(self, running: dict[str, Callable[[], Any]], **how: Any) -> Samples:
        """As `common.paired`; legs that are named for a transport are timed inside the event loop.

        A server's loop runs anyway: starting and stopping it is no part of a transfer.
        """
        self.seconds.clear()
        times = paired(running, **how)
        inside = {n: self.seconds[n][-len(s) :] for n, s in times.seconds.items() if n in self.seconds}
        return Samples({**times.seconds, **inside})

    def complete_us(self, transport: str, request: str, pool: str) -> float:
        """Microseconds that COMPLETE and its acknowledgement take after the bytes have landed."""
        offer = self.offer(transport, request, pool)
        link = self.instances[transport].links[0]

        async def ask() -> float:
            start = self.loop.time()
            await link.complete(request, offer.lease, False, 30.0)
            return (self.loop.time() - start) * 1e6

        return self.loop.run_until_complete(ask())

    async def close(self) -> None:
        """Disconnect."""
        for endpoint in self.endpoints:
            await endpoint.close()


def missing(module: str) -> str | None:
    """Why a peer cannot be measured, None when it can."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return "not installed"
    return None


def own_network() -> bool:
    """Whether this process has a network namespace of its own; enter one by starting again when it can."""
    if os.environ.get(NAMESPACE_VARIABLE) == "1":
        return True
    if missing("mooncake") or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode:
        return False
    command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    os.environ[NAMESPACE_VARIABLE] = "1"
    sys.stdout.flush()
    os.execvp("unshare", [*command, sys.executable, "-m", "benchmarks.transfer", *sys.argv[1:]])


@dataclass(frozen=True, kw_only=True)
class TransferOptions(Options):
    """The flags of this benchmark."""

    kib: tuple[int, ...] = flag((), "Measure only these block sizes, in KiB.", COUNT, several="+")
    lanes: int = flag(1, "Threads per connection.", COUNT.positive())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = TransferOptions.of(argv, "transfer", __doc__)
    report = Report("transfer", AIMS)
    isolated = own_network() if argv is None else False
    peers = {name: missing(name) for name in ("mooncake", "nixl")}
    if not isolated and peers["mooncake"] is None:
        peers["mooncake"] = (
            "it binds every interface, and there is no network namespace (unshare -n) to be had"
        )
    for name, why in peers.items():
        if why:
            report.note(f"{name} left out: {why}")
    every = options.pick(SIZES, quick=SIZES, tiny=TINY_SIZES)
    size = BLOCKS * every[-1]
    command = {
        "bytes": size,
        "sizes": POOLS,
        "lanes": options.lanes,
        "mooncake": peers["mooncake"] is None,
        "nixl": peers["nixl"] is None,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transfer.legs", json.dumps(command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as child:
        try:
            sizes = [k * KIB for k in options.kib] if options.kib else every
            run(report, child, options, size, sizes)
        finally:
            child.kill()
    return report.finish(options)


def run(
    report: Report, child: subprocess.Popen[str], options: TransferOptions, size: int, sizes: list[int]
) -> None:
    """Measure everything against a started owner."""
    assert child.stdout is not None
    line = child.stdout.readline()
    while line and not line.startswith("READY "):
        line = child.stdout.readline()
    found = json.loads(line.removeprefix("READY "))
    # Shared memory on both sides, as the pools are: private memory would have huge pages.
    target, source = SharedMemory(size, "target"), SharedMemory(size, "source")
    target.array[:] = 1
    source.array[:] = np.random.default_rng(SEED).integers(0, 256, size, dtype=np.uint8)
    fixed: dict[str, legs.Leg] = {
        "copy": legs.memory_copy(source.array, target.array),
        "raw cma": legs.raw_cma(found["pid"], found["address"], target.array),
        "raw tcp": legs.raw_sockets(found["raw"], target.array),
        "message": legs.message_based(found["message"], target.array),
    }
    if "nixl" in found:
        fixed["nixl"] = legs.nixl(bytes.fromhex(found["nixl"]), found["address"], target.array)
    if "mooncake" in found:
        fixed["mooncake"] = legs.mooncake(found["mooncake"], found["address"], target.array)
    reader = Reader(found, target, options.lanes)
    reader.loop.run_until_complete(reader.connect())
    try:
        ratios = by_size(report, child, reader, fixed, sizes, options)
        gains = by_fragmentation(report, child, reader, options)
        by_granularity(report, reader, child, options)
    finally:
        reader.loop.run_until_complete(reader.close())
        reader.loop.close()
    report_ratios(report, ratios)
    for name in OURS:
        report.summary[f"coalescing_gain_{name}"] = statistics.median(gains[name])
    # Over shared memory nothing is a transaction: a copy is as fast in parts.
    report.summary["coalescing_gain"] = statistics.median(gains["cma"] + gains["tcp"])


def report_ratios(report: Report, ratios: Mapping[str, Sequence[tuple[float, str]]]) -> None:
    """A row per case, with each ratio and whether it reaches its aim; the summary has the worst case of each,
    so that no median hides one.
    """
    cases = dict.fromkeys(case for found in ratios.values() for _, case in found)
    for case in cases:
        of = {key: ratio for key, found in ratios.items() for ratio, at in found if at == case}
        missed = [key for key, ratio in of.items() if key in AIMS and not AIMS[key].met(ratio)]
        report.add(f"ratios, {case}", **of, missed=", ".join(missed) or "none")
    for key, found in ratios.items():
        report.summary[key], case = min(found)
        report.summary[f"{key}_median"] = statistics.median(ratio for ratio, _ in found)
        report.summary[f"{key}_worst_case"] = case


def publish(child: subprocess.Popen[str], pool: str, request: str, blocks: legs.Ids) -> None:
    """Let the owner publish blocks for every transport."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps([pool, request, blocks.tolist()]) + "\n")
    child.stdin.flush()
    while child.stdout.readline().strip() != "OK":
        if child.poll() is not None:
            raise RuntimeError("the owner process ended")


def by_size(
    report: Report,
    child: subprocess.Popen[str],
    reader: Reader,
    fixed: dict[str, legs.Leg],
    sizes: list[int],
    options: Options,
) -> dict[str, list[tuple[float, str]]]:
    """GB/s per block size and pattern; returns, by key of the summary, each case's ratio and its name."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    rng = np.random.default_rng(SEED)
    for size in sizes:
        total = reader.memory.nbytes // size
        for pattern in ("scattered", "contiguous"):
            sets = min(total // BLOCKS, -(-SPREAD // (BLOCKS * size)))
            if pattern == "scattered":
                shape = (sets, BLOCKS)
                there, here = (rng.permutation(total)[: sets * BLOCKS].reshape(shape) for _ in range(2))
            else:
                there = here = np.arange(total - sets * BLOCKS, total).reshape(sets, BLOCKS)
            pool, requests = f"b{size}", [f"{size}-{pattern}-{i}" for i in range(sets)]
            for request, blocks in zip(requests, there, strict=True):
                publish(child, pool, request, blocks)
            every: dict[str, list[Callable[[], Any]]] = {
                name: [partial(leg, there[i], here[i], size) for i in range(sets)]
                for name, leg in fixed.items()
            }
            for name in OURS:
                every[name] = [reader.leg(name, requests[i], pool, here[i]) for i in range(sets)]
            running = {name: legs.in_turn(steps, i) for i, (name, steps) in enumerate(every.items())}
            big = size >= 256 * KIB
            rounds = options.rounds(9, quick=4) if big else options.rounds(41, quick=9)
            times = reader.paired(running, rounds=rounds, deadline=options.pick(30.0, quick=4.0, tiny=0.5))
            gb = BLOCKS * size / 1e9
            row: dict[str, Any] = {
                f"{name} GB/s": gb / times.median(name)
                for name in ("copy", *OURS, *(n for n in fixed if n != "copy"))
            }
            row |= {f"{name} us": times.median(name) * 1e6 for name in OURS}
            row["ack us"] = statistics.median(reader.complete_us("shm", r, pool) for r in requests)
            case = f"{pattern} {size // KIB} KiB"
            report.add(case, **row)
            of = {
                "shm_vs_copy": times.ratio("copy", "shm"),
                "cma_vs_raw": times.ratio("raw cma", "cma"),
                "tcp_vs_raw": times.ratio("raw tcp", "tcp"),
            }
            for name in OURS:
                if size <= 32 * KIB:
                    of[f"{name}_vs_message_based_4k_32k"] = times.ratio("message", name)
                if "mooncake" in fixed:
                    of[f"{name}_vs_mooncake_tcp"] = times.ratio("mooncake", name)
                if "nixl" in fixed:
                    of[f"{name}_vs_nixl"] = times.ratio("nixl", name)
            for key, ratio in of.items():
                ratios.setdefault(key, []).append((ratio, case))
    return ratios


def by_fragmentation(
    report: Report, child: subprocess.Popen[str], reader: Reader, options: Options
) -> dict[str, list[float]]:
    """The gain of coalescing for small blocks, by the length of contiguous runs (KVDirect, figure 17)."""
    gains: dict[str, list[float]] = {name: [] for name in OURS}
    rng = np.random.default_rng(SEED + 1)
    for size in RUN_SIZES:
        for length in (1, 4, 16, 64, 1024):
            starts = rng.permutation(reader.memory.nbytes // size // length)[: BLOCKS // length]
            ids = (starts[:, None] * length + np.arange(length)[None, :]).reshape(-1)
            request = f"{size}-run{length}"
            publish(child, f"b{size}", request, ids)
            row: dict[str, Any] = {"run blocks": length}
            for name in OURS:
                leg = reader.leg(name, request, f"b{size}", ids)
                off = reader.leg(name, request, f"b{size}", ids, timed_as="off")
                times = reader.paired(
                    {name: leg, "off": reader.without_coalescing(name, off)},
                    rounds=options.rounds(41, quick=15),
                )
                row[f"{name} gain"] = times.ratio("off", name)
                if length > 1:
                    gains[name].append(row[f"{name} gain"])
            report.add(f"coalescing {size // KIB} KiB", **row)
    return gains


def by_granularity(report: Report, reader: Reader, child: subprocess.Popen[str], options: Options) -> None:
    """One request of 16 blocks, 32 layers of K and V of 8 KiB each, as MemServe's section 5.2 moves it.

    by layer: 32 transfers, each waited for; by request: 1024 small pieces at once; aggregated: 16 pieces of
    512 KiB, packed by the owner beforehand as the DRAM arena has them.
    """
    rng = np.random.default_rng(SEED + 2)
    small = np.arange(BLOCKS).reshape(16, 64).T.reshape(-1) * 7 % (reader.memory.nbytes // (8 * KIB))
    wide = rng.permutation(reader.memory.nbytes // (256 * KIB))[:32]
    publish(child, "b8192", "request", small)
    publish(child, "b262144", "aggregated", wide)
    for part in range(32):
        publish(child, "b8192", f"layer{part}", small[part * 32 : part * 32 + 32])
    for name in OURS:
        layers = [reader.leg(name, f"layer{i}", "b8192", small[i * 32 : i * 32 + 32]) for i in range(32)]
        times = paired(
            {
                "by layer": partial(legs.one_by_one, layers),
                "by request": reader.leg(name, "request", "b8192", small),
                "aggregated": reader.leg(name, "aggregated", "b262144", wide),
            },
            rounds=options.rounds(31, quick=9),
        )
        report.add(
            f"granularity {name}",
            **{f"{k} us": times.median(k) * 1e6 for k in ("by layer", "by request", "aggregated")},
            aggregated_vs_by_request=times.ratio("by request", "aggregated"),
        )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the peers' libraries crash in their destructors
