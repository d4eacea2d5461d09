"""After a restart, routers know by the names of pages what is on disk, and where it lets a prompt resume."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_drafts import GRID as DRAFTED_GRID
from engine_drafts import PAGED_WINDOW
from engine_hybrids import SCENARIOS, HybridScenario
from engine_page_pools import COMPRESSED
from test_oracle_rebuilt_disk import OnDisk, server
from test_oracle_store import BOTH, PAGED, STATES

from sglang_ext.engine.hybrid.components import FULL
from sglang_ext.engine.hybrid.names import PartNames, naming_of_pages
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.hybrid.build_cluster import names_below
from sglang_ext.patches.adapter.hybrid.linker import names_of_prompt
from sglang_ext.protocol.agent import (
    FROM_AGENT,
    Cleared,
    Hello,
    NamesRemoved,
    NamesStored,
    Pages,
    PlacementEvent,
    Welcome,
)
from sglang_ext.radix_global.sync.runs import packed
from sglang_ext.radix_global.sync.stream import EventStream
from sglang_ext.router.index.index import Index
from sglang_ext.router.index.page_names import PageNames
from sglang_ext.router.policies.base import Role
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.tiers import Tier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

BLOCK = 16
GRID = next(each for each in SCENARIOS if each.name == "window and states on a grid, page 16, overlap")
KINDS = [PAGED, STATES, BOTH, GRID, PAGED_WINDOW, DRAFTED_GRID, COMPRESSED]
TENANTS: list[dict[str, str]] = [{}, {"extra_key": "a"}, {"extra_key": "b"}]
Asked = tuple[list[int], dict[str, str]]


def block_of(scenario: HybridScenario) -> int:
    """Tokens of a block of the router's index: whole pages."""
    return max(BLOCK, scenario.kind.page)


def prompts(seed: int, scenario: HybridScenario) -> list[Asked]:
    """Prompts of two tenants and of none, some of which begin alike."""
    block = block_of(scenario)
    rng, found = random.Random(seed), list[Asked]()
    for tenant in TENANTS:
        start = [rng.randrange(5) for _ in range(3 * block)]
        for fork in (block, 2 * block, 3 * block):
            found.append((start[:fork] + [rng.randrange(5) for _ in range(2 * block)], tenant))
    return found


