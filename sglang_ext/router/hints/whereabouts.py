"""Where the KV of a conversation is, seen from one instance, before and after it is brought up. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_ext.router.policies import Match
from sglang_ext.router.policies.base import NOTHING
from sglang_ext.tiers import Tier, all_tiers, tiers_below


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the KV of a conversation is, seen from one instance: tokens."""

    here: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    """By tier of the instance."""
    elsewhere: int = 0
    """On another instance, beyond the end of this one's KV."""
    nowhere: int = 0

    def brought_up(self, tokens: int) -> Whereabouts:
        """After ``tokens`` tokens have been brought to HBM, from the nearest tier first."""
        here, left = dict(self.here), tokens
        for tier in tiers_below(Tier.HBM):
            moved = min(left, here.get(tier, 0))
            here[tier] = here.get(tier, 0) - moved
            left -= moved
        from_peer = min(left, self.elsewhere)
        here[Tier.HBM] = here.get(Tier.HBM, 0) + tokens - left + from_peer
        return dataclasses.replace(self, here=here, elsewhere=self.elsewhere - from_peer)

    def computed(self, tokens: int) -> Whereabouts:
        """After ``tokens`` tokens have been computed, uncached ones first."""
        from_nowhere = min(tokens, self.nowhere)
        from_peer = min(tokens - from_nowhere, self.elsewhere)
        return dataclasses.replace(
            self,
            here={**self.here, Tier.HBM: self.here.get(Tier.HBM, 0) + from_nowhere + from_peer},
            elsewhere=self.elsewhere - from_peer,
            nowhere=self.nowhere - from_nowhere,
        )

    def as_json(self) -> dict[str, int]:
        """For clients."""
        counts = {tier.name: self.here.get(tier, 0) for tier in all_tiers()}
        return {**counts, "elsewhere": self.elsewhere, "nowhere": self.nowhere}


def whereabouts(matches: Mapping[str, Match], chosen: str, tokens: int) -> Whereabouts:
    """Where ``tokens`` of a conversation are, seen from the chosen instance."""
    here = matches.get(chosen, NOTHING)
    most = max((match.tokens for match in matches.values()), default=0)
    held = min(here.tokens, tokens)
    counts: dict[Tier, int] = {}
    left = held
    for tier, count in here.by_tier().items():
        if among := min(count, left):
            counts[tier] = among
            left -= among
    elsewhere = max(0, min(most, tokens) - held)
    return Whereabouts(counts, elsewhere, tokens - held - elsewhere)
