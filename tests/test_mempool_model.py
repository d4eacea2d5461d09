"""The memory pool against dictionaries of bytes: random calls, faults of the disk, restarts."""

from __future__ import annotations

import errno
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_ext.keys import Namespace, encode_tokens
from sglang_ext.mempool import Address, Hold, MemPool, MemType, Outcome, OutOfBlocksError
from sglang_ext.mempool.regions import Rows
from sglang_ext.testing.blocks import LAYOUT
from sglang_ext.testing.files import FaultyFiles
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiers import Tier, tier_named

SPACES = tuple(Namespace("m", "w", "float16", LAYOUT.facts(), salt=salt) for salt in ("", "tenant"))
STEP = LAYOUT.block_tokens
HBM, DRAM = 6, 5

Prompt = tuple[int, ...]
"""One number per block; prompts share prefixes."""

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
spaces = st.sampled_from(SPACES)
owners = st.sampled_from(["a", "b", "c"])


def tokens_of(prompt: Prompt) -> list[int]:
    return [number * STEP + i for number in prompt for i in range(STEP)]


def kv_of(space: Namespace, prompt: Prompt) -> Rows:
    """What a model would compute: a block follows from all tokens up to its end, and from the namespace."""
    rows = np.empty((len(prompt), LAYOUT.block_bytes), np.uint8)
    for i in range(len(prompt)):
        seed = hashlib.blake2b(space.digest() + encode_tokens(tokens_of(prompt[: i + 1])), digest_size=8)
        rows[i] = np.frombuffer(
            np.random.default_rng(int.from_bytes(seed.digest())).bytes(LAYOUT.block_bytes), np.uint8
        )
    return rows


