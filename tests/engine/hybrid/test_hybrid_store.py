"""Components of hybrid models below HBM: a resumed prefix has the rows that a model would have computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hybrid_rig import COMPONENTS, PAGE, STATE, WINDOW, Rig, Tokens, names_of, pages

from sglang_ext.engine.hybrid.components import FULL
from sglang_ext.patches.adapter.hybrid.pools import ComponentPool
from sglang_ext.testing.tiers import FaultyTier, MemoryTier
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier

MUCH = dict.fromkeys(COMPONENTS, 64)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(MUCH)
    yield made
    made.store.check()
    made.close()


def test_a_prefix_is_resumed_where_window_and_state_are(rig: Rig) -> None:
    rig.compute(pages(1, 3))
    rig.compute(pages(1, 7))
    assert rig.points(pages(1, 9)) == [3, 7]
    assert rig.points(pages(1, 5)) == [3]
    assert rig.points(pages(2, 5)) == []
    assert rig.load(pages(1, 9), 7) == []
    assert rig.load(pages(1, 9), 3) == []


def test_a_window_that_was_given_up_ends_a_resume(rig: Rig) -> None:
    """The window is of two pages: at the end of the prompt it is whole from the sixth page on."""
    rig.compute(pages(1, 7), window_from=6 * PAGE)
    assert rig.points(pages(1, 9)) == []
    rig.compute(pages(1, 8), window_from=6 * PAGE)
    assert rig.points(pages(1, 9)) == [8]
    assert rig.load(pages(1, 9), 8) == []


@pytest.mark.parametrize("component", COMPONENTS, ids=repr)
def test_one_damaged_byte_of_any_component_is_seen(rig: Rig, component) -> None:
    rig.compute(pages(1, 4))
    memory = rig.store.parts[component].memory
    ids = memory.take(names_of(pages(1, 4))[-1:])
    memory.arena.blocks[ids, 3] ^= 1
    memory.unlock(ids)
    assert [each.split()[0] for each in rig.load(pages(1, 4), 4)] == [component.name]


def test_a_state_one_page_early_is_seen(rig: Rig) -> None:
    rig.compute(pages(1, 3))
    rig.compute(pages(1, 4))
    memory = rig.store.parts[STATE].memory
    late, early = (memory.take([names_of(pages(1, 4))[at]]) for at in (3, 2))
    memory.arena.blocks[late] = memory.arena.blocks[early]
    for ids in (late, early):
        memory.unlock(ids)
    assert rig.load(pages(1, 4), 4) == ["state at 15"]


def test_what_was_used_least_recently_goes_first_from_its_end() -> None:
    rig = Rig({FULL: 10, WINDOW: 10, STATE: 10})
    rig.compute(pages(1, 4))
    rig.compute(pages(2, 4))
    assert rig.points(pages(1, 4)) == [4]  # in use again
    rig.compute(pages(3, 4))
    assert rig.points(pages(1, 4)) == [4]
    assert rig.points(pages(3, 4)) == [4]
    assert rig.points(pages(2, 4)) == []
    rig.compute(pages(4, 4))
    held = rig.store.parts[FULL].memory.held(names_of(pages(2, 4))).tolist()
    assert not all(held)
    assert held == sorted(held, reverse=True)
    rig.store.check()
    rig.close()


def test_one_component_takes_the_memory_of_another() -> None:
    """Blocks of KV move together so that states find room; then the other way round."""
    rig = Rig({FULL: 40, WINDOW: 1, STATE: 1})
    full, state = (rig.store.parts[component].memory for component in (FULL, STATE))
    rig.compute(pages(1, 9), window_from=7 * PAGE)
    rig.compute(pages(2, 9), window_from=7 * PAGE)
    states = state.reserve(state.arena.n_blocks - 4 * 25)
    assert states is not None
    assert rig.points(pages(2, 9)) == [9]
    assert rig.load(pages(2, 9), 9) == []
    rig.store.check()
    state.unlock(states)
    assert rig.load(pages(2, 9), 9) == []
    assert full.reserve(full.arena.n_blocks) is not None
    assert len(full) == len(state) == 0
    rig.store.check()
    rig.close()


def test_a_block_that_is_read_stays(rig: Rig) -> None:
    rig.compute(pages(1, 4))
    memory = rig.store.parts[FULL].memory
    ids = memory.take(names_of(pages(1, 4)))
    assert memory.reserve(memory.arena.n_blocks - 3) is None
    taken = memory.reserve(memory.arena.n_blocks - 4)
    memory.unlock(taken)
    memory.clear()
    assert memory.arena.used_blocks == 4
    memory.unlock(ids)
    assert memory.arena.used_blocks == 0


def test_a_load_of_what_is_gone_is_refused(rig: Rig) -> None:
    from sglang_ext.engine.hybrid.store import Rows

    rig.compute(pages(1, 2))
    rig.store.parts[STATE].memory.clear()
    rows = {FULL: Rows(names_of(pages(1, 2)), None), STATE: Rows(names_of(pages(1, 2))[-1:], None)}
    assert not rig.store.load("request", rows)
    assert not rig.store.cancel_load("request")


def disk_at(path: Path):
    def tier(pool: ComponentPool) -> DiskTier:
        config = DiskConfig(path / str(pool.component), 256 << 20)
        return DiskTier(config, pool.layout)

    return tier


def test_a_restart_finds_on_disk_what_a_resume_needs(tmp_path: Path) -> None:
    rig = Rig(MUCH, disk_at(tmp_path))
    rig.compute(pages(1, 3))
    rig.compute(pages(1, 7))
    rig.close()
    rig = Rig(MUCH, disk_at(tmp_path))
    assert rig.points(pages(1, 9)) == []
    assert rig.promote(pages(1, 9)) == 7
    assert rig.points(pages(1, 9)) == [7], "the state after three pages stays on disk"
    assert rig.load(pages(1, 9), 7) == []
    assert rig.promote(pages(1, 9)) == 0, "DRAM has it"
    rig.store.clear()
    assert rig.promote(pages(1, 9)) == 0
    rig.store.check()
    rig.close()


def test_a_promotion_for_which_dram_has_no_room_is_none(tmp_path: Path) -> None:
    rig = Rig(MUCH, disk_at(tmp_path))
    rig.compute(pages(1, 7))
    rig.close()
    rig = Rig({FULL: 10, WINDOW: 10, STATE: 10}, disk_at(tmp_path))
    memory = rig.store.parts[WINDOW].memory
    taken = memory.reserve(memory.arena.n_blocks - 9)
    assert rig.promote(pages(1, 9)) == 0
    memory.unlock(taken)
    assert rig.store.parts[FULL].memory.arena.used_blocks == 0
    assert rig.promote(pages(1, 9)) == 7
    rig.store.check()
    rig.close()


def test_blocks_that_a_waiting_request_needs_stay(tmp_path: Path) -> None:
    """Of a prompt, DRAM has the KV and disk the rest; other prompts come before the request is admitted."""
    rig = Rig({FULL: 10, WINDOW: 10, STATE: 10}, disk_at(tmp_path))
    rig.compute(pages(1, 7))
    rig.store.settle()
    rig.store.parts[STATE].memory.clear()
    rig.store.promote("waiting", names_of(pages(1, 9)))
    while not rig.store.ready("waiting"):
        rig.store.ranks.each_pass()
    for first in range(2, 6):
        rig.compute(pages(first, 5))
    assert rig.points(pages(1, 9)) == [7]
    assert rig.load(pages(1, 9), 7) == []
    rig.store.release("waiting")
    rig.store.check()
    rig.close()


def test_a_damaged_state_on_disk_is_not_used(tmp_path: Path) -> None:
    rig = Rig(MUCH, disk_at(tmp_path))
    rig.compute(pages(1, 4))
    rig.close()
    (segment,) = (tmp_path / "state").glob("*.seg")
    changed = bytes(byte ^ 1 for byte in segment.read_bytes()[4096:])
    segment.write_bytes(segment.read_bytes()[:4096] + changed)
    rig = Rig(MUCH, disk_at(tmp_path))
    assert rig.promote(pages(1, 4)) == 0
    assert rig.points(pages(1, 4)) == []
    rig.store.check()
    rig.close()


@pytest.mark.parametrize("seed", range(8))
def test_no_resumed_prefix_is_wrong_over_a_failing_disk(seed: int) -> None:
    """Random prompts with common beginnings, in DRAM that is too small, over disks that fail at random."""
    rng = random.Random(seed)
    rig = Rig(
        {FULL: 24, WINDOW: 10, STATE: 4},
        lambda pool: FaultyTier(MemoryTier(pool.layout, 64), seed=seed, rate=0.1),
    )
    prompts: list[Tokens] = []
    resumed = 0
    for _ in range(120):
        base = rng.choice(prompts[-5:]) if prompts and rng.random() < 0.7 else ()
        kept = base[: rng.randrange(len(base) // PAGE + 1) * PAGE] if base else ()
        prompt = (*kept, *(rng.randrange(10**6) for _ in range(PAGE * rng.randrange(1, 4))))
        if len(prompt) > 48:
            continue
        if rng.random() < 0.5:
            rig.promote(prompt)
        for blocks in rig.points(prompt):
            assert rig.load(prompt, blocks) == []
            resumed += 1
        rig.compute(prompt, window_from=rng.choice([0, max(0, len(prompt) // PAGE - 2) * PAGE]))
        prompts.append(prompt)
        rig.store.check()
    assert resumed > 10
    rig.close()
