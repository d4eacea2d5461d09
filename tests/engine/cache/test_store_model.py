"""HBM, DRAM and disk of a rank against a dict of the computed blocks, over a disk that fails at random.

A block that a request has computed is in HBM, in DRAM or on disk until the caches are emptied, unless
something that the caches count has taken its copies: DRAM had no room for it, or the disk refused it or lost
it. The content of every tier is right, always: `Rank.check` compares every row with the oracle after each
pass.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, finish
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.keys import TOKEN_BYTES, block_keys, encode_tokens
from sglang_ext.radix_global import Node
from sglang_ext.testing.tiers import FaultyTier, MemoryTier
from sglang_ext.tiered_store.tier import BlockTier, Outcome

pytestmark = pytest.mark.usefixtures("sglang_config")

BLOCK = 4
STEP = BLOCK * TOKEN_BYTES
Name = tuple[bytes, bytes]
"""A block on disk: the digest of its namespace, and its key."""


class NotingWriteDown(WriteDown):
    """Remembers the blocks for which DRAM had no room."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.left_out: list[tuple[object, bytes]] = []

    def to_dram(self, node: Node, blocks: int = 0, *, always: bool = False) -> bool:
        started = super().to_dram(node, blocks, always=always)
        while node.parent is not None and self._dram not in node.placements:
            self.left_out.append((node.namespace, key_of(node)))
            node = node.parent
        return started


def key_of(node: Node) -> bytes:
    parts = []
    while node.parent is not None:
        parts.append(node.key)
        node = node.parent
    return b"".join(reversed(parts))


def note_refusals(writes: DiskWrites, refused: set[Name]) -> None:
    """Record the blocks that the disk refused."""
    complete = writes._complete

    def noting(write: Any, durable: int) -> None:
        for key, outcome in zip(write.written.keys, write.written.outcomes, strict=True):
            if outcome is not Outcome.DONE:
                refused.add((write.written.namespace, key))
        complete(write, durable)

    writes._complete = noting  # type: ignore[method-assign]