class PoolMachine(RuleBasedStateMachine):
    """kept: what owners have, with its bytes. cached: prompts that were inserted, and not lost since."""

    faults = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="pool-model-")
        self.files = FaultyFiles()
        self.kept: dict[Address, tuple[str, Rows]] = {}
        self.cached: set[tuple[Namespace, Prompt]] = set()
        self.holds: list[tuple[Hold, Namespace, Prompt]] = []
        self.lossy = False
        """The disk has failed since the model was last sure of what is cached."""
        self.open()

    def open(self) -> None:
        self.disk = DiskTier(
            DiskConfig(Path(self.folder.name), 4 << 20, segment_bytes=64 << 10, retry_seconds=0.0),
            LAYOUT,
            files=self.files,
        )
        self.pool = MemPool.create("one", LAYOUT, HBM, DRAM, self.disk, namespace=SPACES[0])

    def close(self) -> None:
        self.pool.reset()
        self.pool.check()
        for region in self.pool.tiers.regions.values():
            region.arena.close()  # type: ignore[attr-defined]
        self.disk.close()

    # -- memory ---------------------------------------------------------------------------------

    @rule(size=st.integers(0, 8), type=st.sampled_from(MemType), id=owners, seed=st.integers(0, 99))
    def alloc(self, size: int, type: MemType, id: str, seed: int) -> None:
        rows = np.random.default_rng(seed).integers(0, 256, (size, LAYOUT.block_bytes), dtype=np.uint8)
        with self.losses():
            try:
                found = self.pool.alloc_mem(size, type, id=id)
            except OutOfBlocksError:
                tiers = [Tier.DRAM] if type is MemType.MIXED else [tier_named(type.value)]
                assert sum(self.pool.store.available(tier) for tier in tiers) < size
                return
        assert len(found) == size
        assert not set(found) & self.kept.keys()
        for address, row, outcome in zip(found, rows, self.pool.write(found, rows), strict=True):
            assert outcome is Outcome.DONE or address.tier is Tier.DISK
            if outcome is Outcome.DONE:
                self.kept[address] = (id, row)
            else:
                assert self.lossy
                self.pool.free_mem([address])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.kept)), min_size=1, max_size=3, unique=True))
        assert self.pool.free_mem(chosen) == len(chosen)
        for address in chosen:
            del self.kept[address]
            assert not self.pool.is_granted(address)

    @rule(id=owners)
    def free_owner(self, id: str) -> None:
        """Everything of an owner goes at once, its holds too."""
        self.pool.free_mem(id=id)
        self.kept = {a: (who, row) for a, (who, row) in self.kept.items() if who != id}
        for hold, *_ in self.holds:
            assert hold.released == (hold.owner == id)
        self.holds = [each for each in self.holds if not each[0].released]

    # -- index ----------------------------------------------------------------------------------

    @rule(prompt=prompts, space=spaces, type=st.sampled_from([MemType.HBM, MemType.DRAM, MemType.MIXED]))
    def compute(self, prompt: Prompt, space: Namespace, type: MemType) -> None:
        """A request: what is cached is taken, the rest is computed and inserted."""
        kv = kv_of(space, prompt)
        with self.losses(), self.pool.match(tokens_of(prompt), id="request", namespace=space) as hold:
            self.verify(hold, space, prompt)
            known = sum(tier is not Tier.DISK for tier in hold.tiers)
            try:
                fresh = self.pool.alloc_mem(len(prompt) - known, type, id="request")
                self.pool.write(fresh, kv[known:])
                self.pool.insert(tokens_of(prompt), fresh, namespace=space)
            except OutOfBlocksError:
                self.pool.free_mem(id="request")
                return
        self.cached |= {(space, prompt[:end]) for end in range(1, len(prompt) + 1)}
        assert not self.pool.ledger.of_owner("request")

    @rule(prompt=prompts, space=spaces, id=owners)
    def match(self, prompt: Prompt, space: Namespace, id: str) -> None:
        with self.losses():
            hold = self.pool.match(tokens_of(prompt), id=id, namespace=space)
            self.verify(hold, space, prompt)
        self.holds.append((hold, space, prompt))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.holds) - 1))
        hold, *_ = self.holds.pop(at)
        hold.release()
        assert not any(self.pool.is_granted(address) for address in hold.positions)

    @rule(prompt=prompts, space=spaces, continuations=st.booleans())
    def delete(self, prompt: Prompt, space: Namespace, continuations: bool) -> None:
        self.pool.delete(tokens_of(prompt), namespace=space, continuations=continuations)
        longer = [
            p for s, p in self.cached if s == space and len(p) > len(prompt) and p[: len(prompt)] == prompt
        ]
        if not any(held for held, s, _ in self.holds if s == space) and (continuations or not longer):
            with self.pool.match(tokens_of(prompt), id="look", namespace=space) as hold:
                assert hold.blocks < len(prompt) or self.lossy
        # What of the rest went with it is up to the shape of the tree; the pool is asked.
        self.resync()

    # -- swap -----------------------------------------------------------------------------------

    @rule(blocks=st.integers(0, 8))
    def swap_out(self, blocks: int) -> None:
        with self.losses():
            before = self.pool.store.tiers[Tier.HBM].free_blocks
            moved = self.pool.swap_out(blocks)
            assert self.pool.store.tiers[Tier.HBM].free_blocks == before + moved
            assert moved <= blocks

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        hold, space, prompt = data.draw(st.sampled_from(self.holds))
        chosen = [a for a in hold.addresses if data.draw(st.booleans())]
        kv = kv_of(space, prompt)
        with self.losses():
            where = [hold.positions[address] for address in chosen]
            for position, swapped in zip(where, self.pool.swap_in(chosen), strict=True):
                if swapped.address is None:
                    assert swapped.outcome is Outcome.FULL or self.lossy
                    continue
                assert swapped.outcome is Outcome.DONE
                assert swapped.address.tier is Tier.HBM
                rows, _ = self.pool.read([swapped.address])
                assert np.array_equal(rows[0], kv[position]), "wrong bytes in HBM"
            self.verify(hold, space, prompt, exact=False)

    # -- the disk -------------------------------------------------------------------------------

    @precondition(lambda self: self.faults)
    @rule(
        method=st.sampled_from(["preadv", "pwritev", "fdatasync", "pread"]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC]),
    )
    def break_disk(self, method: str, code: int) -> None:
        self.files.fail[method] = code
        self.lossy = True

    @rule()
    def mend_disk(self) -> None:
        self.files.fail.clear()

    @rule()
    def restart(self) -> None:
        """What is on disk is found again; all addresses are of an earlier epoch."""
        self.files.fail.clear()
        old = [*self.kept, *(a for hold, *_ in self.holds for a in hold.addresses)]
        on_disk = {(space, prompt): self.durable(space, prompt) for space, prompt in self.cached}
        self.close()
        self.open()
        self.kept, self.holds = {}, []
        assert not any(self.pool.is_granted(address) for address in old)
        for (space, prompt), blocks in on_disk.items():
            with self.pool.match(tokens_of(prompt), id="look", namespace=space) as hold:
                assert hold.blocks == blocks
                self.verify(hold, space, prompt, exact=False)
        self.resync()

    # -- what must be true ----------------------------------------------------------------------

    def durable(self, space: Namespace, prompt: Prompt) -> int:
        keys = self.pool.tiers.keys(space, (), encode_tokens(tokens_of(prompt)))
        return self.disk.match(space.digest(), keys)

    def losses(self) -> Any:
        return _Losses(self)

    def resync(self) -> None:
        """Forget of the model what the pool no longer has."""
        self.cached = {(s, p) for s, p in self.cached if self.found(s, p) == len(p)}

    def found(self, space: Namespace, prompt: Prompt) -> int:
        with self.pool.match(tokens_of(prompt), id="look", namespace=space) as hold:
            return hold.blocks

    def verify(self, hold: Hold, space: Namespace, prompt: Prompt, *, exact: bool = True) -> None:
        """A hold is as long as the model says, and every block that can be read is the right one."""
        kv = kv_of(space, prompt)
        rows, outcomes = self.pool.read(hold.addresses)
        for i, outcome in enumerate(outcomes):
            assert outcome is Outcome.DONE or self.lossy
            assert outcome is not Outcome.DONE or np.array_equal(rows[i], kv[i]), f"block {i} is wrong"
        assert [address.tier for address in hold.addresses] == sorted(hold.tiers)
        if exact and not self.lossy:
            known = max((len(p) for s, p in self.cached if s == space and prompt[: len(p)] == p), default=0)
            assert hold.blocks >= known, f"{known} blocks were cached, {hold.blocks} are found"

    @invariant()
    def everything_fits_together(self) -> None:
        self.pool.check()
        addresses = sorted(self.kept)
        rows, outcomes = self.pool.read(addresses)
        for address, row, outcome in zip(addresses, rows, outcomes, strict=True):
            assert outcome is Outcome.DONE or (address.tier is Tier.DISK and self.lossy)
            assert outcome is not Outcome.DONE or np.array_equal(row, self.kept[address][1]), str(address)

    def teardown(self) -> None:
        self.files.fail.clear()
        self.close()
        self.folder.cleanup()


class _Losses:
    """Around calls that may evict: only what the pool has counted as lost may be missing afterwards."""

    def __init__(self, machine: PoolMachine) -> None:
        self._machine = machine

    def __enter__(self) -> None:
        self._before = self._machine.pool.tiers.counters.lost

    def __exit__(self, *error: object) -> None:
        machine = self._machine
        if error[0] is not None:
            return
        if machine.lossy or machine.pool.tiers.counters.lost > self._before:
            machine.resync()
            if not machine.files.fail and machine.faults is False:
                machine.lossy = False
        else:
            missing = [(s.salt, p) for s, p in machine.cached if machine.found(s, p) < len(p)]
            assert not missing, f"lost without being counted: {missing}"


class SoundMachine(PoolMachine):
    """Without faults, nothing but a counted eviction makes a block go."""

    faults = False


@pytest.mark.parametrize("machine", [PoolMachine, SoundMachine])
def test_the_pool_is_what_the_dictionaries_are(machine: type[PoolMachine], long_run: bool) -> None:
    examples, steps = (300, 60) if long_run else (20, 25)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )
