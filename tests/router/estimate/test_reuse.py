"""Stack distances against LRU caches of each size, played one by one."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from sglang_ext.router.estimate.arrivals import Arrival
from sglang_ext.router.estimate.fleet import Instances, Tiers
from sglang_ext.router.estimate.reuse import Curve, Stack, found_within


class Cache:
    """An LRU cache of blocks; of one prompt, the last blocks are the oldest."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[object, None] = OrderedDict()

    def use(self, names: Sequence[object]) -> int:
        found = 0
        for name in names:
            if name not in self._blocks:
                break
            found += 1
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._size:
            self._blocks.popitem(last=False)
        return found


def prompts(seed: int, count: int) -> list[list[tuple[int, ...]]]:
    """Conversations that grow, and forks of them. A block is its whole prefix."""
    rng = random.Random(seed)
    texts: list[tuple[int, ...]] = [(rng.randrange(3),)]
    found = []
    for _ in range(count):
        text = rng.choice(texts[-12:])
        text = text[: rng.randrange(1, len(text) + 1)] if rng.random() < 0.4 else text
        text = (*text, *(rng.randrange(3) for _ in range(rng.randrange(5))))[:40]
        texts.append(text)
        found.append([text[: at + 1] for at in range(len(text))])
    return found


@pytest.mark.parametrize("seed", range(4))
def test_each_size_finds_what_its_cache_finds(seed: int, monkeypatch) -> None:
    monkeypatch.setattr("sglang_ext.router.estimate.reuse.FIRST_SIZE", 8)  # it grows, too
    asked = prompts(seed, 300)
    stack, curve = Stack(), Curve()
    caches = {size: Cache(size) for size in (1, 2, 5, 17, 60, 200, 10_000)}
    totals = dict.fromkeys(caches, 0)
    for names in asked:
        runs = stack.use(names)
        curve.add(runs)
        for size, cache in caches.items():
            found = cache.use(names)
            totals[size] += found
            assert found_within(runs, size) == found
    assert {size: curve.found(size) for size in caches} == totals
    assert curve.most == totals[10_000] > totals[60] > totals[5]
    assert stack.blocks == len({name for names in asked for name in names})


def test_a_turn_finds_the_answer_before_it_whose_names_were_not_known() -> None:
    stack = Stack()
    first = [("a", 0), ("a", 1)]
    stack.use(first, answer=2)
    stack.use([("b", 0)])
    assert stack.blocks == 5
    runs = stack.use([*first, ("a", 2), ("a", 3), ("a", 4)])
    assert [(run.before, run.blocks) for run in runs] == [(1, 2), (3, 2)]
    assert stack.blocks == 6
    assert found_within(runs, 4) == 3
    # A prompt that forks before the answer does not find it.
    stack.use([("c", 0)], answer=1)
    assert found_within(stack.use([("c", 1)]), 100) == 0


def arrival(names: Sequence[object], tokens: int, answer: int = 0) -> Arrival:
    return Arrival(None, names, tokens, answer)


def test_a_prompt_goes_where_most_of_it_is_and_the_last_token_is_computed() -> None:
    names = [("a", 0), ("a", 1)]
    fleet = Instances(2, by_prefix=True)
    first, _ = fleet.use(arrival(names, 8), 4)
    other, _ = fleet.use(arrival([("b", 0)], 4), 4)
    assert other != first
    again, runs = fleet.use(arrival(names, 8), 4)
    assert again == first
    assert sum(run.blocks for run in runs) == 1  # 8 tokens, of which the last is computed
    assert sum(run.blocks for run in fleet.use(arrival(names, 9), 4)[1]) == 2
    turns = Instances(2, by_prefix=False)
    assert [turns.use(arrival(names, 8), 4)[0] for _ in range(4)] == [1, 0, 1, 0]


def test_a_lower_tier_has_what_is_above() -> None:
    stack = Stack()
    names = [("a", at) for at in range(10)]
    stack.use(names)
    runs = stack.use(names)
    assert Tiers(hbm=4).found(runs, 10) == (4, 0, 0)
    assert Tiers(hbm=4, dram=7).found(runs, 10) == (4, 3, 0)
    assert Tiers(hbm=4, dram=2, disk=9).found(runs, 10) == (4, 0, 5)
    assert Tiers(hbm=4, dram=7, disk=20).found(runs, 6) == (4, 2, 0)