class Known:
    """A router's index of one instance, which is brought up to date at once."""

    def __init__(self, below: OnDisk, block: int) -> None:
        self.below, self.block = below, block
        self.pairs = below._cache.tree_core.is_eagle
        weights = below._weights
        self.names = names_below(below.store, lambda: weights.generation == 0)[Tier.DISK]
        self.index = Index(FakeClock(), block_size=block)
        self.stream = EventStream("a", b"e" * 16, block, naming_of_pages(below.store, "0", pairs=self.pairs))
        self.index.attach("a", Role.COLOCATED)
        self.index.on_heartbeat("a", alive=True)
        self.names.watch(self._changed)
        sends, number = self.stream.hello(b"r", Hello("r"))
        assert number is not None
        self.receive([*sends, *self.stream.begin(number)])
        for listed in self.listed():
            self.receive(self.stream.part(number, [NamesStored(Tier.DISK.level, n) for n in packed(listed)]))
        self.receive(self.stream.end(number))

    def listed(self) -> Iterator[list[bytes]]:
        place: bytes | None = b""
        while place is not None:
            names, place = self.names.names_after(place, 7)
            yield names

    def receive(self, sends: Any) -> None:
        for _, data in sends:
            message = FROM_AGENT.decode(data)
            if isinstance(message, Welcome):
                self.index.began("a", message.epoch, message.naming)
            else:
                self.index.apply("a", message)  # type: ignore[arg-type]

    def _changed(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        events: list[PlacementEvent] = [NamesStored(Tier.DISK.level, names) for names in packed(stored)]
        self.receive(
            self.stream.publish(
                [*events, *[NamesRemoved(Tier.DISK.level, names) for names in packed(removed)]]
            )
        )

    def said(self, tokens: list[int], tenant: dict[str, str]) -> int:
        """Tokens of a prompt that the router takes to be on disk."""
        namespace = ("tokens", None, tenant.get("extra_key"), tenant.get("cache_salt"))
        match = self.index.match(namespace, encode_tokens(tokens)).get("a")
        return 0 if match is None else match.below[Tier.DISK]

    def page_names(self, tokens: list[int], tenant: dict[str, str]) -> list[bytes]:
        space = (0, tenant.get("extra_key"), tenant.get("cache_salt"))
        return names_of_prompt(space, encode_tokens(tokens), self.below.store.block_tokens, pairs=self.pairs)

    def truth(self, tokens: list[int], tenant: dict[str, str]) -> int:
        """After how many tokens, whole blocks, the disk lets a prompt resume; DRAM is empty."""
        store = self.below.store
        points = store._points(self.page_names(tokens, tenant), on_disk=True)
        ends = [point * store.block_tokens for point in points]
        return max((end for end in ends if end % self.block == 0), default=0)

    def agrees(self, asked: Sequence[Asked]) -> list[int]:
        """Compare each prompt and a longer one; returns the tokens that are on disk."""
        for tokens, tenant in asked:
            longer = [*tokens, 1, 2, 3]
            assert self.said(tokens, tenant) == self.truth(tokens, tenant)
            assert self.said(longer, tenant) == self.truth(longer, tenant)
        return [self.said(*each) for each in asked]


@contextmanager
def restarted(scenario: HybridScenario, folder: Path, asked: Sequence[Asked]) -> Iterator[Any]:
    """A server with prompts on disk that a former process has written."""
    with server(scenario, folder) as rank:
        for tokens, tenant in asked:
            rank.serve(tokens, **tenant)
            rank.settle()
    with server(scenario, folder) as again:
        again.look_inside = False
        yield again


@pytest.mark.parametrize("scenario", KINDS, ids=str)
def test_routers_know_at_once_what_the_disk_lets_a_prompt_resume(
    scenario: HybridScenario, tmp_path: Path
) -> None:
    asked = prompts(3, scenario)
    with restarted(scenario, tmp_path, asked) as rank:
        known = Known(rank.below, block_of(rank.scenario))
        said = known.agrees(asked)
        assert sum(count > 0 for count in said) > len(asked) // 2
        assert not known.said(asked[0][0], {"cache_salt": "other"})
        for (tokens, tenant), count in zip(asked, said, strict=True):
            before = rank.scheduler.disk_tokens
            req = rank.serve([*tokens, 1, 2, 3], **tenant)
            assert req.cached_tokens >= count
            assert not count or rank.scheduler.disk_tokens >= before


@pytest.mark.parametrize("scenario", KINDS, ids=str)
def test_what_leaves_the_disk_later_is_known(scenario: HybridScenario, tmp_path: Path) -> None:
    asked, rng = prompts(4, scenario), random.Random(4)
    with restarted(scenario, tmp_path, asked) as rank:
        known = Known(rank.below, block_of(rank.scenario))
        before = known.agrees(asked)
        for tokens, tenant in asked:
            names, parts = known.page_names(tokens, tenant), list(rank.below.store.parts.values())
            part = rng.choice(parts)
            assert part.disk is not None
            part.disk.tier.drop(
                part.disk.namespace(), [rng.choice(names) if part.component == FULL else names[-1]]
            )
            known.agrees(asked)
        assert sum(known.agrees(asked)) < sum(before)


@pytest.mark.parametrize("scenario", KINDS, ids=str)
def test_one_wrong_byte_of_a_name_is_noticed(
    scenario: HybridScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: each listed name has one damaged byte."""
    asked = prompts(5, scenario)
    right = PartNames.names_after

    def damaged(names: PartNames, place: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        found, following = right(names, place, limit)
        return [bytes((name[0] ^ 1,)) + name[1:] for name in found], following

    monkeypatch.setattr(PartNames, "names_after", damaged)
    with restarted(scenario, tmp_path, asked) as rank, pytest.raises(AssertionError):
        Known(rank.below, block_of(rank.scenario)).agrees(asked)


def test_names_are_those_of_the_weights_of_the_start(tmp_path: Path) -> None:
    asked = prompts(6, PAGED)
    with restarted(PAGED, tmp_path, asked) as rank:
        known = Known(rank.below, block_of(rank.scenario))
        assert any(known.agrees(asked))
        known.receive(known.stream.publish([Cleared("0")]))
        assert any(known.agrees(asked)), "a flush of memory leaves the disk"
        rank.cache.weights_changing()
        known.receive(known.stream.publish([Cleared("1")]))
        assert not any(known.said(*each) for each in asked)
        rank.cache.weights_changed()
        assert not any(known.listed()), "a router that connects now"
        rank.serve(asked[0][0])
        rank.settle()
        assert not known.index._known["a"].replica.named


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("tenant", [(None, None), ("a", None), (None, "s"), ("a", "ü"), ("", "s")])
def test_names_of_router_and_engine_are_the_same(
    tenant: tuple[str | None, str | None], page: int, pairs: bool
) -> None:
    key = encode_tokens([at * 7919 % 50000 for at in range(64 + pairs)])
    names = PageNames(tenant, key, Pages(page, (), pairs))
    assert names.resumable(16, 0, lambda name: True) == 4
    right = names_of_prompt((0, *tenant), key, page, pairs=pairs)
    assert len(right) == 64 // page
    assert names.ends(16, 0, 4) == right[16 // page - 1 :: 16 // page]


def test_a_prompt_has_names_up_to_its_first_picture() -> None:
    picture = [1, 2, 3, 4, *[(1 << 61) + 7] * 4, *range(8)]
    assert (
        PageNames((None, None), encode_tokens(picture), Pages(2, ())).resumable(4, 0, lambda name: True) == 1
    )
