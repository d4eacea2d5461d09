"""Live regret: cached tokens of the last hour beside those that an oracle of equal capacity would have found.

The oracle is Belady's: one cache with the capacity of all instances, which evicts the blocks that are used
last in the future, and takes none in that are not used again. No instance can do that, and no router can
bring every prompt to all caches at once; its lead is the most that can be gained without more memory.

A prompt is noted as *units*: its blocks one by one at the beginning, then runs of 4, 16 and 64 (`UNITS`). The
name of a unit is a hash over all of the prompt up to its end. Where more units come than fit, a part of all
names is kept, chosen by the name, and the capacity is divided alike (SHARDS: Waldspurger and others, 2015).
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.dispatch.explain import LoggedRequest
from sglang_ext.router.telemetry.observability import RouterMetrics

WINDOW_S: Final = 3600.0
"""The time that is compared. As much before it is kept, so that the oracle's cache begins filled."""
MOST_UNITS: Final = 16_384
"""Units that are kept, about 2 MiB."""
MOST_USES: Final = 16_384
"""Prompts that are kept."""
UNITS: Final = ((16, 1), (64, 4), (512, 16), (1 << 30, 64))
"""(up to this block, blocks of a unit)."""
EVERY_S: Final = 30.0
"""Between two samples of the last hour, with each of which the comparison is made."""
SAMPLES: Final = 121
_BITS: Final = 64
Unit = tuple[int, int, bool]
"""(name, blocks, whether they are the prompt's, not the answer's)."""


class Use(msgspec.Struct, eq=False):
    """One prompt.

    cached: tokens by its server's report. oracle: share of its whole blocks that the oracle finds.
    """

    request_id: str
    at: float
    tokens: int
    cached: int | None
    units: list[Unit]
    oracle: float | None = None


class LastHour(msgspec.Struct, frozen=True):
    """Shares of prompts' tokens that were cached, in the last hour.

    hit: as servers report. oracle: with Belady's evictions at equal capacity; None while no instance reports
    its capacity. unlimited: with a cache without a limit. capacity_blocks: of all instances. sampled: the
    share of names that is kept.
    """

    requests: int
    prompt_tokens: int
    hit: float
    oracle: float | None
    unlimited: float
    capacity_blocks: int | None
    sampled: float


