"""The blocks of a return, and the memory for them: decisions over tree and store, without a device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiers import Tier

BUDGET: Final = 4
"""At most ``1 / BUDGET`` of a tier is reserved for returns at prefill, and locked for them at decode."""


def held(tree: RadixTree, hbm: Holder, namespace: Hashable, key: bytes) -> list[Node]:
    """The nodes of a prompt's leading blocks that are in HBM, from the top."""
    return [node for node in tree.match(namespace, key).path if hbm in node.placements]


def may_lock(locked: int, more: int, size: int) -> bool:
    """Whether decode keeps so many more blocks (or pages) for prefill, of a pool of this size."""
    return (locked + more) * BUDGET <= size


def reserve(
    store: Store,
    namespace: Hashable,
    key: bytes,
    *,
    busy: bool,
    into_dram: bool,
    dram_budget: int = BUDGET,
) -> Reservation | Refusal:
    """Reserve memory of prefill for the missing whole blocks of a prompt: in HBM, or in DRAM where HBM is
    short.

    Args:
        busy: requests wait for memory, which come first.
        into_dram: DRAM may be taken.
        dram_budget: at most one part in so many of DRAM is reserved for returns.
    """
    found = store.reserve(Tier.HBM, namespace, key, Use.RETURN, whole=True, share=BUDGET, lose=not busy)
    if found is not Refusal.NO_ROOM or not into_dram:
        return found
    return store.reserve(Tier.DRAM, namespace, key, Use.RETURN, whole=True, share=dram_budget)
