"""The tree that routers get, against dictionaries of pages: random paths come and go in each tier."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hybrid_rig import WINDOW

from sglang_ext.engine.hybrid.announced import NOWHERE, Announced
from sglang_ext.engine.hybrid.components import FULL, resume_points
from sglang_ext.keys import encode_tokens
from sglang_ext.patches.adapter.hybrid.pools import STATE
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier

PAGE, BLOCK = 2, 4
COMPONENTS = (FULL, WINDOW, STATE)
TIERS = (Tier.HBM, Tier.DRAM, Tier.DISK)
SPACE = (0, None, None)
Tokens = tuple[int, ...]
Prefix = tuple[object, bytes]


def pages_of(tokens: Tokens) -> list[Tokens]:
    """The prefix that ends with each page."""
    return [tokens[:end] for end in range(PAGE, len(tokens) + 1, PAGE)]


def name_of(prefix: Tokens) -> bytes:
    return hashlib.blake2b(repr(prefix).encode(), digest_size=16).digest()


class Model:
    """The tree under test, and for each tier and component the pages that it has."""

    def __init__(self) -> None:
        self.held = {(tier, component): set[Tokens]() for tier in TIERS for component in COMPONENTS}
        self.prompts: set[Tokens] = set()
        """Paths that HBM has had, up to the last page of which anything is left."""
        self.rows: dict[Tokens, int] = {}
        self.free = list(range(1, 4000))
        self.holders = {tier: Holder.of("one", 1, tier) for tier in TIERS}
        self.announced = Announced(RadixTree(BLOCK), self.holders, COMPONENTS, PAGE)

    def insert(self, tokens: Tokens, *, window_from: int, state: bool) -> None:
        """A path comes into HBM. window_from: the first page whose window is there."""
        pages = pages_of(tokens)
        for at, page in enumerate(pages):
            self.rows.setdefault(page, self.free.pop())
            self.held[Tier.HBM, FULL].add(page)
            if at >= window_from:
                self.held[Tier.HBM, WINDOW].add(page)
        if state:
            self.held[Tier.HBM, STATE].add(pages[-1])
        rows = {
            component: np.array(
                [self.rows[page] if page in self.held[Tier.HBM, component] else NOWHERE for page in pages],
                np.int64,
            )
            for component in COMPONENTS
        }
        self.announced.in_hbm(SPACE, list(tokens), [name_of(page) for page in pages], rows)
        self.prompts.add(tokens)
        for tier, component in self.held:
            if tier is not Tier.HBM:  # new pages that a tier has already are announced again
                there = [page for page in pages if page in self.held[tier, component]]
                self.announced.below(tier, component, [name_of(page) for page in there], True)

    def evict(self, component: str, pages: Iterable[Tokens]) -> None:
        """HBM gives up pages of a component; of `FULL` with everything else of them."""
        of = next(each for each in COMPONENTS if each.name == component)
        gone = [page for page in pages if page in self.held[Tier.HBM, of]]
        for each in COMPONENTS if of == FULL else (of,):
            rows = [self.rows[page] for page in gone if page in self.held[Tier.HBM, each]]
            self.held[Tier.HBM, each] -= set(gone)
            self.announced.left_hbm(each, np.array(rows, np.int64))
        if of == FULL:
            self.free += [self.rows.pop(page) for page in gone]

    def below(self, tier: Tier, component: str, pages: Iterable[Tokens], held: bool) -> None:
        of = next(each for each in COMPONENTS if each.name == component)
        chosen = list(pages)
        if held:
            self.held[tier, of] |= set(chosen)
        else:
            self.held[tier, of] -= set(chosen)
        self.announced.below(tier, of, [name_of(page) for page in chosen], held)

    # -- the truth ------------------------------------------------------------------------------

    def forget_ends(self) -> None:
        for tokens in list(self.prompts):
            pages = pages_of(tokens)
            while pages and not any(pages[-1] in held for held in self.held.values()):
                pages.pop()
            self.prompts.discard(tokens)
            if pages:
                self.prompts.add(pages[-1])

    def ends(self, tokens: Tokens) -> dict[Tier, int]:
        """Up to which page each tier lets a prompt resume."""
        pages = pages_of(tokens)
        found: dict[Tier, int] = {}
        near = 0
        for tier in TIERS:
            sources = TIERS[1:] if tier is Tier.DISK else (tier,)
            flags = {
                component: np.array(
                    [any(page in self.held[source, component] for source in sources) for page in pages], bool
                )
                for component in COMPONENTS
            }
            alone = int(np.flatnonzero(resume_points(flags, PAGE))[-1])
            tail = {component: each[near:] for component, each in flags.items()}
            behind = int(np.flatnonzero(resume_points(tail, PAGE))[-1])
            found[tier] = max(alone, near + behind if near and behind else 0)
            near = alone if tier is Tier.HBM else near
        return found

    def check(self) -> None:
        self.announced.publish()
        self.announced.check()
        self.forget_ends()
        truth: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}
        lasts = {
            tokens
            for tokens in self.prompts
            if not any(other[: len(tokens)] == tokens for other in self.prompts if other != tokens)
        }
        for tokens in lasts:
            for tier, end in self.ends(tokens).items():
                key = encode_tokens(list(tokens[: end * PAGE]))
                truth[tier] |= {key[: 4 * at] for at in range(BLOCK, len(key) // 4 + 1, BLOCK)}
        assert self.told() == truth

    def told(self) -> dict[Tier, set[bytes]]:
        found: dict[Tier, set[bytes]] = {tier: set() for tier in TIERS}
        roots = self.announced.tree.roots.values()
        stack = [(child, b"") for root in roots for child in root.children.values()]
        while stack:
            node, before = stack.pop()
            key = before + node.key
            for tier, holder in self.holders.items():
                if holder in node.placements:
                    ends = range(len(before) + 4 * BLOCK, len(key) + 1, 4 * BLOCK)
                    found[tier] |= {key[:end] for end in ends}
            stack += [(child, key) for child in node.children.values()]
        return found


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_dictionaries_of_pages_say(seed: int) -> None:
    rng, model = random.Random(seed), Model()
    for _ in range(250):
        known = sorted(model.prompts)
        if not known or rng.random() < 0.35:
            start: Tokens = ()
            if known and rng.random() < 0.7:
                start = rng.choice(known)
                start = start[: rng.randrange(0, len(start) + 1, PAGE)]
            tokens = start + tuple(rng.randrange(3) for _ in range(PAGE * rng.randrange(1, 9)))
            window_from = 0 if rng.random() < 0.6 else rng.randrange(len(tokens) // PAGE)
            model.insert(tokens, window_from=window_from, state=rng.random() < 0.8)
        else:
            pages = pages_of(rng.choice(known))
            some = pages[rng.randrange(len(pages)) :] if rng.random() < 0.6 else [rng.choice(pages)]
            component = rng.choice(COMPONENTS).name
            if rng.random() < 0.4:
                model.evict(component, some)
            else:
                model.below(rng.choice((Tier.DRAM, Tier.DISK)), component, some, rng.random() < 0.6)
        model.check()
    assert model.prompts


def test_a_leaf_that_is_not_judged_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: without the news of pages that have gone, the model must notice."""
    monkeypatch.setattr(Announced, "left_hbm", lambda self, component, rows: None)
    model = Model()
    model.insert(tuple(range(16)), window_from=0, state=True)
    model.check()
    model.evict("full", pages_of(tuple(range(16))))
    with pytest.raises(AssertionError):
        model.check()