def units_of(key: bytes, prompt_bytes: int, block_tokens: int, space: bytes) -> Iterator[Unit]:
    """The units of an encoded prompt with its answer; see ``Use``."""
    block = block_tokens * TOKEN_BYTES
    chain, at, view = hashlib.blake2b(space, digest_size=_BITS // 8), 0, memoryview(key)
    for upto, blocks in UNITS:
        size = blocks * block
        while at < upto * block and at + size <= len(key):
            chain.update(view[at : at + size])
            at += size
            yield int.from_bytes(chain.digest(), "little"), blocks, at <= prompt_bytes


def belady(uses: Sequence[Sequence[Unit]], capacity: float) -> list[float]:
    """Blocks of each prompt that an oracle's cache finds.

    Args:
        uses: the units of each prompt, in their order.
        capacity: in blocks; infinite for a cache without a limit.
    """
    following: list[int] = []
    last: dict[int, int] = {}
    flat = [(name, blocks) for units in uses for name, blocks, _ in units]
    for index in range(len(flat) - 1, -1, -1):
        following.append(last.get(flat[index][0], -1))
        last[flat[index][0]] = index
    following.reverse()
    held: dict[int, int] = {}
    """Unit -> index of its next use."""
    latest: list[tuple[int, int, int]] = []
    spare, index = capacity, 0
    found = []
    for units in uses:
        hits = 0.0
        for name, blocks, counts in units:
            if name in held:
                hits += blocks if counts else 0
                del held[name]
                spare += blocks
            after = following[index]
            index += 1
            if after < 0:
                continue
            held[name] = after
            spare -= blocks
            heapq.heappush(latest, (-after, name, blocks))
            while spare < 0:
                when, one, size = heapq.heappop(latest)
                if held.get(one) == -when:
                    del held[one]
                    spare += size
        found.append(hits)
    return found


class Regret:
    """Notes prompts, and compares.

    Args:
        block_tokens: tokens of a block.
        capacity: blocks of all instances; None while none reports its tiers.
    """

    def __init__(self, clock: Clock, block_tokens: int, capacity: Callable[[], int | None]) -> None:
        self._clock = clock
        self._block_tokens = block_tokens
        self._capacity = capacity
        self._uses: deque[Use] = deque()
        self._units = 0
        self._below = 1 << _BITS
        """Names below this are kept."""
        self.last_hour: LastHour | None = None
        """As last computed."""

    def on_ended(self, logged: LoggedRequest, now: float) -> None:
        """A request has ended."""
        record = logged.record
        if record.status != 200 or len(logged.prompts) != 1 or record.cached_tokens is None:
            return
        prompt = logged.prompts[0]
        key = logged.whole if logged.whole.startswith(prompt.key) else prompt.key
        space = repr(prompt.namespace).encode()
        units = [
            unit
            for unit in units_of(key, len(prompt.key), self._block_tokens, space)
            if unit[0] < self._below
        ]
        tokens = record.prompt_tokens or prompt.units
        self._uses.append(Use(record.request_id, record.started, tokens, record.cached_tokens, units))
        self._units += len(units)
        while self._units > MOST_UNITS and self._below > 1:
            self._halve()
        while len(self._uses) > MOST_USES:
            self._drop()

    def comparison(self) -> Callable[[], LastHour | None]:
        """Compares the last hour as it is now; for a thread. Returns None without a prompt in it."""
        uses = [(use, use.units) for use in self._uses]
        rate, capacity = self._below / (1 << _BITS), self._capacity()
        now = self._clock.monotonic()
        return lambda: _compare(uses, rate, capacity, now)

    def show(self, found: LastHour | None) -> None:
        """Keep the result of a comparison, for explanations and metrics."""
        self.last_hour = found

    def forget_old(self) -> None:
        """Drop uses that are too old to matter."""
        oldest = self._clock.monotonic() - 2 * WINDOW_S
        while self._uses and self._uses[0].at < oldest:
            self._drop()

    def explain(self, request_id: str, *, admin: bool) -> dict[str, Any] | None:
        """A request's part in the answer of ``/explain``; None where nothing was computed yet."""
        use = next((use for use in reversed(self._uses) if use.request_id == request_id), None)
        if use is None or self.last_hour is None:
            return None
        return {
            "tokens": None if use.oracle is None else round(use.oracle * use.tokens),
            "last_hour": msgspec.structs.asdict(self.last_hour) if admin else None,
        }

    @property
    def size_bytes(self) -> int:
        """Estimated memory."""
        return 128 * self._units + 256 * len(self._uses)

    def __len__(self) -> int:
        return len(self._uses)

    def _drop(self) -> None:
        self._units -= len(self._uses.popleft().units)

    def _halve(self) -> None:
        self._below //= 2
        for use in self._uses:
            use.units = [unit for unit in use.units if unit[0] < self._below]
        self._units = sum(len(use.units) for use in self._uses)

    def __repr__(self) -> str:
        return f"Regret({len(self)} prompts, {self._units} units)"


def _compare(
    uses: Sequence[tuple[Use, Sequence[Unit]]], rate: float, capacity: int | None, now: float
) -> LastHour | None:
    judged = [at for at, (use, _) in enumerate(uses) if use.at > now - WINDOW_S]
    if not judged:
        return None
    every = [units for _, units in uses]
    unlimited = belady(every, math.inf)
    oracle = None if capacity is None else belady(every, capacity * rate)
    whole, tokens, cached = 0, 0, 0
    for at in judged:
        use, units = uses[at]
        blocks = sum(size for _, size, counts in units if counts)
        whole, tokens, cached = whole + blocks, tokens + use.tokens, cached + (use.cached or 0)
        if oracle is not None:
            use.oracle = oracle[at] / blocks if blocks else 0.0

    def share(found: Sequence[float]) -> float:
        return min(1.0, sum(found[at] for at in judged) / whole) if whole else 0.0

    return LastHour(
        requests=len(judged),
        prompt_tokens=tokens,
        hit=cached / tokens if tokens else 0.0,
        oracle=None if oracle is None else share(oracle),
        unlimited=share(unlimited),
        capacity_blocks=capacity,
        sampled=rate,
    )


class History:
    """A sample every `EVERY_S`, for an hour.

    Args:
        regret: computed with each sample.
        now: the values of a sample, by name; counters as sums since the router's start.
    """

    def __init__(
        self, regret: Regret, clock: Clock, metrics: RouterMetrics, now: Callable[[], Mapping[str, float]]
    ) -> None:
        self.regret = regret
        self._clock = clock
        self._now = now
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=SAMPLES)
        gauge = metrics.gauge("last_hour_cached_ratio")

        def refresh() -> None:
            gauge.clear()
            found = self.regret.last_hour
            if found is not None:
                gauge.labels("hit").set(found.hit)
                gauge.labels("unlimited").set(found.unlimited)
                if found.oracle is not None:
                    gauge.labels("oracle").set(found.oracle)

        metrics.refreshing.subscribe(refresh)
        metrics.show_table("regret", regret)

    async def round(self) -> float:
        """Take a sample; returns the pause until the next."""
        self._samples.append((self._clock.monotonic(), self._now()))
        self.regret.forget_old()
        self.regret.show(await asyncio.to_thread(self.regret.comparison()))
        return EVERY_S

    def as_json(self) -> dict[str, Any]:
        """The answer of ``GET /metrics/last_hour``."""
        now, found = self._clock.monotonic(), self.regret.last_hour
        return {
            "every_s": EVERY_S,
            "samples": [{"ago_s": round(now - at, 3), **values} for at, values in self._samples],
            "cached": None if found is None else msgspec.structs.asdict(found),
        }

    def __repr__(self) -> str:
        return f"History({len(self._samples)} samples)"