class StoreModel(RuleBasedStateMachine):
    """See the module's docstring."""

    rate = st.sampled_from([0.0, 0.05, 0.2])

    def __init__(self) -> None:
        super().__init__()
        self.rank: Rank | None = None
        self.kept: set[tuple[object, bytes]] = set()
        """Every whole prefix that was computed: its last block has to be somewhere."""
        self.refused: set[Name] = set()
        self.weights = 0

    @initialize(data=st.data(), seed=st.integers(0, 2**16), dram=st.integers(24, 90), stream=st.booleans())
    def begin(self, data: st.DataObject, seed: int, dram: int, stream: bool) -> None:
        self.start(seed, data.draw(self.rate), dram, stream)

    def start(self, seed: int, rate: float, dram: int, stream: bool) -> None:
        def faulty(_: BlockTier) -> BlockTier:
            self.disk = FaultyTier(self.inner, seed=seed, rate=rate)
            return self.disk

        scenario = Scenario(
            "model",
            hbm_tokens=240,
            dram_blocks=dram,
            disk_blocks=1,
            threaded=stream,
            stream=stream,
            settings=Settings(overlap=seed % 2 == 0, new_token_ratio=0.05),
        )
        layout = Rank.layout_of(scenario)
        self.inner = MemoryTier(layout, 100_000)
        pace = random.Random(seed) if seed % 3 else None
        self.rank = Rank(scenario, pace=pace, write_down_class=NotingWriteDown, disk_class=faulty)
        assert self.rank.writes is not None
        note_refusals(self.rank.writes, self.refused)

    def teardown(self) -> None:
        if self.rank is not None:
            try:
                finish(self.rank)
                assert self.inner.stats().pins == 0
            finally:
                self.rank.close()

    # -- steps ----------------------------------------------------------------------------------

    @rule(session=st.integers(0, 3), blocks=st.integers(1, 24), salt=st.sampled_from([None, None, "tenant"]))
    def ask(self, session: int, blocks: int, salt: str | None) -> None:
        """A turn: prompts of a session continue each other."""
        assert self.rank is not None
        tokens = [(session * 31 + i * i) % 5 for i in range(blocks * BLOCK + 1)]
        req = self.rank.serve(tokens, new_tokens=1 + blocks % 5, salt=salt)
        key = encode_tokens([*req.origin_input_ids, *req.output_ids[:-1]])
        namespace = (self.weights, None, salt)
        self.kept |= {(namespace, key[:end]) for end in range(STEP, len(key) // STEP * STEP + 1, STEP)}

    @rule(session=st.integers(0, 3), blocks=st.integers(1, 24))
    def hint(self, session: int, blocks: int) -> None:
        assert self.rank is not None
        prefetcher = self.rank.cache.find(Prefetcher)
        assert prefetcher is not None
        tokens = [(session * 31 + i * i) % 5 for i in range(blocks * BLOCK)]
        prefetcher.prefetch(f"s{session}", tokens)

    @rule(passes=st.integers(1, 6))
    def idle(self, passes: int) -> None:
        assert self.rank is not None
        for _ in range(passes):
            self.rank.scheduler.step()
            self.rank.check()

    @rule(tokens=st.integers(1, 240))
    def need_memory(self, tokens: int) -> None:
        assert self.rank is not None
        self.rank.cache.evict(EvictParams(num_tokens=tokens))

    @rule()
    def catch_up(self) -> None:
        assert self.rank is not None
        self.rank.settle()

    @rule()
    def new_weights(self) -> None:
        assert self.rank is not None
        self.rank.scheduler.change_weights()
        self.weights = self.rank.scheduler.weights

    @precondition(lambda self: self.rank is not None and self.rank.scheduler.idle)
    @rule()
    def flush(self) -> None:
        assert self.rank is not None
        assert self.rank.scheduler.flush()
        self.kept.clear()

    # -- invariants -----------------------------------------------------------------------------

    @invariant()
    def never_nowhere(self) -> None:
        rank = self.rank
        if rank is None:
            return
        rank.check()
        assert isinstance(rank.write_down, NotingWriteDown)
        assert rank.writes is not None
        left_out = set(rank.write_down.left_out)
        for namespace, key in self.kept:
            blocks = len(key) // STEP
            held = rank.tree.holders(namespace, key)
            if any(tokens >= blocks * BLOCK for tokens in held.values()):
                continue
            digest = rank.writes.names.digest(namespace)
            name = (digest, block_keys(digest, key, BLOCK)[-1])
            if self.inner.match(digest, [name[1]]):
                continue
            excused = name in self.disk.lost or self.may_be_lost(name, (namespace, key), left_out)
            assert excused, f"block {blocks - 1} of a prompt in {namespace} is nowhere: {rank.cache!r}"

    def may_be_lost(
        self, name: Name, block: tuple[object, bytes], left_out: set[tuple[object, bytes]]
    ) -> bool:
        namespace, key = block
        if name in self.refused:
            return True
        return any(space == namespace and other.startswith(key) for space, other in left_out)


class HealthyStoreModel(StoreModel):
    """A disk without a fault that keeps up: nothing may be lost at all, however small HBM and DRAM are."""

    def start(self, seed: int, rate: float, dram: int, stream: bool) -> None:
        super().start(seed, 0.0, max(dram, 70), stream)

    @rule(session=st.integers(0, 3), blocks=st.integers(1, 24), salt=st.sampled_from([None, None, "tenant"]))
    def ask(self, session: int, blocks: int, salt: str | None) -> None:
        self.catch_up()
        super().ask(session, blocks, salt)

    def may_be_lost(self, *_: Any) -> bool:
        return False


class ForgetfulStoreModel(HealthyStoreModel):
    """Drops blocks of DRAM that are not on disk, without reporting it."""

    def start(self, seed: int, rate: float, dram: int, stream: bool) -> None:
        super().start(seed, rate, dram, stream)
        assert self.rank is not None
        assert self.rank.writes is not None
        tree, dram_holder = self.rank.tree, self.rank.dram_holder
        self.rank.writes.submit = lambda node, blocks: tree.unlock(node, dram_holder)  # type: ignore[method-assign]


def case_of(model: type[StoreModel], examples: int, steps: int) -> Any:
    case = model.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return case


TestStoreModel = case_of(StoreModel, 25, 12)
TestHealthyStoreModel = case_of(HealthyStoreModel, 15, 12)


def test_a_store_that_forgets_is_noticed() -> None:
    """The twin."""
    quick = settings(
        max_examples=40, stateful_step_count=20, deadline=None, derandomize=True, phases=[Phase.generate]
    )
    with pytest.raises(AssertionError, match="is nowhere"):
        run_state_machine_as_test(ForgetfulStoreModel, settings=quick)


@pytest.mark.long
class TestStoreModelLong(StoreModel.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
