"""Load or recompute: weighs the cost of loading KV against the cost of computing it again.

Pure decisions over measured numbers. Until both costs have been measured, KV is loaded.

Computing x tokens after a context of y costs a·x + b·x·(y + x/2) seconds, the linear layers and attention;
a and b are fitted to the server's own batches, with decaying weights. Reading costs a latency plus bytes over
bandwidth, queued bytes included (MemServe, section 5.3, weighs the same two sides).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from sglang_ext.engine.movers.bandwidth import HOPE, Bandwidth
from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.engine.tiers.load_report import Decision, Reason
from sglang_ext.tiers import Tier

Sources: TypeAlias = "Sequence[tuple[Tier, int]]"
"""Consecutive blocks of a prompt below memory: the tier that has them, and how many they are."""


def first_blocks(sources: Sources, blocks: int) -> Sources:
    """The sources of the first ``blocks`` blocks."""
    found: list[tuple[Tier, int]] = []
    for tier, count in sources:
        if blocks <= 0:
            break
        found.append((tier, min(count, blocks)))
        blocks -= count
    return found


_FORGET = 0.98
"""Weight of older batches when a new one comes in: the last fifty or so count."""
_SMALLEST_BATCH = 32
"""Tokens; smaller batches measure overheads instead of the model."""


class PrefillCost:
    """Predicts seconds of prefill, fitted to batches."""

    def __init__(self) -> None:
        self._linear = self._mixed = self._square = 0.0
        self._by_tokens = self._by_pairs = 0.0
        self._fitted: tuple[float, float] | None = None
        self.batches = 0

    def observe(self, tokens: int, pairs: float, seconds: float) -> None:
        """A batch has run.

        Args:
            tokens: computed in it.
            pairs: pairs (token, earlier token) in attention: the sum of x·(y + x/2) over its requests.
            seconds: from the start of the forward pass to its result.
        """
        if tokens < _SMALLEST_BATCH or seconds <= 0:
            return
        # Weighted by 1 / seconds^2: relative errors count, or the longest prompts would decide alone.
        weight = 1 / (seconds * seconds)
        self._linear = self._linear * _FORGET + weight * tokens * tokens
        self._mixed = self._mixed * _FORGET + weight * tokens * pairs
        self._square = self._square * _FORGET + weight * pairs * pairs
        self._by_tokens = self._by_tokens * _FORGET + weight * tokens * seconds
        self._by_pairs = self._by_pairs * _FORGET + weight * pairs * seconds
        self.batches += 1
        self._fitted = self._fit()

    def coefficients(self) -> tuple[float, float] | None:
        """a and b, neither negative; None before the first batch. Asked in each pass."""
        return self._fitted

    def _fit(self) -> tuple[float, float]:
        determinant = self._linear * self._square - self._mixed * self._mixed
        if determinant > 1e-6 * self._linear * self._square:
            a = (self._by_tokens * self._square - self._by_pairs * self._mixed) / determinant
            b = (self._by_pairs * self._linear - self._by_tokens * self._mixed) / determinant
            if a >= 0 and b >= 0:
                return a, b
            if a < 0:
                return 0.0, self._by_pairs / self._square
        # All batches have the same shape, or attention's share is too small to measure.
        return self._by_tokens / self._linear, 0.0

    def seconds(self, tokens: int, context: int) -> float | None:
        """Seconds to compute ``tokens`` after ``context``; None when unknown."""
        return _seconds(self.coefficients(), tokens, context)


def _seconds(coefficients: tuple[float, float] | None, tokens: int, context: int) -> float | None:
    if coefficients is None:
        return None
    a, b = coefficients
    return a * tokens + b * tokens * (context + tokens / 2)


UNNOTICED = 0.02
"""The part of the computing time that a wait may add to it unnoticed."""


def layers_to_hold(n_layers: int, load: float | None, compute: float | None) -> int:
    """The number of lowest layers that have to be in HBM so that computing hides the loading of the rest.

    With k of n layers in HBM, layer i arrives at (i - k + 1)·load/n and is needed at i·compute/n: of all i
    from k on, the first and the last decide.

    Args:
        n_layers: of the model.
        load: seconds to load all layers of the cached prefix; None when unknown.
        compute: seconds to compute the new tokens behind it; None when unknown.

    Returns:
        0 to n_layers - 1; 0 where load or compute is unknown, or where waiting for layer 0 would not be
        noticed.
    """
    if load is None or compute is None or load / n_layers <= UNNOTICED * compute:
        return 0
    for held in range(1, n_layers - 1):
        if load <= held * compute and (n_layers - held) * load <= (n_layers - 1) * compute:
            return held
    return max(1, n_layers - 1)


class Speeds(Protocol):
    """The speeds of computing and of loading."""

    @property
    def bytes_per_second(self) -> float | None:
        """Of recent loads; None when unknown."""

    def seconds(self, tokens: int, context: int) -> float | None:
        """Seconds to compute ``tokens`` after ``context``; None when unknown."""


class Unmeasured:
    """The speeds where nothing is measured: all unknown."""

    bytes_per_second: float | None = None

    def seconds(self, tokens: int, context: int) -> float | None:
        return None


class AgreedSpeeds:
    """The ranks' measurements, the smallest at each place, so that all ranks decide alike at any time.

    As of the last pass in which the ranks compared numbers (`Ranks.measure`).

    Args:
        cost: fitted to this rank's batches.
        load: bytes per second of this rank's loads; None when unknown.
    """

    _UNITS: Final = 1e15
    """Numbers that are compared are whole: a and b are in 1e-15 seconds."""

    def __init__(self, cost: PrefillCost, load: Callable[[], float | None], ranks: Ranks) -> None:
        self._cost = cost
        self._load = load
        self._known: tuple[float | None, tuple[float, float] | None] = (None, None)
        self._measured = (0, *self._whole(None))
        """Of `_known`: almost all passes find the same speeds as the one before."""
        self._agreed = ranks.measure("speeds", self._measure)

    def _measure(self) -> Sequence[int]:
        load, cost = self._load(), self._cost.coefficients()
        if self._known != (load, cost):
            self._known = load, cost
            self._measured = (int(load or 0), *self._whole(cost))
        return self._measured

    def _whole(self, cost: tuple[float, float] | None) -> tuple[int, int]:
        a, b = cost or (NOT_YET, NOT_YET)
        return round(a * self._UNITS), round(b * self._UNITS)

    @property
    def bytes_per_second(self) -> float | None:
        numbers = self._agreed.numbers
        return None if numbers is None else numbers[0] or None

    def seconds(self, tokens: int, context: int) -> float | None:
        """Seconds to compute ``tokens`` after ``context``; None when unknown."""
        numbers = self._agreed.numbers
        if numbers is None or min(numbers[1:]) < 0:
            return None
        return _seconds((numbers[1] / self._UNITS, numbers[2] / self._UNITS), tokens, context)


class DramPolicy:
    """Decides whether a DRAM hit is loaded or computed again: all of it or none, because it streams in front
    of the forward pass without a wait.

    Args:
        always: load every hit.
    """

    OVERHEAD_SECONDS = 0.0005
    """Time to prepare a load of any length, measured on a host of two cores (``docs/tiers.md``)."""

    def __init__(self, block_tokens: int, block_bytes: int, *, always: bool, speeds: Speeds) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self._always = always
        self._hope = 1.0
        self._speeds = speeds

    def weigh(self, blocks: int, start: int, *, waiting_blocks: int = 0) -> Decision:
        """Decide on ``blocks`` blocks of DRAM that follow ``start`` blocks: all are loaded, or none.

        Args:
            waiting_blocks: blocks of loads under way.
        """
        load = None
        if self._speeds.bytes_per_second:
            nbytes = (waiting_blocks + blocks) * self.block_bytes
            load = self.OVERHEAD_SECONDS + nbytes / (self._speeds.bytes_per_second * self._hope)
        compute = self._speeds.seconds(blocks * self.block_tokens, start * self.block_tokens)
        if self._always:
            return Decision(blocks, load, compute, Reason.ALWAYS)
        if load is None or compute is None:
            return Decision(blocks, load, compute, Reason.UNMEASURED)
        if load < compute:
            self._hope = 1.0
            return Decision(blocks, load, compute, Reason.FASTER)
        # Loads that do not happen are not measured, so the estimate of their speed grows a little each time.
        self._hope *= HOPE
        return Decision(0, load, compute, Reason.SLOWER)


class DiskPolicy:
    """Splits a disk hit into a part to read and a part to compute.

    Where a request waits for all of a read, the decision is all or nothing: computing a prefix costs more per
    token the longer it is and reading does not, so if the whole is not worth reading, no part of it is. Where
    reading streams in front of the forward pass, the head is read while the tail is computed, and the best
    border is where both take equally long.

    Args:
        least_tokens: shorter hits are computed.
        always: read every hit that is not shorter.
        overlaps: whether reading streams in front of computing.
    """

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        *,
        least_tokens: int = 0,
        always: bool = False,
        overlaps: bool = False,
        cost: PrefillCost | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._least_tokens = least_tokens
        self._always = always
        self._overlaps = overlaps
        self.cost = cost or PrefillCost()
        self.bandwidths: defaultdict[Tier, Bandwidth] = defaultdict(Bandwidth)
        self.last: Decision | None = None

    def blocks_to_read(
        self, sources: Sources, start: int, *, new_tokens: int = 1, waiting_bytes: int = 0
    ) -> int:
        """The number of leading blocks of ``sources`` to read. ``sources`` follow ``start`` blocks.

        Args:
            new_tokens: tokens behind them that are computed in any case.
            waiting_bytes: bytes of reads under way.
        """
        found = sum(blocks for _, blocks in sources)
        read = self._read_seconds(sources, waiting_bytes)
        compute = self._compute_seconds(found, start)
        chosen = found
        reason = Reason.ALWAYS if self._always else Reason.UNMEASURED
        if not self._always and read is not None and compute is not None:
            chosen = self._best(sources, found, start, new_tokens, waiting_bytes)
            reason = Reason.FASTER if chosen == found else Reason.OVERLAP if chosen else Reason.SLOWER
            if found and not chosen:
                # A disk that is not read is not measured, so the estimate of its speed grows a little.
                for tier in {tier for tier, _ in sources}:
                    self.bandwidths[tier].hope()
        if chosen and chosen * self._block_tokens < self._least_tokens:
            chosen, reason = 0, Reason.SHORT
        self.last = Decision(chosen, read, compute, reason)
        return chosen

    def _read_seconds(self, sources: Sources, waiting_bytes: int) -> float | None:
        """To read all sources, behind queued bytes of the first source's tier."""
        total = 0.0
        for tier, blocks in sources:
            seconds = self.bandwidths[tier].seconds(waiting_bytes + blocks * self._block_bytes)
            if seconds is None:
                return None
            total, waiting_bytes = total + seconds, 0
        return total

    def _best(self, sources: Sources, found: int, start: int, new_tokens: int, waiting_bytes: int) -> int:
        def read(blocks: int) -> float:
            return self._read_seconds(first_blocks(sources, blocks), waiting_bytes) or 0.0

        def compute(blocks: int) -> float:
            """Seconds to compute the remaining tokens when so many blocks are read."""
            tokens = (found - blocks) * self._block_tokens + new_tokens
            return self.cost.seconds(tokens, (start + blocks) * self._block_tokens) or 0.0

        def total(blocks: int) -> float:
            if not blocks:
                return compute(0)
            return max(read(blocks), compute(blocks)) if self._overlaps else read(blocks) + compute(blocks)

        # Reading time grows with the number of blocks, computing time shrinks: find where they cross.
        low, high = 0, found
        while low < high:
            middle = (low + high) // 2
            if read(middle) >= compute(middle):
                high = middle
            else:
                low = middle + 1
        choices = [found, 0]
        if self._overlaps:
            choices += [low, max(low - 1, 0)]
        # The first of equals: the next request need not compute blocks that are read now.
        return min(choices, key=total)

    def patience(self, blocks: int, start: int) -> float:
        """Seconds after which an unfinished read is given up and its blocks are computed."""
        compute = None if self._always else self._compute_seconds(blocks, start)
        return math.inf if compute is None else max(compute, 0.05)

    def may_start(self, sources: Sources, bytes_left: int, new_tokens: int, context: int) -> bool:
        """Whether a forward pass may begin while ``bytes_left`` are still to be read: it does not catch up
        with the reading, layer by layer, if computing takes at least as long.

        Args:
            sources: of all blocks being read; each source has a part of every layer.
            new_tokens: tokens that the forward pass computes, after ``context`` tokens.
        """
        read = self.read_s(sources, bytes_left)
        compute = self.cost.seconds(new_tokens, context)
        return self._always or read is None or compute is None or read <= compute

    def read_s(self, sources: Sources, nbytes: int) -> float | None:
        """To read so many bytes from the tiers of these blocks; None when unknown."""
        whole = sum(blocks for _, blocks in sources) * self._block_bytes
        read = self._read_seconds(sources, 0)
        return None if read is None or not whole else read * nbytes / whole

    def _compute_seconds(self, blocks: int, start: int) -> float | None:
        return self.cost.seconds(blocks * self._block_tokens, start * self._block_tokens)

    def measured(self, sources: Sources, seconds: float) -> None:
        """A read has ended. Its time is divided among the tiers in proportion to their expected times; in
        proportion to their blocks where one of these is unknown."""
        expected = [self.bandwidths[tier].seconds(blocks * self._block_bytes) for tier, blocks in sources]
        known = [share for share in expected if share is not None]
        shares = known if len(known) == len(sources) else [float(blocks) for _, blocks in sources]
        for (tier, blocks), share in zip(sources, shares, strict=True):
            self.bandwidths[tier].observe(blocks * self._block_bytes, seconds * share / sum(shares))
