"""The costs of a log's requests at a fleet without a shared cache, and with one."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from sglang_ext.cost_model import CostModel
from sglang_ext.router.estimate.arrivals import Arrival, Log
from sglang_ext.router.estimate.fleet import Instances, Tiers, reusable
from sglang_ext.router.estimate.reuse import Run
from sglang_ext.tiers import Tier

ENOUGH: Final = 0.98
"""The share of all reusable blocks from which a larger cache is not worth its memory."""
POINTS: Final = 24
"""Sizes of the curve."""
SPAN: Final = 512.0
"""The largest size of the curve over the smallest."""
FULL: Final = 0.8
"""The share of the time that instances may compute prompts before queues make every estimate a guess."""
_GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The instances of an estimate: their number, and bytes of KV of each one's tiers.

    kv_bytes: of a token.
    """

    instances: int
    hbm: int
    dram: int
    disk: int
    kv_bytes: int

    def blocks(self, size: int, block_tokens: int) -> int:
        """Blocks for which a memory has room."""
        return size // (self.kv_bytes * block_tokens)


@dataclass
class Side:
    """One fleet over the log: sums in tokens and seconds."""

    instances: Instances
    tiers: Tiers
    cost: CostModel
    found: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Tokens found in HBM, DRAM and on disk."""
    prefill_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    _free: dict[int, float] = field(default_factory=dict)
    """Instance -> when it has computed all prompts before."""

    def add(self, arrival: Arrival, block_tokens: int) -> list[Run]:
        """Serve a prompt; its runs."""
        at, runs = self.instances.use(arrival, block_tokens)
        found = self.tiers.found(runs, reusable(arrival, block_tokens))
        tokens = [blocks * block_tokens for blocks in found]
        cached = sum(tokens)
        exec_s = self.cost.exec_s(arrival.tokens - cached, cached)
        load_s = sum(
            self.cost.load_tokens_s(tier, count)
            for tier, count in zip((Tier.DRAM, Tier.DISK), tokens[1:], strict=True)
            if count
        )
        self.prefill_s += exec_s
        self.found = [a + b for a, b in zip(self.found, tokens, strict=True)]
        came = arrival.at or 0.0
        begin = came if arrival.at is None else max(came, self._free.get(at, came))
        self._free[at] = begin + exec_s
        self.ttft_s.append(begin - came + exec_s + load_s)
        return runs

    def ttft(self, share: float) -> float:
        """A quantile of the time to first token, in seconds."""
        if not self.ttft_s:
            return 0.0
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def as_json(self, prompt_tokens: int) -> dict[str, Any]:
        """For ``--json``."""
        names = ("hbm", "dram", "disk")
        return {
            "hit_share": sum(self.found) / prompt_tokens if prompt_tokens else 0.0,
            "hit_share_by_tier": {
                name: tokens / prompt_tokens if prompt_tokens else 0.0
                for name, tokens in zip(names, self.found, strict=True)
            },
            "prefill_gpu_seconds": self.prefill_s,
            "ttft_s": {f"p{share:g}": self.ttft(share / 100) for share in (50, 90, 99)},
        }


@dataclass(frozen=True)
class Setting:
    """One setting of the three that matter: its words, and the points of hit share that it gives."""

    setting: str
    points: float
    why: str


class Estimate:
    """Reads a log once.

    Args:
        fleet: its instances.
    """

    def __init__(self, log: Log, fleet: Fleet, cost: CostModel) -> None:
        self.fleet = fleet
        self.requests = self.prompt_tokens = self.answer_tokens = 0
        self.measured_tokens = self.measured_of = 0
        """Cached tokens by the servers' own reports, and the tokens of these prompts."""
        self.timed = True
        """The log says when its requests came."""
        self.log = log
        size = fleet.blocks
        block = log.block_tokens
        hbm = size(fleet.hbm, block)
        every = Tiers(hbm, size(fleet.dram, block), size(fleet.disk, block))
        self.today = Side(Instances(fleet.instances, by_prefix=False), Tiers(hbm), cost)
        self.routed = Instances(fleet.instances, by_prefix=True)
        self.ours = Side(self.routed, every, cost)
        first = last = None
        for arrival in log.arrivals():
            self.requests += 1
            self.prompt_tokens += arrival.tokens
            self.answer_tokens += arrival.answer_tokens
            if arrival.cached is not None:
                self.measured_tokens += arrival.cached
                self.measured_of += arrival.tokens
            if arrival.at is None:
                self.timed = False
            else:
                first, last = arrival.at if first is None else first, arrival.at
            self.today.add(arrival, block)
            self.ours.add(arrival, block)
        self.seconds = (last - first) if first is not None and last is not None else 0.0

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the log."""
        return self.log.block_tokens

    def share(self, blocks: int) -> float:
        """A number of blocks as a share of all prompts' tokens."""
        return blocks * self.block_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def bytes_of(self, blocks: int) -> int:
        """The memory of a number of blocks."""
        return blocks * self.block_tokens * self.fleet.kv_bytes

    def curve(self) -> list[tuple[int, float, float]]:
        """(bytes of an instance's cache, hit share in turn, hit share by prefix), from small to large."""
        unlimited = max(1, self.enough(1.0))
        sizes = {max(1, round(unlimited * SPAN ** (at / (POINTS - 1) - 1))) for at in range(POINTS)}
        return [
            (
                self.bytes_of(size),
                self.share(self.today.instances.curve.found(size)),
                self.share(self.routed.curve.found(size)),
            )
            for size in sorted(sizes)
        ]

    def enough(self, share: float = ENOUGH) -> int:
        """The least size of an instance's cache, in blocks, that finds this share of the most of any size."""
        curve = self.routed.curve
        wanted = share * curve.most
        low, high = 0, 1
        while curve.found(high) < wanted:
            high *= 2
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if curve.found(middle) >= wanted else (middle + 1, high)
        return low

    def settings(self) -> list[Setting]:
        """The three settings that matter, by their gain."""
        blocks = self.fleet.blocks
        hbm = blocks(self.fleet.hbm, self.block_tokens)
        dram = max(hbm, blocks(self.fleet.dram, self.block_tokens))
        enough = self.enough()
        points = [
            100 * self.share(self.today.instances.curve.found(hbm)),
            100 * self.share(self.routed.curve.found(hbm)),
            100 * self.share(self.routed.curve.found(min(dram, max(enough, hbm)))),
            100 * self.share(self.routed.curve.found(max(enough, hbm))),
        ]
        by_prefix, in_dram, on_disk = (after - before for before, after in pairwise(points))
        in_memory, below = self.bytes_of(min(dram, max(enough, hbm))), self.bytes_of(max(enough, hbm))
        return [
            Setting("sglang-ext router (--policy auto)", by_prefix, "requests go where their prefix is"),
            Setting(
                f"--kv-dram-size {_size(in_memory)}" if in_dram >= 0.1 else "--kv-dram-size: none needed",
                in_dram,
                "evicted prefixes stay in host memory",
            ),
            Setting(
                f"--kv-disk-size {_size(below)}" if on_disk >= 0.1 else "--kv-disk-size: none needed",
                on_disk,
                "and, where that is too small, on disk",
            ),
        ]

    @property
    def busy(self) -> float:
        """The share of the time that instances compute prompts, without a shared cache."""
        return self.today.prefill_s / (self.seconds * self.fleet.instances) if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        fleet, saved = self.fleet, self.today.prefill_s - self.ours.prefill_s
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "seconds": self.seconds,
            "timed": self.timed,
            "skipped": dict(self.log.skipped),
            "fleet": {
                "instances": fleet.instances,
                "hbm_bytes": fleet.hbm,
                "dram_bytes": fleet.dram,
                "disk_bytes": fleet.disk,
                "kv_bytes_per_token": fleet.kv_bytes,
            },
            "busy": self.busy,
            "calibrated": self.ours.cost.calibrated,
            "today": self.today.as_json(self.prompt_tokens),
            "with_sglang_ext": self.ours.as_json(self.prompt_tokens),
            "without_a_limit": self.share(self.routed.curve.most),
            "measured_hit_share": self.measured_tokens / self.measured_of if self.measured_of else None,
            "gpu_seconds_saved": saved,
            "curve": [
                {"bytes_per_instance": size, "in_turn": turn, "by_prefix": prefix}
                for size, turn, prefix in self.curve()
            ],
            "settings": [
                {"setting": each.setting, "points": each.points, "why": each.why} for each in self.settings()
            ],
        }


def _size(count: int) -> str:
    return f"{-(-count // _GIB)}GiB"
