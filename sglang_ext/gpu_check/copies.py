"""Step 3: the mover between the GPU's pool and pinned DRAM: bytes, order, speed, its cost to a pass.

Step 2, the limits, comes with it: everything is compared with plain copies on the same card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sglang_ext.cluster.doctor.findings import Finding, Level
from sglang_ext.engine.gpu_link import Link, in_words
from sglang_ext.engine.movers.cuda_mover import CudaMover
from sglang_ext.engine.movers.layer_copies import Blocks, HostArena
from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.movers.row_copies import RowCopies
from sglang_ext.patches.adapter.hbm import load_by_sglang, pool_geometry
from sglang_ext.tiered_store.dram.arena import DramArena

LEAST_SHARE = 0.85
"""Of a plain copy's rate, for loads and writes."""
MOST_HOST_MS = 2.0
"""Of the scheduler's thread for 8192 tokens."""
MOST_SLOWER = 0.05
"""Of a matrix product beside a load."""
BUSY_CYCLES = 200_000_000
"""For which a stream is kept busy to see which calls wait for it: a tenth of a second."""


@dataclass(frozen=True)
class Shape:
    """Of a pool. planes: (heads, head size) of each plane of a layer."""

    name: str
    planes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    layers: int = 3


SHAPES = (
    Shape("MHA bfloat16", ((8, 128), (8, 128)), torch.bfloat16),
    Shape("one KV head", ((1, 128), (1, 128)), torch.bfloat16),
    Shape("MLA", ((1, 576),), torch.bfloat16),
    Shape("FP8", ((8, 128), (8, 128)), torch.float8_e4m3fn),
)
MODEL = Shape("8B", ((8, 128), (8, 128)), torch.bfloat16, layers=32)
PAGES = (1, 16, 64)


class SglangsKernel(RowCopies):
    """Loads by SGLang's kernel for layouts such as the arena's: the other candidate for a server's loads. Of
    the two, the slower one is to be removed once GPUs have measured them."""

    def __init__(self, planes: list[list[torch.Tensor]], arena: HostArena, *rest: Any) -> None:
        super().__init__(planes, arena, *rest)
        layout = arena.layout
        shape = arena.n_blocks, layout.n_layers, len(planes[0]), layout.block_tokens, planes[0][0].shape[1]
        self._blocks = torch.from_numpy(arena.blocks).view(planes[0][0].dtype).view(shape)
        self._pool = planes
        self._of: tuple[torch.Tensor | None, torch.Tensor | None] = None, None

    def load(self, slots: torch.Tensor, blocks: Blocks, layer: int, place: int) -> None:
        if self._of[0] is not blocks.on_device:
            first = blocks.on_device[:, None] * self._blocks.shape[3]
            within = torch.arange(self._blocks.shape[3], device=slots.device)
            self._of = blocks.on_device, (first + within).view(-1)
        load_by_sglang(self._pool[place], self._blocks, self._of[1], slots, layer)


