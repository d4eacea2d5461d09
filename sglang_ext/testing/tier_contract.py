"""The conformance suite of block tiers. A tier from anywhere proves itself by passing it:

    class TestMyTier(TierContract):
        def open_tier(self, layout, capacity, tmp_path):
            return MyTier(layout, capacity * layout.block_bytes)

`capacity` is how many blocks the tier should be able to hold; holding more, by rounding, is fine.
"""

from __future__ import annotations

import abc
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.geometry import BlockLayout
from sglang_ext.testing.blocks import (
    LAYOUT,
    NAMESPACE,
    OTHER,
    block_key,
    contents,
    get_all,
    memory_of,
    prefix_keys,
    put_all,
    read_all,
    write_all,
)
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, LayerRead, Outcome, Put

CAPACITY = 24


class TierContract(abc.ABC):
    """Subclass, implement `open_tier`, and let pytest collect it."""

    @abc.abstractmethod
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        """A new tier; a durable tier opens the blocks that an earlier one left at `tmp_path`."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[BlockTier]:
        tier = self.open_tier(LAYOUT, CAPACITY, tmp_path)
        yield tier
        assert tier.stats().pins == 0
        tier.check()
        tier.close()

    def test_what_was_put_is_got(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 5)
        assert tier.match(NAMESPACE, keys) == 0
        assert get_all(tier, NAMESPACE, keys) == 0
        assert put_all(tier, NAMESPACE, keys) is Outcome.DONE
        assert tier.match(NAMESPACE, keys) == 5
        assert get_all(tier, NAMESPACE, keys) == 5
        stats = tier.stats()
        assert (stats.blocks, stats.pins) == (5, 0)
        assert 0 < stats.used_bytes <= stats.limit_bytes
        assert (stats.put[Outcome.DONE], stats.got[Outcome.DONE], stats.got[Outcome.ABSENT]) == (5, 5, 5)

    def test_nothing_is_visible_before_complete(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 3)
        put = tier.prepare_put(NAMESPACE, keys)
        assert isinstance(put, Put)
        assert put.missing == (0, 1, 2)
        memory, _ = memory_of(tier.layout, NAMESPACE, keys)
        for layer in range(tier.layout.n_layers):
            assert tier.match(NAMESPACE, keys) == 0
            assert tier.put_layer(put, layer, memory, np.arange(3)) is Outcome.DONE
        assert tier.match(NAMESPACE, keys) == 0
        tier.check()
        assert tier.complete_puts([put]) == [Outcome.DONE]
        assert tier.match(NAMESPACE, keys) == 3

    def test_each_block_is_held_by_itself(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 5)
        assert tier.held(NAMESPACE, []) == []
        assert put_all(tier, NAMESPACE, keys) is Outcome.DONE
        others = prefix_keys(2, 2)
        assert tier.held(NAMESPACE, [others[0], *keys[3:], others[1], keys[0]]) == [
            *(False, True, True, False, True)
        ]
        assert tier.drop(NAMESPACE, keys[1:2]) == 1
        assert tier.held(NAMESPACE, keys) == [True, False, True, True, True]
        assert tier.held(OTHER, keys) == [False] * 5

    def test_an_aborted_put_leaves_nothing(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 3)
        for layers in range(tier.layout.n_layers + 1):
            put = tier.prepare_put(NAMESPACE, keys)
            assert isinstance(put, Put)
            memory, _ = memory_of(tier.layout, NAMESPACE, keys)
            for layer in range(layers):
                tier.put_layer(put, layer, memory, np.arange(3))
            tier.abort_put(put)
            tier.check()
        assert tier.match(NAMESPACE, keys) == 0
        assert tier.stats().blocks == 0
        assert put_all(tier, NAMESPACE, keys) is Outcome.DONE
        assert get_all(tier, NAMESPACE, keys) == 3

    def test_a_put_must_be_whole(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 2)
        put = tier.prepare_put(NAMESPACE, keys)
        assert isinstance(put, Put)
        memory, _ = memory_of(tier.layout, NAMESPACE, keys)
        tier.put_layer(put, 0, memory, np.arange(2))
        with pytest.raises(ValueError, match="layers"):
            tier.complete_puts([put])
        assert tier.match(NAMESPACE, keys) == 0
        tier.abort_put(put)

    def test_several_puts_complete_together(self, tier: BlockTier) -> None:
        puts = []
        for prefix in (1, 2, 3):
            put = tier.prepare_put(NAMESPACE, prefix_keys(prefix, 3))
            assert isinstance(put, Put)
            memory, _ = memory_of(tier.layout, NAMESPACE, put.wanted)
            for layer in range(tier.layout.n_layers):
                assert tier.put_layer(put, layer, memory, np.arange(3)) is Outcome.DONE
            puts.append(put)
        assert tier.complete_puts(puts) == [Outcome.DONE] * 3
        assert [get_all(tier, NAMESPACE, prefix_keys(prefix, 3)) for prefix in (1, 2, 3)] == [3, 3, 3]
        assert tier.complete_puts([]) == []

    def test_only_what_is_missing_is_wanted(self, tier: BlockTier) -> None:
        assert put_all(tier, NAMESPACE, prefix_keys(1, 3)) is Outcome.DONE
        put = tier.prepare_put(NAMESPACE, prefix_keys(1, 6))
        assert isinstance(put, Put)
        assert (put.missing, put.refused) == ((3, 4, 5), ())
        assert put.wanted == tuple(prefix_keys(1, 6, start=3))
        assert write_all(tier, put) is Outcome.DONE
        again = tier.prepare_put(NAMESPACE, prefix_keys(1, 6))
        assert isinstance(again, Put)
        assert again.missing == ()
        assert tier.complete_puts([again]) == [Outcome.DONE]
        assert get_all(tier, NAMESPACE, prefix_keys(1, 6)) == 6
        assert tier.stats().blocks == 6

    def test_two_puts_of_the_same_block_leave_one(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 3)
        first = tier.prepare_put(NAMESPACE, keys)
        second = tier.prepare_put(NAMESPACE, keys)
        assert isinstance(first, Put)
        assert isinstance(second, Put)
        assert write_all(tier, first) is Outcome.DONE
        assert write_all(tier, second) is Outcome.DONE
        assert tier.stats().blocks == 3
        assert get_all(tier, NAMESPACE, keys) == 3
        tier.check()

    def test_match_ends_at_the_first_hole(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 6)
        put_all(tier, NAMESPACE, keys)
        assert tier.drop(NAMESPACE, [keys[3], block_key(9, 9)]) == 1
        assert tier.match(NAMESPACE, keys) == 3
        assert get_all(tier, NAMESPACE, keys) == 3
        assert get_all(tier, NAMESPACE, keys[4:]) == 2
        put = tier.prepare_put(NAMESPACE, keys)
        assert isinstance(put, Put)
        assert put.missing == (3,)
        assert write_all(tier, put) is Outcome.DONE
        assert get_all(tier, NAMESPACE, keys) == 6

    def test_namespaces_do_not_leak(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 4)
        put_all(tier, NAMESPACE, keys)
        assert tier.match(OTHER, keys) == 0
        assert get_all(tier, OTHER, keys) == 0
        assert put_all(tier, OTHER, keys[:2]) is Outcome.DONE
        assert get_all(tier, OTHER, keys) == 2
        assert get_all(tier, NAMESPACE, keys) == 4
        assert tier.drop(OTHER, keys) == 2
        assert get_all(tier, NAMESPACE, keys) == 4
        put_all(tier, OTHER, keys)
        assert tier.clear(NAMESPACE) == 4
        assert tier.match(NAMESPACE, keys) == 0
        assert get_all(tier, OTHER, keys) == 4
        assert tier.clear() == 4
        assert tier.stats().blocks == 0

    def test_a_part_of_the_prefix_can_be_read(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 5)
        put_all(tier, NAMESPACE, keys)
        get = tier.prepare_get(NAMESPACE, keys)
        blocks = np.zeros((9, tier.layout.block_bytes), dtype=np.uint8)
        memory = BlockMemory.of_blocks(tier.layout, blocks)
        for layer in range(tier.layout.n_layers):
            read = tier.get_layer(get, layer, memory, np.array([7, 2, 4]))
            assert read == LayerRead(3, Outcome.DONE)
        tier.complete_get(get)
        for row, key in zip((7, 2, 4), keys, strict=False):
            assert np.array_equal(blocks[row], contents(tier.layout, NAMESPACE, key))
        assert not blocks[[0, 1, 3, 5, 6, 8]].any()

    def test_layers_come_one_by_one(self, tier: BlockTier) -> None:
        """Through a staging buffer that holds one layer at a time."""
        keys = prefix_keys(1, 4)
        put_all(tier, NAMESPACE, keys)
        size = max(tier.layout.layer_bytes(i) for i in range(tier.layout.n_layers))
        memory = BlockMemory.of_staging(tier.layout, np.zeros(4 * size, dtype=np.uint8), 4)
        get = tier.prepare_get(NAMESPACE, keys)
        offsets = tier.layout.layer_offsets
        for layer in (2, 0, 1):
            assert tier.get_layer(get, layer, memory, np.arange(4)).blocks == 4
            for row, key in zip(memory.layers[layer], keys, strict=False):
                wanted = contents(tier.layout, NAMESPACE, key)[offsets[layer] : offsets[layer + 1]]
                assert np.array_equal(row, wanted)
        tier.complete_get(get)

    def test_pinned_blocks_survive_drop_and_clear(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 4)
        put_all(tier, NAMESPACE, keys)
        first = tier.prepare_get(NAMESPACE, keys)
        second = tier.prepare_get(NAMESPACE, keys)
        assert tier.drop(NAMESPACE, keys[:2]) == 2
        assert tier.clear() == 2
        assert tier.match(NAMESPACE, keys) == 0
        tier.check()
        for get in (first, second):
            count, blocks, outcome = read_all(tier, get)
            assert (count, outcome) == (4, Outcome.DONE)
            assert all(
                np.array_equal(row, contents(tier.layout, NAMESPACE, key))
                for row, key in zip(blocks, keys, strict=True)
            )
            tier.complete_get(get)
        assert tier.stats().blocks == 0
        assert put_all(tier, NAMESPACE, keys) is Outcome.DONE
        assert get_all(tier, NAMESPACE, keys) == 4

    def test_more_than_fits_evicts_the_least_used(self, tier: BlockTier) -> None:
        hot = prefix_keys(0, 3)
        put_all(tier, NAMESPACE, hot)
        outcomes = set()
        for prefix in range(1, 40):
            outcomes.add(put_all(tier, NAMESPACE, prefix_keys(prefix, 4)))
            assert get_all(tier, NAMESPACE, hot) == 3, "a prefix in constant use was evicted"
            assert tier.stats().used_bytes <= tier.stats().limit_bytes
        tier.check()
        assert outcomes == {Outcome.DONE}
        assert tier.stats().evicted > 0
        held = [get_all(tier, NAMESPACE, prefix_keys(prefix, 4)) for prefix in range(1, 40)]
        assert 0 in held[:20], "nothing old is gone"
        assert held[-1] == 4

    def test_pinned_blocks_are_not_evicted(self, tier: BlockTier) -> None:
        keys = prefix_keys(0, 6)
        put_all(tier, NAMESPACE, keys)
        get = tier.prepare_get(NAMESPACE, keys)
        for prefix in range(1, 30):
            put_all(tier, NAMESPACE, prefix_keys(prefix, 4))
        count, blocks, outcome = read_all(tier, get)
        assert (count, outcome) == (6, Outcome.DONE)
        assert np.array_equal(blocks[5], contents(tier.layout, NAMESPACE, keys[5]))
        tier.complete_get(get)

    def test_a_put_larger_than_the_tier_is_refused_or_cut(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 40 * CAPACITY)
        put = tier.prepare_put(NAMESPACE, keys)
        outcome = put if isinstance(put, Outcome) else write_all(tier, put)
        assert outcome in (Outcome.DONE, Outcome.FULL)
        if isinstance(put, Put):
            assert sorted((*put.missing, *put.refused)) == list(range(len(keys)))
            assert put.refused
        assert tier.stats().put[Outcome.FULL] > 0
        assert tier.stats().used_bytes <= tier.stats().limit_bytes
        get_all(tier, NAMESPACE, keys)

    def test_broken_contracts_are_named(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 2)
        put_all(tier, NAMESPACE, keys)
        memory, _ = memory_of(tier.layout, NAMESPACE, keys)
        other_layout = BlockLayout(4, ((32, 16), (24, 24), (40,)))
        other, _ = memory_of(other_layout, NAMESPACE, keys)
        get = tier.prepare_get(NAMESPACE, keys)
        put = tier.prepare_put(NAMESPACE, prefix_keys(2, 2))
        assert isinstance(put, Put)
        ids = np.arange(2)
        for bad in (
            lambda: tier.get_layer(get, 3, memory, ids),
            lambda: tier.get_layer(get, 0, other, ids),
            lambda: tier.get_layer(get, 0, memory, np.arange(3)),
            lambda: tier.get_layer(get, 0, memory, np.array([0, 2])),
            lambda: tier.put_layer(put, -1, memory, ids),
            lambda: tier.put_layer(put, 0, memory, np.arange(1)),
            lambda: tier.put_layer(put, 0, memory, np.array([0, -1])),
            lambda: tier.put_layer(put, 0, other, ids),
        ):
            with pytest.raises(ValueError, match=r"."):
                bad()
        tier.complete_get(get)
        tier.abort_put(put)
        for ended in (
            lambda: tier.complete_get(get),
            lambda: tier.get_layer(get, 0, memory, ids),
            lambda: tier.abort_put(put),
            lambda: tier.put_layer(put, 0, memory, ids),
            lambda: tier.complete_puts([put]),
        ):
            with pytest.raises(ValueError, match="ended"):
                ended()

    def test_a_closed_tier_finds_nothing_and_takes_nothing(self, tier: BlockTier) -> None:
        keys = prefix_keys(1, 2)
        put_all(tier, NAMESPACE, keys)
        tier.close()
        tier.close()
        assert tier.match(NAMESPACE, keys) == 0
        assert tier.prepare_put(NAMESPACE, keys) is Outcome.CLOSED
        get = tier.prepare_get(NAMESPACE, keys)
        assert get.blocks == 0
        tier.complete_get(get)

    @pytest.mark.parametrize("seed", range(3))
    def test_random_use_agrees_with_a_dict(self, tier: BlockTier, seed: int) -> None:
        """Lookups find only keys that were put, and return the right bytes."""
        choose = random.Random(seed)
        put: set[tuple[bytes, bytes]] = set()
        held: list[Get] = []
        for _ in range(250):
            namespace = choose.choice((NAMESPACE, OTHER))
            keys = prefix_keys(choose.randrange(5), choose.randrange(1, 9))
            action = choose.random()
            if action < 0.45:
                if put_all(tier, namespace, keys) is Outcome.DONE:
                    put |= {(namespace, key) for key in keys}
            elif action < 0.75:
                count = get_all(tier, namespace, keys)
                assert all((namespace, key) in put for key in keys[:count])
            elif action < 0.85:
                tier.drop(namespace, keys)
                put -= {(namespace, key) for key in keys}
                assert tier.match(namespace, keys) == 0
            elif action < 0.87:
                tier.clear(namespace)
                put = {full for full in put if full[0] != namespace}
            elif action < 0.93 and len(held) < 3:
                held.append(tier.prepare_get(namespace, keys))
            elif held:
                get = held.pop(choose.randrange(len(held)))
                count, blocks, outcome = read_all(tier, get)
                assert outcome is Outcome.DONE
                for row, key in zip(blocks, get.keys[:count], strict=True):
                    assert np.array_equal(row, contents(tier.layout, get.namespace, key))
                tier.complete_get(get)
            tier.check()
            assert tier.stats().blocks <= len(put)
        for get in held:
            tier.complete_get(get)

    def test_many_threads(self, tier: BlockTier) -> None:
        """Threads put, get and drop the same prefixes at once; every byte that is found is right."""
        failures: list[BaseException] = []
        found = [0]

        def work(seed: int) -> None:
            choose = random.Random(seed)
            try:
                for _ in range(60):
                    keys = prefix_keys(choose.randrange(3), choose.randrange(1, 7))
                    action = choose.random()
                    if action < 0.4:
                        put_all(tier, NAMESPACE, keys)
                    elif action < 0.9:
                        found[0] += get_all(tier, NAMESPACE, keys)
                    else:
                        tier.drop(NAMESPACE, keys[-1:])
            except BaseException as error:  # noqa: BLE001 - carried to the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert failures == []
        assert found[0] > 0


class DurableTierContract(TierContract):
    """The suite for tiers whose blocks survive them: `open_tier` opens the blocks that an earlier tier left
    at `tmp_path`.
    """

    def test_it_is_found_again(self, tier: BlockTier, tmp_path: Path) -> None:
        assert tier.durable
        keys = prefix_keys(1, 5)
        put_all(tier, NAMESPACE, keys)
        put_all(tier, OTHER, keys[:2])
        put_all(tier, OTHER, prefix_keys(2, 2))
        tier.drop(OTHER, prefix_keys(2, 2))
        tier.close()
        for _ in range(2):
            again = self.open_tier(LAYOUT, CAPACITY, tmp_path)
            try:
                assert again.stats().blocks == 7
                assert get_all(again, NAMESPACE, keys) == 5
                assert get_all(again, OTHER, keys) == 2
                assert get_all(again, OTHER, prefix_keys(2, 2)) == 0
                again.check()
            finally:
                again.close()
