"""The tiers: where a copy of a block can lie, nearest to the model first.

Everything that differs from tier to tier by a fact (order, names, costs before a measurement) stands
here, once; a loop over the tiers uses `all_tiers()`. A tier added is a module with a
`tiered_store.tier.BlockTier` and one `register`:

    register(Tier("archive", 3, "archive", load_latency_s=0.1, load_bytes_per_s=1e8, opens="mine:open_it"))

On the wire a tier is its level. A level that a reader does not know comes from a newer peer: its blocks
are left out, so that the reader's index may have too few blocks and never too many.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, Final

MAX_LEVEL: Final = 31
"""Sets of tiers are sets of bits in a message."""


class Tier:
    """One tier. Compared and hashed as the object that it is; ordered by level.

    Args:
        name: in labels, profiles, answers and messages for programs: lower case.
        level: 0 for the model's own memory, larger is farther.
        title: for people.
        in_memory: its blocks are in the tree of an instance, and end with it. Otherwise they are found by
            name (``keys.block_keys``), and outlive the process.
        load_latency_s, load_bytes_per_s: of bringing KV from here to HBM, before a measurement.
        opens: of a tier below memory: ``module:function``, imported only where a rank needs it. Called as
            ``engine.tiers.opening.Opener``.
        follows: the same for a rank that reads the blocks which another rank on this host writes there
            (``--attn-cp-size``). Without it, the tier is refused with several such ranks.
    """

    HBM: ClassVar[Tier]
    """The engine's own KV pool (on a CPU host, the same pool in RAM)."""
    DRAM: ClassVar[Tier]
    """The arena in host memory."""
    DISK: ClassVar[Tier]
    """Segments on a local disk."""

    def __init__(
        self,
        name: str,
        level: int,
        title: str,
        *,
        in_memory: bool = False,
        load_latency_s: float = 0.0,
        load_bytes_per_s: float = math.inf,
        opens: str = "",
        follows: str = "",
    ) -> None:
        self.name = name
        self.level = level
        self.bit = 1 << level
        """Stands for it in a set of tiers."""
        self.title = title
        self.in_memory = in_memory
        self.load_latency_s = load_latency_s
        self.load_bytes_per_s = load_bytes_per_s
        self.opens = opens
        self.follows = follows

    @property
    def usage_key(self) -> str:
        """In an answer's ``cached_tokens_details``: tokens that came from here, of those in ``storage``."""
        return f"storage_{self.name}_tokens"

    def __lt__(self, other: Tier) -> bool:
        return self.level < other.level

    def __gt__(self, other: Tier) -> bool:
        return self.level > other.level

    def __reduce__(self) -> tuple[Any, ...]:
        return (tier_at, (self.level,))

    def __repr__(self) -> str:
        return self.title


_tiers: tuple[Tier, ...] = ()


def register(tier: Tier) -> Tier:
    """Make a tier known to every part.

    Raises:
        ValueError: its level or name is another one's, or its level has no bit.
    """
    global _tiers
    for known in _tiers:
        if known.level == tier.level or known.name == tier.name:
            raise ValueError(f"{tier.name} at level {tier.level}: {known.name} is at level {known.level}")
    if not 0 <= tier.level <= MAX_LEVEL:
        raise ValueError(f"{tier.name}: level {tier.level} is outside of [0, {MAX_LEVEL}]")
    _tiers = tuple(sorted((*_tiers, tier)))
    nearest_in.cache_clear()
    return tier


def withdraw(tier: Tier) -> None:
    """Forget a tier that was registered for a while, as tests do."""
    global _tiers
    _tiers = tuple(known for known in _tiers if known is not tier)
    nearest_in.cache_clear()


def all_tiers() -> tuple[Tier, ...]:
    """All of them, nearest first."""
    return _tiers


def tiers_below(tier: Tier) -> tuple[Tier, ...]:
    """Those that are farther, nearest first."""
    return tuple(known for known in _tiers if known.level > tier.level)


def tier_at(level: int) -> Tier | None:
    """The tier of a level; ``None`` for a newer peer's."""
    return next((known for known in _tiers if known.level == level), None)


def tier_named(name: str) -> Tier:
    """The tier of a name.

    Raises:
        KeyError: there is none.
    """
    for known in _tiers:
        if known.name == name:
            return known
    raise KeyError(f"no tier is called {name!r}; there are {', '.join(known.name for known in _tiers)}")


@functools.lru_cache(1024)  # asked for every instance and prompt
def nearest_in(bits: int) -> Tier | None:
    """The nearest tier of a set; ``None`` where this process knows none of it."""
    return next((known for known in _tiers if bits & known.bit), None)


Tier.HBM = register(Tier("hbm", 0, "HBM", in_memory=True))
Tier.DRAM = register(Tier("dram", 1, "DRAM", in_memory=True, load_latency_s=1e-3, load_bytes_per_s=10e9))
Tier.DISK = register(
    Tier(
        "disk",
        2,
        "disk",
        load_latency_s=2e-3,
        load_bytes_per_s=2e9,
        opens="sglang_ext.engine.tiers.opening:open_disk",
        follows="sglang_ext.engine.tiers.opening:follow_disk",
    )
)
