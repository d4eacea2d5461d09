"""Stand-ins for the router's index: tests cannot replace a method of a compiled class."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from sglang_ext.router import Router
from sglang_ext.router.index.index import Index
from sglang_ext.router.policies import Match
from sglang_ext.tiers import Tier

Matches = dict[str, Match]


class IndexView:
    """An index whose matches are changed by a function."""

    def __init__(self, index: Index, change: Callable[[Matches], Matches]) -> None:
        self._index = index
        self._change = change
        self.block_size = index.block_size

    def match(self, namespace: Hashable, key: bytes) -> Matches:
        return self._change(self._index.match(namespace, key))


def all_in_dram(matches: Matches) -> Matches:
    return {name: Match(m.tokens, m.own, below={Tier.DRAM: m.tokens}) for name, m in matches.items()}


def in_dram(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """To hints and documents, all cached KV is in DRAM."""
    see(router, monkeypatch, all_in_dram)


def see(router: Router, monkeypatch: pytest.MonkeyPatch, change: Callable[[Matches], Matches]) -> None:
    """Hints and documents see changed matches."""
    view = IndexView(router.trees, change)
    monkeypatch.setattr(router.advisor.preparer, "_trees", view)
    monkeypatch.setattr(router.documents, "_trees", view)