def test_nothing_is_left_after_a_clear() -> None:
    model = Model()
    model.insert(tuple(range(16)), window_from=0, state=True)
    model.announced.publish()
    model.announced.clear()
    model.announced.publish()
    assert not any(model.told().values())
    model.announced.check()


def test_words_before_a_picture_are_announced_wherever_it_begins() -> None:
    """Four tokens with one of a picture among them are encoded as a group; pages have one token."""
    picture = (1 << 61) + 7
    words, pictured = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, picture, picture]
    holder = Holder.of("one", 1, Tier.HBM)
    announced = Announced(RadixTree(4), {Tier.HBM: holder}, (FULL,), 1)

    def prefixes() -> set[bytes]:
        announced.publish()
        announced.check()
        found: set[bytes] = set()
        stack = [(child, b"") for root in announced.tree.roots.values() for child in root.children.values()]
        while stack:
            node, before = stack.pop()
            key = before + node.key
            found |= {key[:end] for end in range(16, len(key) + 1, 16)}
            stack += [(child, key) for child in node.children.values()]
        return found

    def prefixes_of(*prompts: list[int]) -> set[bytes]:
        return {encode_tokens(prompt, end) for prompt in prompts for end in (4, 8)}

    announced.in_hbm(SPACE, words, (), {FULL: np.arange(1, 9)})
    announced.in_hbm(SPACE, pictured, (), {FULL: np.array([1, 2, 3, 4, 5, 6, 9, 10])})
    assert prefixes() == prefixes_of(words, pictured)
    announced.left_hbm(FULL, np.array([9, 10]))
    assert prefixes() == prefixes_of(words)
    announced.left_hbm(FULL, np.arange(1, 9))
    assert not prefixes()


def test_blocks_must_be_whole_pages() -> None:
    with pytest.raises(ValueError, match="not whole pages"):
        Announced(RadixTree(4), {}, COMPONENTS, 3)
