"""The prefixes that a hybrid cache announces, compared after each step with SGLang's tree and our store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from engine_follower import Follower
from engine_hybrid_pools import MAMBA, SWA, HybridPools
from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import HybridRank, MakeBelow
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_ext.engine.hybrid.components import resume_points
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.hybrid.store import StoredComponent
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.hybrid.announcing import Announcing
from sglang_ext.patches.adapter.hybrid.linker import page_names
from sglang_ext.radix_global import Holder
from sglang_ext.tiers import Tier

Prefix = tuple[Any, bytes]
TIERS = (Tier.HBM, Tier.DRAM, Tier.DISK)
BLOCK = 16


class AnnouncedBelow(StoreBelow):
    """Our store below `HybridRadixCache`, announced to routers."""

    def __init__(self, pools: HybridPools, cache: UnifiedRadixCache, sizes: Sizes) -> None:
        super().__init__(pools, cache, sizes)
        self.holders = {tier: Holder.of("simulated", 1, tier) for tier in TIERS}
        self.announcing = Announcing(cache, self.holders, BLOCK, self.store)
        self._cache.join([self.announcing, self.announcing.feed], self.announcing)
        self.follower = Follower(self.announcing.feed, BLOCK)
        self.most = dict.fromkeys(TIERS, 0)
        """Blocks that were announced at once, by tier."""
        self._prompts: dict[tuple[Any, tuple[int, ...]], list[Name]] = {}
        """Paths that SGLang's tree has had, up to the last page of which anything is left; their names."""

    def check(self, rank: HybridRank) -> None:
        super().check(rank)
        announced = self.follow()
        self._note(rank)
        for tier, truth in self._truth(rank).items():
            # Behind what HBM is announced to have, the ends of longer prompts decide.
            over, lacks = announced[tier] - truth, truth - announced[tier] - announced[Tier.HBM]
            assert not over, f"{tier}: {_ends(over)} cannot be resumed"
            assert not lacks, f"{tier}: {_ends(lacks)} are not announced"

    def follow(self) -> dict[Tier, set[Prefix]]:
        """Bring the router's copy up to date; returns all prefixes that it has, by tier."""
        self.announcing.each_pass()
        self.announcing.feed.publish(idle=True)
        self.announcing.check()
        self.announcing.feed.check()
        self.follower.follow()
        announced = self._announced()
        self._check_copy(announced)
        return announced

    def _check_copy(self, announced: Mapping[Tier, set[Prefix]]) -> None:
        """The router's copy is the tree."""
        assert self.follower.replica.trusted
        contents = self.follower.replica.contents()
        for tier, prefixes in announced.items():
            self.most[tier] = max(self.most[tier], len(prefixes))
            assert {(space[1:], key) for space, key in prefixes} == {
                prefix for prefix, tiers in contents.items() if tiers & tier.bit
            }

    def _note(self, rank: HybridRank) -> None:
        in_hbm: set[Name] = set()
        stack = [(child, (), []) for child in rank.cache.tree_core.root_node.children.values()]
        while stack:
            node, tokens, names = stack.pop()
            tokens = (*tokens, *node.key)
            names = names + page_names(node.hash_value)
            space = (0, node.key.extra_key, node.key.cache_salt)
            self._prompts[space, tokens] = names
            in_hbm.update(names)
            stack += [(child, tokens, names) for child in node.children.values()]
        page, parts = rank.pools.kind.page, self.store.parts.values()
        for (space, tokens), names in list(self._prompts.items()):
            left = len(names)
            while left and not self._is_anywhere(names[left - 1], in_hbm, parts):
                left -= 1
            if left < len(names):
                del self._prompts[space, tokens]
                self._prompts[space, tokens[: left * page]] = names[:left]

    @staticmethod
    def _is_anywhere(name: Name, in_hbm: set[Name], parts: Iterable[StoredComponent]) -> bool:
        below = any(
            name in each.memory or (each.disk is not None and each.disk.known([name])[0]) for each in parts
        )
        return below or name in in_hbm

    def _truth(self, rank: HybridRank) -> dict[Tier, set[Prefix]]:
        """By tier, all prefixes of whole blocks of paths to resume points."""
        page, parts = rank.pools.kind.page, self.store.parts
        found: dict[Tier, set[Prefix]] = {tier: set() for tier in TIERS}
        hbm = _resumable_in_hbm(rank)
        for (space, tokens), names in self._prompts.items():
            near = max(
                (end for end in range(0, len(tokens) + 1, page) if (space, tokens[:end]) in hbm), default=0
            )
            ends = {Tier.HBM: near}
            held = {component: np.zeros(len(names), bool) for component in parts}
            for tier in TIERS[1:]:
                for component, part in parts.items():
                    own = part.memory.held(names)
                    if tier is Tier.DISK:
                        own = own | (part.disk.known(names) if part.disk is not None else False)
                    held[component] = own
                alone = page * int(np.flatnonzero(resume_points(held, page))[-1])
                tail = {component: flags[near // page :] for component, flags in held.items()}
                behind = page * int(np.flatnonzero(resume_points(tail, page))[-1])
                ends[tier] = max(alone, near + behind if near and behind else 0)
            for tier, end in ends.items():
                found[tier].update(_prefixes(space, encode_tokens(list(tokens[:end]))))
        return found

    def _announced(self) -> dict[Tier, set[Prefix]]:
        found: dict[Tier, set[Prefix]] = {tier: set() for tier in TIERS}
        stack = [
            (child, b"")
            for root in self.announcing.announced.tree.roots.values()
            for child in root.children.values()
        ]
        while stack:
            node, before = stack.pop()
            key = before + node.key
            for tier, holder in self.holders.items():
                if holder in node.placements:
                    found[tier].update(_prefixes(node.namespace, key))
            stack += [(child, key) for child in node.children.values()]
        return found


def _resumable_in_hbm(rank: HybridRank) -> set[tuple[Any, tuple[int, ...]]]:
    """The places in SGLang's tree after which a prompt can be resumed, by SGLang's rules."""
    window, states, page = rank.pools.kind.window, rank.pools.kind.states, rank.pools.kind.page
    found = set()
    stack = [(child, (), float("inf")) for child in rank.cache.tree_core.root_node.children.values()]
    while stack:
        node, tokens, run = stack.pop()
        space = (0, node.key.extra_key, node.key.cache_salt)
        has_window = not window or node.component_data[SWA].value is not None
        has_state = not states or node.component_data[MAMBA].value is not None
        for end in range(page, len(node.key) + 1, page):
            whole = not window or (has_window and run + end >= rank.cache.sliding_window_size)
            if whole and (not states or (has_state and end == len(node.key))):
                found.add((space, (*tokens, *node.key[:end])))
        tokens = (*tokens, *node.key)
        run = run + len(node.key) if has_window else 0
        stack += [(child, tokens, run) for child in node.children.values()]
    return found


def _prefixes(space: Any, key: bytes) -> Iterable[Prefix]:
    return ((space, key[:end]) for end in range(4 * BLOCK, len(key) + 1, 4 * BLOCK))


def _ends(prefixes: set[Prefix]) -> list[tuple[Any, int]]:
    return sorted({(str(space), len(key) // 4) for space, key in prefixes})


def announced_store(**sizes: Any) -> MakeBelow:
    """Puts our store below `HybridRadixCache`, and announces it; see `Sizes`."""
    return lambda pools, cache: AnnouncedBelow(pools, cache, Sizes(**sizes))