@dataclass
class Bench:
    """A pool, an arena beside it, and the stream of the passes."""

    planes: list[list[torch.Tensor]]
    arena: DramArena
    forward: torch.cuda.Stream
    page: int

    def mover(
        self, forward: torch.cuda.Stream | None = None, by_kernel: type[RowCopies] = RowCopies
    ) -> CudaMover:
        return CudaMover(self.planes, self.arena, forward or self.forward, by_kernel)

    def slots(self, tokens: int, seed: int) -> torch.Tensor:
        """Whole pages of the lower or upper half of the pool (by an even or odd seed), in any order."""
        half = self.planes[0][0].shape[0] // 2
        pages = np.random.default_rng(seed).permutation(half // self.page)[: tokens // self.page]
        rows = pages[:, None] * self.page + np.arange(self.page)
        return torch.from_numpy(rows.reshape(-1) + (seed % 2) * half).to("cuda")

    def blocks(self, tokens: int, *, scattered: bool) -> BlockIds:
        count = tokens // self.arena.layout.block_tokens
        found = np.arange(self.arena.n_blocks)[:count]
        if not scattered:
            return found
        return np.random.default_rng(5).permutation(self.arena.n_blocks)[:count]

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Bytes of all planes at some slots, one after the other."""
        taken = [
            plane.view(torch.uint8).view(plane.shape[0], -1)[slots] for la in self.planes for plane in la
        ]
        return torch.cat(taken, 1)


@contextmanager
def bench(shape: Shape, tokens: int, page: int, block: int = 16) -> Iterator[Bench]:
    """A pool of twice so many tokens, and an arena for twice as many."""
    planes = [
        [torch.randn(2 * tokens, *plane, device="cuda").to(shape.dtype) for plane in shape.planes]
        for _ in range(shape.layers)
    ]
    layout = pool_geometry(
        planes,
        block_tokens=max(block, page),
        page_tokens=page,
        first_layer=0,
        model_layers=shape.layers,
        tp_rank=0,
        tp_size=1,
        model_kv_heads=shape.planes[0][0],
    ).layout
    count = 2 * tokens // layout.block_tokens
    with DramArena(layout, count * (layout.block_bytes + 8), name="gpu-check") as arena:
        yield Bench(planes, arena, torch.cuda.Stream(), page)


def kept(
    of: Bench,
    tokens: int,
    *,
    scattered: bool,
    damage: bool = False,
    by_kernel: type[RowCopies] = RowCopies,
) -> bool:
    """Whether KV is the same after it went to DRAM, was erased, and came back to other slots, while kernels
    run on the stream of the passes. damage: change a byte in DRAM meanwhile, which has to be seen."""
    source, target = of.slots(tokens, 0), of.slots(tokens, 1)
    mover, blocks = of.mover(by_kernel=by_kernel), of.blocks(tokens, scattered=scattered)
    before = of.rows(source).clone()
    with torch.cuda.stream(of.forward):
        torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
    mover.write(source, blocks)
    mover.settle()
    if damage:
        of.arena.blocks[int(blocks[-1]), 3] ^= 1
    for layer in of.planes:
        for plane in layer:
            plane.view(torch.uint8).zero_()
    mover.load(target, blocks)
    mover.settle()
    torch.cuda.synchronize()
    same = bool(torch.equal(of.rows(target), before))
    mover.close()
    return same


def bytes_kept(tokens: int = 512) -> Iterator[Finding]:
    """A finding for each shape, over pages and orders."""
    for shape in SHAPES:
        wrong = []
        for page in PAGES:
            with bench(shape, tokens, page) as of:
                for scattered in (False, True):
                    if not kept(of, tokens, scattered=scattered):
                        wrong.append(f"page {page}, {'scattered' if scattered else 'in order'}")
                if kept(of, tokens, scattered=True, damage=True):
                    wrong.append(f"page {page}: a damaged byte went unseen")
        yield (
            Finding(Level.PROBLEM, "bytes", f"{shape.name}: changed on the way: {'; '.join(wrong)}", REPORT)
            if wrong
            else Finding(Level.OK, "bytes", f"{shape.name}: the same after DRAM, pages of {PAGES}")
        )


REPORT = "Serve with --kv-dram-size 0, and report this with the output of --json"


def orders() -> Iterator[Finding]:
    """Whether copies keep their order with the passes; each beside its twin, which must not."""
    with bench(SHAPES[0], 256, 1) as of:
        for name, check in (("load after the pass", _load_follows), ("pass after the load", _pass_waits)):
            good, twin = check(of, True), check(of, False)
            if good and not twin:
                yield Finding(Level.OK, "order", f"{name}: kept, and its twin is seen to break")
            elif good:
                yield Finding(Level.WARNING, "order", f"{name}: kept, but its twin did not break: not shown")
            else:
                yield Finding(Level.PROBLEM, "order", f"{name}: broken", REPORT)


def _load_follows(of: Bench, follows: bool) -> bool:
    """A load comes after a pass under way that still stores to its slots."""
    mover = of.mover(None if follows else torch.cuda.Stream())
    source, target, blocks = of.slots(64, 0), of.slots(64, 1), of.blocks(64, scattered=True)
    before = of.rows(source).clone()
    mover.write(source, blocks)
    mover.settle()
    with torch.cuda.stream(of.forward):
        _keep_busy()
        for layer in of.planes:
            for plane in layer:
                plane.index_fill_(0, target, 7.0)
    mover.load(target, blocks)
    torch.cuda.synchronize()
    same = bool(torch.equal(of.rows(target), before))
    mover.close()
    return same


def _pass_waits(of: Bench, waits: bool) -> bool:
    """A pass reads a layer after its load."""
    mover = of.mover()
    source, target, blocks = of.slots(64, 0), of.slots(64, 1), of.blocks(64, scattered=True)
    before = of.rows(source).clone()
    mover.write(source, blocks)
    mover.settle()
    for layer in of.planes:
        for plane in layer:
            plane.index_fill_(0, target, 7.0)
    with torch.cuda.stream(of.forward):
        _keep_busy()
    ticket = mover.load(target, blocks)  # waits for the forward stream, which is busy
    reading = torch.cuda.Stream()
    with torch.cuda.stream(reading):
        for number in range(len(of.planes)):
            if waits:
                mover.wait_layer(ticket, number)
        read = of.rows(target)
    torch.cuda.synchronize()
    same = bool(torch.equal(read, before))
    mover.close()
    return same


def _keep_busy() -> None:
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(BUSY_CYCLES)


def speeds(link: Link, *, tokens: int = 8192, rounds: int = 5, shape: Shape = MODEL) -> Iterator[Finding]:
    """Rates of the mover as shares of the link's, host time, and how much slower a matrix product is beside.

    tokens: of one load and write; host time is said for 8192.
    """
    with bench(shape, tokens, 1) as of:
        mover, slots = of.mover(), of.slots(tokens, 0)
        nbytes = tokens // of.arena.layout.block_tokens * of.arena.layout.block_bytes
        for order in ("in order", "scattered"):
            blocks = of.blocks(tokens, scattered=order == "scattered")
            for way, limit in (("write", link.from_gpu), ("load", link.to_gpu)):
                seconds, host = _timed(partial(getattr(mover, way), slots, blocks), rounds)
                yield _speed(f"{way} {order}", nbytes / seconds, limit, 1000 * host * 8192 / tokens)
            mover.settle()
        yield _beside(of, mover, slots, rounds)
        if mover.blocks_without_kernel:
            text = "our kernel could not be used here; all copies are made without it"
            yield Finding(Level.WARNING, "speed", text, "Report this with the log and the output of --json")
        mover.close()
        yield from _other_candidate(of, link, slots, rounds)


def _other_candidate(of: Bench, link: Link, slots: torch.Tensor, rounds: int) -> Iterator[Finding]:
    """The bytes and the rate of loads by SGLang's kernel."""
    name = "load by SGLang's kernel"
    if not kept(of, len(slots), scattered=True, by_kernel=SglangsKernel):
        yield Finding(Level.PROBLEM, "speed", f"{name}: changes bytes", "Servers do not use it; report this")
        return
    mover, blocks = of.mover(by_kernel=SglangsKernel), of.blocks(len(slots), scattered=True)
    nbytes = len(blocks) * of.arena.layout.block_bytes
    seconds, _ = _timed(partial(mover.load, slots, blocks), rounds)
    share = nbytes / seconds / link.to_gpu
    text = f"{name}, scattered: {in_words(nbytes / seconds)}, {share:.2f} of a plain copy; servers use ours"
    if mover.blocks_without_kernel:
        text = f"{name}: cannot be used here; the log says why. Servers use ours"
    mover.close()
    yield Finding(Level.OK, "speed", text)


def _speed(name: str, rate: float, limit: float, host_ms: float) -> Finding:
    share = rate / limit
    text = f"{name}: {in_words(rate)}, {share:.2f} of a plain copy; host {host_ms:.1f} ms per 8192 tokens"
    if share >= LEAST_SHARE and host_ms <= MOST_HOST_MS:
        return Finding(Level.OK, "speed", text)
    advice = f"Below the aim ({LEAST_SHARE} and {MOST_HOST_MS} ms): hits in DRAM come later for it"
    return Finding(Level.WARNING, "speed", text, advice)


def _timed(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Seconds until a call's work is done, and of the calling thread; medians."""
    whole, host = [], []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - begin)
    return max(float(np.median(whole[1:])), 1e-9), float(np.median(host[1:]))


def _beside(of: Bench, mover: CudaMover, slots: torch.Tensor, rounds: int) -> Finding:
    """How much longer matrix products take beside a load."""
    size = 4096 if len(of.planes) == MODEL.layers else 64
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    work = torch.cuda.Stream()
    blocks = of.blocks(len(slots), scattered=True)

    def products() -> None:
        with torch.cuda.stream(work):
            for _ in range(20):
                torch.mm(a, a)
        work.synchronize()

    alone, _ = _timed(products, rounds)
    both = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        mover.load(slots, blocks)
        begin = time.perf_counter()
        products()
        both.append(time.perf_counter() - begin)
    slower = float(np.median(both)) / alone - 1
    text = f"a matrix product beside a load: {100 * slower:.0f} % slower"
    level = Level.OK if slower <= MOST_SLOWER else Level.WARNING
    advice = "" if level is Level.OK else "Decoding slows down by so much while hits in DRAM are loaded"
    return Finding(level, "beside passes", text, advice)


def limits(link: Link) -> Finding:
    """Step 2."""
    return Finding(
        Level.OK,
        "limits",
        f"plain copies: to the GPU {in_words(link.to_gpu)}, from it {in_words(link.from_gpu)}, both at once "
        f"{in_words(link.both)}; within it {in_words(link.within)} read and written",
    )
