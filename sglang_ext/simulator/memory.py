"""Memory that has no bytes: the places of blocks in HBM and DRAM are counted, and the tree's nodes name them.

The engine's tiers take these where a server has SGLang's allocator of slots, its tensors, and the arena. By
SGLang's estimates, a pass takes as many tokens as have room (``PrefillAdder``, ``PrefillBudget``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import InternalError
from sglang_ext.geometry import BlockLayout

INIT_RATIO: Final = 0.7
"""``SGLANG_INIT_NEW_TOKEN_RATIO``, and below the least value, to which it decays in so many steps."""
LEAST_RATIO: Final = INIT_RATIO * 0.14
DECAY_STEPS: Final = 600
RETRACT_STEPS: Final = 20
"""``SGLANG_RETRACT_DECODE_STEPS``: for which requests that stay have room after a retraction."""
CLIP_TOKENS: Final = 4096
"""``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``"""


class SlotCount:
    """SGLang's allocator of slots, as `HbmTier` uses it. A run of slots is a range of its length.

    Args:
        size: slots, one for each token.
    """

    device = "cpu"

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size

    def available_size(self) -> int:
        return self._free

    def alloc(self, tokens: int) -> range | None:
        if tokens > self._free:
            return None
        self._free -= tokens
        return range(tokens)

    def free_segment(self, slots: Sequence[Any], *, start_pos: int) -> None:
        self._free += len(slots)
        if self._free > self.size:
            raise InternalError(f"{self._free} of {self.size} slots are free")


class CountedSlots:
    """`SlotOps` over such runs."""

    def keep(self, row: range) -> range:
        return row

    def join(self, parts: Sequence[range]) -> range:
        return range(sum(map(len, parts)))


class BlockCount:
    """The DRAM arena, as `DramTier` uses it (its `Arena`).

    Args:
        n_blocks: that fit.
        layout: of a block.
    """

    def __init__(self, n_blocks: int, layout: BlockLayout) -> None:
        self.n_blocks, self.layout = n_blocks, layout
        self._free = n_blocks

    @property
    def block_bytes(self) -> int:
        return sum(self.layout.row_bytes) * self.layout.block_tokens

    @property
    def free_blocks(self) -> int:
        return self._free

    def alloc(self, n: int) -> npt.NDArray[np.int64] | None:
        if n > self._free:
            return None
        self._free -= n
        return np.zeros(n, np.int64)

    def free(self, ids: npt.NDArray[np.int64]) -> None:
        self._free += len(ids)

    def check(self) -> None:
        assert 0 <= self._free <= self.n_blocks, f"{self._free} of {self.n_blocks} blocks are free"


class NewTokenRatio:
    """The share of the tokens that running requests may still generate for which admission leaves room
    (``NewTokenRatioTracker``): it decays with each step, and jumps when requests are retracted.

    Args:
        fixed: requests generate all tokens that they may (``ignore_eos``), so the share is 1.
    """

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed
        self.current = INIT_RATIO

    def expected(self, left: Iterable[int]) -> float:
        """Tokens, of requests that may generate so many each."""
        return sum(min(tokens, CLIP_TOKENS) for tokens in left) * (1.0 if self._fixed else self.current)

    def decay(self, steps: int) -> None:
        self.current = max(self.current - steps * (INIT_RATIO - LEAST_RATIO) / DECAY_STEPS, LEAST_RATIO)

    def reset(self) -> None:
        """The instance is idle."""
        self.current = INIT_RATIO

    def retracted(self, kept: Sequence[tuple[int, int]]) -> None:
        """Requests were retracted.

        Args:
            kept: of each other one, the tokens of its answer, and how many it may have.
        """
        made = sum(each + RETRACT_STEPS for each, _ in kept)
        self.current = min(1.0, made / (sum(most for _, most in kept) + 1))


class Occupancy(Protocol):
    """The part of `HbmTier` that a budget reads."""

    @property
    def usable(self) -> int: ...


class PassBudget:
    """The tokens that one pass may still take of HBM and of its chunk.

    Args:
        tier: the cache's part of HBM.
        chunk: the most that the pass computes.
        expected: that running requests are expected to generate.
    """

    def __init__(self, tier: Occupancy, chunk: int, expected: float) -> None:
        self._tier = tier
        self.chunk = chunk
        self._now, self._later = 0, expected
        """Of the requests that were admitted: their prompts, and with their answers."""

    def _left(self, taken: float) -> float:
        return self._tier.usable - taken

    @property
    def has_room(self) -> bool:
        return self._left(self._later) > 0 and self._left(self._now) > 0

    @property
    def next_chunk(self) -> int:
        """The most tokens of a prompt that was cut. A pass computes some of them, however full HBM is."""
        left = int(self._left(self._later))
        return min(self.chunk, left if left > 0 else max(1, int(self._left(0))))

    def fits(self, prompt: int, answer: int) -> bool:
        """Whether a request has room. prompt: its tokens that are not in HBM."""
        return prompt + min(answer, CLIP_TOKENS) + 1 < self._left(self._later)

    def take(self, new: int, answer: int) -> None:
        """Admit a request. answer: 0 where its prompt is cut."""
        self.chunk -= new
        self._now += new + 1
        self._later += new + 1 + min(answer, CLIP_TOKENS)
