"""The memory pool call by call; tests/test_mempool_model.py has the random ones."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.errors import ConfigError, InternalError, UserError
from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import Namespace, encode_tokens
from sglang_ext.mempool import Address, AddressError, ArenaRegion, MemPool, MemType, Outcome, OutOfBlocksError
from sglang_ext.mempool.indexing import plan
from sglang_ext.mempool.regions import Rows
from sglang_ext.testing.blocks import LAYOUT
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiers import Tier, all_tiers

SPACE = Namespace("m", "w", "float16", LAYOUT.facts())
ROOT = Path(__file__).parents[1]

Make = Callable[..., MemPool]


def prompt(letter: int, blocks: int) -> list[int]:
    return [letter] * LAYOUT.block_tokens * blocks


def kv(letter: int, blocks: int) -> Rows:
    rows = np.random.default_rng(letter).integers(0, 256, (20, LAYOUT.block_bytes), dtype=np.uint8)
    return rows[:blocks]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(DiskConfig(tmp_path / "disk", 4 << 20, segment_bytes=64 << 10), LAYOUT)
    yield tier
    tier.close()


@pytest.fixture
def make() -> Iterator[Make]:
    pools: list[MemPool] = []

    def build(hbm: int = 8, dram: int = 8, disk: DiskTier | None = None, instance: str = "one") -> MemPool:
        pools.append(MemPool.create(instance, LAYOUT, hbm, dram, disk, namespace=SPACE))
        return pools[-1]

    yield build
    for pool in pools:
        pool.check()
        pool.reset()
        pool.check()
        assert not pool.ledger.owners


def cached(pool: MemPool, letter: int, blocks: int, type: MemType = MemType.HBM) -> None:
    """A prompt is computed and inserted."""
    found = pool.alloc_mem(blocks, type, id="r")
    pool.write(found, kv(letter, blocks))
    assert pool.insert(prompt(letter, blocks), found).new == blocks


def tiers(pool: MemPool, letter: int, blocks: int) -> str:
    """Where each block of a prompt is: H, D(RAM), K (disk)."""
    with pool.match(prompt(letter, blocks), id="look") as hold:
        return "".join("HDK"[tier.level] for tier in hold.tiers)


# -- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [(7,), (1, 2, 3, 2**64 - 1), tuple(range(16))])
def test_an_address_survives_being_sent(place: tuple[int, ...]) -> None:
    address = Address("host/8000", 2**63 - 1, Tier.DISK, place, 5)
    assert Address.decode(address.encode()) == Address.decode(str(address)) == address
    assert {address: 1}[Address.decode(str(address))] == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        "",
        "a/b",
        "one/1/HBM/1/-1",
        "one/1/TAPE/1/1",
        "one/1/HBM//1",
        f"one/{'f' * 17}/HBM/1/1",
        b"x" * 70_000,
    ],
)
def test_what_is_no_address_is_refused(data: bytes | str) -> None:
    with pytest.raises(AddressError, match="not an address"):
        Address.decode(data)


def test_a_flipped_bit_is_another_address_or_none(make: Make) -> None:
    pool = make()
    (address,) = pool.alloc_mem(1, id="r")
    data = address.encode()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(AddressError):
            pool.read([Address.decode(bytes(damaged))])


def test_addresses_of_others_and_of_the_past_are_refused(make: Make) -> None:
    one, two, again = make(), make(instance="two"), make()
    (address,) = one.alloc_mem(1, id="r")
    for pool, text in ((two, "address of instance 'one', this is 'two'"), (again, "is of epoch")):
        for call in (pool.free_mem, pool.read, pool.swap_in):
            with pytest.raises(AddressError, match=text):
                call([address])
    assert one.free_mem([address]) == 1
    (successor,) = one.alloc_mem(1, id="r")
    assert successor.place == address.place
    with pytest.raises(AddressError, match="not granted any more"):
        one.read([address])


# -- memory -------------------------------------------------------------------------------------


def test_mixed_is_hbm_first(make: Make) -> None:
    pool = make(hbm=3, dram=4)
    found = pool.alloc_mem(5, MemType.MIXED, id="r")
    assert [address.tier for address in found] == [Tier.HBM] * 3 + [Tier.DRAM] * 2
    with pytest.raises(
        OutOfBlocksError, match=r"3 blocks of DRAM asked for beside 0 in HBM, 2 of 4 are free"
    ):
        pool.alloc_mem(3, MemType.MIXED, id="r")
    assert pool.owned_blocks(Tier.DRAM) == 2


def test_everything_of_an_owner_goes_at_once(make: Make) -> None:
    pool = make()
    cached(pool, 1, 2)
    pool.alloc_mem(2, id="gone")
    kept = pool.alloc_mem(1, MemType.DRAM, id="stays")
    hold = pool.match(prompt(1, 2), id="gone")
    assert pool.free_mem(id="gone") == 2
    assert hold.released
    assert pool.tiers.tree.locked_blocks_of(pool.tiers.holders[Tier.HBM]) == 0
    assert pool.ledger.owners == ["stays"]
    assert pool.free_mem(id="nobody") == 0
    assert pool.free_mem(kept) == 1


def test_freeing_is_all_or_nothing(make: Make) -> None:
    pool = make()
    good, bad = pool.alloc_mem(2, id="r")
    pool.free_mem([bad])
    with pytest.raises(AddressError):
        pool.free_mem([good, bad])
    assert pool.is_granted(good)
    cached(pool, 1, 1)
    with pool.match(prompt(1, 1), id="r") as hold, pytest.raises(AddressError, match="held for 'r'"):
        pool.free_mem(hold.addresses)


def test_allocation_takes_first_what_costs_nothing(make: Make, disk: DiskTier) -> None:
    pool = make(4, 0, disk)
    cached(pool, 1, 2)
    pool.tiers.cover_disk(pool.tiers.tree.match(SPACE, encode_tokens(prompt(1, 2))).node)
    cached(pool, 2, 2)
    assert tiers(pool, 1, 2) == "HH"  # and so used last
    written = disk.stats().blocks
    pool.alloc_mem(2, id="r")
    assert disk.stats().blocks == written
    assert (tiers(pool, 1, 2), tiers(pool, 2, 2)) == ("KK", "HH")
    pool.alloc_mem(2, id="r")
    assert (tiers(pool, 2, 2), pool.tiers.counters.lost) == ("KK", 0)


def test_without_room_below_the_oldest_goes_for_good_and_is_counted(make: Make) -> None:
    pool = make(4, 0)
    cached(pool, 1, 2)
    cached(pool, 2, 2)
    pool.alloc_mem(1, id="r")
    assert (tiers(pool, 1, 2), tiers(pool, 2, 2), pool.tiers.counters.lost) == ("H", "HH", 1)
    with pool.match(prompt(2, 2), id="r"):
        with pytest.raises(
            OutOfBlocksError, match="3 blocks of HBM asked for, 0 of 4 are free and 1 of 3 cached"
        ):
            pool.alloc_mem(3, id="r")
        assert tiers(pool, 1, 2) == "H", "a refused allocation evicts nothing"


def test_a_tier_that_is_not_there(make: Make) -> None:
    pool = make(2, 0)
    for type in (MemType.DRAM, MemType.MIXED, MemType.DISK):
        with pytest.raises(ConfigError, match=r"has no (DRAM|disk)"):
            pool.alloc_mem(1, type, id="r")
    with pytest.raises(UserError, match="size is -1"):
        pool.alloc_mem(-1, id="r")
    assert pool.alloc_mem(0, id="r") == []


def test_blocks_on_disk_are_written_read_and_freed(make: Make, disk: DiskTier) -> None:
    pool = make(disk=disk)
    found = pool.alloc_mem(3, MemType.DISK, id="r")
    assert pool.read(found)[1] == [Outcome.ABSENT] * 3
    assert pool.write(found, kv(1, 3)) == [Outcome.DONE] * 3
    assert np.array_equal(pool.read(found)[0], kv(1, 3))
    pool.free_mem(found)
    assert disk.stats().blocks == 0


# -- index --------------------------------------------------------------------------------------


def test_what_the_index_has_is_freed_and_what_it_lacks_is_taken(make: Make) -> None:
    pool = make()
    cached(pool, 1, 2)
    found = pool.alloc_mem(4, id="r")
    pool.write(found, kv(1, 4))
    report = pool.insert([*prompt(1, 4), 9], found)
    assert (report.blocks, report.new, report.freed) == (4, 2, 2)
    assert pool.owned_blocks(Tier.HBM) == 0
    with pool.match(prompt(1, 4), id="r") as hold:
        assert np.array_equal(pool.read(hold.addresses)[0], kv(1, 4))
        again = pool.alloc_mem(1, id="r")
        assert pool.insert(prompt(1, 5), [*hold.addresses, *again]).new == 1


def test_insertions_that_leave_a_gap_are_refused(make: Make, disk: DiskTier) -> None:
    pool = make(disk=disk)
    found = pool.alloc_mem(2, id="r")
    with pytest.raises(UserError, match="blocks 0 to 0 of the prompt are neither given nor cached"):
        pool.insert(prompt(1, 3), found)
    with pytest.raises(UserError, match="2 addresses for 1 whole blocks"):
        pool.insert([*prompt(1, 1), 1], found)
    with pytest.raises(AddressError, match="given twice"):
        pool.insert(prompt(1, 2), [found[0], found[0]])
    on_disk = pool.alloc_mem(1, MemType.DISK, id="r")
    with pytest.raises(UserError, match="disk blocks at the end"):
        pool.insert(prompt(1, 2), [*on_disk, found[0]])
    cached(pool, 2, 2)
    with pool.match(prompt(2, 2), id="r") as hold, pytest.raises(AddressError, match="another place"):
        pool.insert(prompt(2, 2), hold.addresses[::-1])
    assert pool.owned_blocks(Tier.HBM) == 2


def test_a_mixed_insertion_gives_dram_the_whole_prefix(make: Make) -> None:
    pool = make(3, 5)
    cached(pool, 1, 5, MemType.MIXED)
    assert tiers(pool, 1, 5) == "HHHDD"
    assert pool.tiers.tree.blocks_of(pool.tiers.holders[Tier.DRAM]) == 5
    pool.swap_out(3)
    with pool.match(prompt(1, 5), id="r") as hold:
        assert np.array_equal(pool.read(hold.addresses)[0], kv(1, 5))


def test_disk_blocks_are_found_under_their_prompt(make: Make, disk: DiskTier) -> None:
    pool = make(disk=disk)
    hbm, on_disk = pool.alloc_mem(1, id="r"), pool.alloc_mem(2, MemType.DISK, id="r")
    pool.write([*hbm, *on_disk], kv(1, 3))
    assert pool.insert(prompt(1, 3), [*hbm, *on_disk]).outcome is Outcome.DONE
    assert (tiers(pool, 1, 3), disk.stats().blocks) == ("HKK", 3)
    unwritten = pool.alloc_mem(1, MemType.DISK, id="r")
    assert pool.insert(prompt(2, 1), unwritten).outcome is Outcome.ABSENT


@pytest.mark.parametrize(
    ("given", "held", "expected"),
    [
        ("HHH", (0, 0), (3, 0, ())),
        ("HHDD", (0, 0), (2, 4, (0, 1))),
        ("HDH", (0, 0), (1, 3, (0, 2))),
        ("DD", (0, 0), (0, 2, ())),
        ("HHKK", (0, 0), (2, 0, ())),
        ("..HH", (2, 0), (4, 0, ())),
        ("..HH", (0, 2), (0, 4, (2, 3))),
        ("..HH", (1, 2), (1, 4, (2, 3))),
        ("HHHH", (0, 2), (4, 2, ())),
        ("...D", (3, 1), (3, 4, (1, 2))),
    ],
)
def test_where_given_blocks_go(
    given: str, held: tuple[int, int], expected: tuple[int, int, tuple[int, ...]]
) -> None:
    owned = {
        i: Address("one", 1, all_tiers()["HDK".index(letter)], (i,))
        for i, letter in enumerate(given)
        if letter != "."
    }
    found = plan(owned, len(given), *held)
    assert (found.hbm, found.dram, found.copies) == expected


def test_deleting_spares_what_others_continue_or_hold(make: Make, disk: DiskTier) -> None:
    pool = make(16, 16, disk)
    cached(pool, 1, 2)
    cached(pool, 2, 2)
    found = pool.alloc_mem(2, id="r")
    pool.insert([*prompt(1, 2), *prompt(3, 2)], found)
    assert pool.delete(prompt(1, 2)) == 0
    with pool.match([*prompt(1, 2), *prompt(3, 1)], id="r"):
        assert pool.delete([*prompt(1, 2), *prompt(3, 2)], continuations=True) == 1
        assert pool.delete(prompt(1, 2), continuations=True) == 0
    pool.swap_out(16)
    assert pool.delete(prompt(1, 2), continuations=True) == 3
    assert (tiers(pool, 1, 2), tiers(pool, 2, 2)) == ("", "DD")
    assert pool.delete(prompt(7, 1)) == 0


def test_namespaces_do_not_meet(make: Make, disk: DiskTier) -> None:
    pool = make(disk=disk)
    cached(pool, 1, 3)
    pool.swap_out(3)
    other = Namespace("m", "w", "float16", LAYOUT.facts(), salt="tenant")
    assert pool.match(prompt(1, 3), id="r", namespace=other).blocks == 0
    with pytest.raises(UserError, match=r"not a keys\.Namespace"):
        pool.match(prompt(1, 3), id="r", namespace="text")


# -- swap ---------------------------------------------------------------------------------------


def test_the_oldest_go_down_and_come_back(make: Make, disk: DiskTier) -> None:
    pool = make(8, 4, disk)
    cached(pool, 1, 4)
    cached(pool, 2, 4)
    assert pool.swap_out(2) == 2
    assert (tiers(pool, 1, 4), tiers(pool, 2, 4)) == ("HHDD", "HHHH")
    assert pool.swap_out(100) == 6
    assert sorted(tiers(pool, 1, 4) + tiers(pool, 2, 4)) == sorted("DDDDKKKK")
    for letter in (1, 2):
        with pool.match(prompt(letter, 4), id="r") as hold:
            old = list(hold.addresses)
            swapped = pool.swap_in(old[2:3])
            assert [each.outcome for each in swapped] == [Outcome.DONE]
            assert [address.tier for address in hold.addresses[:3]] == [Tier.HBM] * 3
            assert np.array_equal(pool.read(hold.addresses)[0], kv(letter, 4))
            assert swapped[0].address == hold.addresses[2]
            assert pool.is_granted(old[2])


def test_what_was_brought_in_stays_while_it_is_held(make: Make) -> None:
    pool = make()
    cached(pool, 1, 3)
    pool.swap_out(3)
    with pool.match(prompt(1, 3), id="r") as hold:
        pool.swap_in(hold.addresses)
        assert pool.swap_out(3) == 0
        with pytest.raises(OutOfBlocksError):
            pool.alloc_mem(6, id="r")
        assert np.array_equal(pool.read(hold.addresses)[0], kv(1, 3))
    assert pool.swap_out(3) == 3


def test_a_prompt_in_two_tiers_comes_back_whole(make: Make, disk: DiskTier) -> None:
    pool = make(8, 4, disk)
    cached(pool, 1, 4)
    pool.swap_out(4)
    pool.alloc_mem(2, MemType.DRAM, id="r")
    assert tiers(pool, 1, 4) == "DDKK"
    with pool.match(prompt(1, 4), id="r") as hold:
        assert all(each.outcome is Outcome.DONE for each in pool.swap_in(hold.addresses))
        assert np.array_equal(pool.read(hold.addresses)[0], kv(1, 4))


def test_last_copies_are_not_given_up_for_a_swap(make: Make) -> None:
    pool = make(4, 2)
    cached(pool, 1, 2)
    assert pool.swap_out(2) == 2
    cached(pool, 2, 2)
    assert pool.swap_out(2) == 0
    assert (tiers(pool, 1, 2), tiers(pool, 2, 2), pool.tiers.counters.lost) == ("DD", "HH", 0)


def test_what_the_disk_has_dropped_by_itself_is_not_relied_upon(make: Make, disk: DiskTier) -> None:
    pool = make(4, 0, disk)
    cached(pool, 1, 3)
    node = pool.tiers.tree.match(SPACE, encode_tokens(prompt(1, 3))).node
    assert pool.tiers.cover_disk(node)
    disk.clear()
    assert pool.swap_out(3) == 3
    assert (tiers(pool, 1, 3), pool.tiers.counters.written, pool.tiers.counters.lost) == ("KKK", 6, 0)
    cached(pool, 2, 3)
    pool.swap_out(3)
    disk.clear()
    assert tiers(pool, 2, 3) == ""


def test_held_blocks_are_not_moved_and_a_full_hbm_is_a_miss(make: Make) -> None:
    pool = make(3, 3)
    cached(pool, 1, 3)
    with pool.match(prompt(1, 3), id="r"):
        assert pool.swap_out(3) == 0
    assert pool.swap_out(3) == 3
    pool.alloc_mem(2, id="r")
    with pool.match(prompt(1, 3), id="r") as hold:
        assert [each.outcome for each in pool.swap_in(hold.addresses)] == [
            Outcome.DONE,
            Outcome.FULL,
            Outcome.FULL,
        ]
        assert hold.tiers == [Tier.HBM, Tier.DRAM, Tier.DRAM]
        with pytest.raises(AddressError, match="Insert it first"):
            pool.swap_in(pool.alloc_mem(0, id="r") or [pool.ledger.allocated()[0]])


def test_blocks_of_a_hold_stay_readable_whatever_goes_on(make: Make, disk: DiskTier) -> None:
    pool = make(4, 2, disk)
    cached(pool, 1, 4)
    pool.swap_out(4)
    hold = pool.match(prompt(1, 4), id="r")
    for letter in range(2, 8):
        cached(pool, letter, 3)
        pool.delete(prompt(1, 4))
    assert np.array_equal(pool.read(hold.addresses)[0], kv(1, 4))
    hold.release()


# -- damage: the twins of the tests above, which compare bytes ------------------------------------


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
def test_a_flipped_byte_in_memory_is_seen_by_the_comparison(make: Make, tier: Tier) -> None:
    pool = make()
    cached(pool, 1, 3)
    pool.swap_out(3 if tier is Tier.DRAM else 0)
    with pool.match(prompt(1, 3), id="r") as hold:
        region = pool.tiers.regions[tier]
        assert isinstance(region, ArenaRegion)
        region.arena.blocks[hold.addresses[1].place[0], 100] ^= 1
        pool.swap_in(hold.addresses)
        assert [
            np.array_equal(a, b) for a, b in zip(pool.read(hold.addresses)[0], kv(1, 3), strict=True)
        ] == [
            True,
            False,
            True,
        ]


def test_a_flipped_byte_on_disk_is_a_miss_and_never_a_wrong_byte(make: Make, disk: DiskTier) -> None:
    pool = make(8, 0, disk)
    cached(pool, 1, 4)
    assert pool.swap_out(4) == 4
    (segment,) = [
        file for file in disk.config.path.glob("*.seg") if kv(1, 3)[2, :48].tobytes() in file.read_bytes()
    ]
    data = bytearray(segment.read_bytes())
    data[data.index(kv(1, 3)[2, :48].tobytes())] ^= 1
    segment.write_bytes(data)
    with pool.match(prompt(1, 4), id="r") as hold:
        swapped = pool.swap_in(hold.addresses)
        assert [each.outcome for each in swapped] == [Outcome.DONE] * 2 + [Outcome.DAMAGED] * 2
        rows, outcomes = pool.read(hold.addresses)
        assert outcomes == [Outcome.DONE, Outcome.DONE, Outcome.ABSENT, Outcome.DONE]
        assert np.array_equal(rows[[0, 1, 3]], kv(1, 4)[[0, 1, 3]])
    assert tiers(pool, 1, 4) == "HH"
    assert pool.tiers.counters.misses[Outcome.DAMAGED] == 2


# -- the rest -----------------------------------------------------------------------------------


def test_a_transfer_needs_an_endpoint(make: Make) -> None:
    pool = make()
    with pytest.raises(ConfigError, match="no endpoint"):
        pool.transfer(None, [], id="r").send(None)  # type: ignore[arg-type]


def test_other_threads_are_turned_away(make: Make) -> None:
    pool = make()
    seen: list[BaseException] = []

    def call() -> None:
        try:
            pool.alloc_mem(1, id="r")
        except InternalError as error:
            seen.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "another thread" in str(seen[0])


def test_tiers_of_another_layout_are_refused(disk: DiskTier) -> None:
    other = BlockLayout(4, ((8,),))
    with pytest.raises(ConfigError, match="disk has layout"):
        MemPool.create("one", other, 2, 2, disk, namespace=SPACE)


def test_check_finds_what_is_wrong(make: Make) -> None:
    pool = make()
    cached(pool, 1, 2)
    pool.alloc_mem(1, id="r")
    region = pool.tiers.regions[Tier.HBM]
    assert isinstance(region, ArenaRegion)
    stolen = region.arena.alloc(1)
    assert stolen is not None
    with pytest.raises(AssertionError, match="4 blocks of HBM are in use, index and ledger know of 3"):
        pool.check()
    region.arena.free(stolen)
    twice = pool.ledger.allocate("r", [(Tier.HBM, (0,))])
    with pytest.raises(AssertionError, match="HBM 0 is owned twice"):
        pool.check()
    pool.ledger.take_back(twice)
    pool.check()
    assert "HBM 5/8 free" in repr(pool)


def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "mempool_example.py"
    shown = (ROOT / "docs" / "mempool.md").read_text()
    assert script.read_text().split('"""', 2)[2].strip() in shown.replace("\n    ", "\n")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "found again: 64 as they were: True" in done.stdout


AROUND_THE_STORE = {
    r"tree\.(insert|extend)\(": set(),
    r"tree\.evict\(": {"hbm_tier.py", "dram_tier.py"},
    r"arena\.(alloc|free)\(": {"dram_tier.py"},
    r"_allocator\.(alloc|free|free_segment)\(": {"hbm_tier.py", "radix_cache.py"},
}
"""What reaches index and memory, and the tiers of the store, which may. SGLang's adapter frees the slots that
a request has beside those of the tree."""


def around_the_store(name: str, text: str) -> list[str]:
    return [what for what, may in AROUND_THE_STORE.items() if name not in may and re.search(what, text)]


def test_serving_reaches_index_and_memory_through_the_store() -> None:
    files = [*(ROOT / "sglang_ext" / "engine").rglob("*.py"), *(ROOT / "patches").rglob("*.py")]
    found = {file.name: around_the_store(file.name, file.read_text()) for file in files}
    assert not {name: what for name, what in found.items() if what}
    assert len(files) > 50
    assert around_the_store("new.py", "self._tree.insert(x)") == [r"tree\.(insert|extend)\("]
    assert around_the_store("new.py", "self._arena.alloc(1)") == [r"arena\.(alloc|free)\("]


def test_the_pool_needs_neither_sglang_nor_torch() -> None:
    code = "import sys, sglang_ext.mempool; sys.exit(bool({'torch', 'sglang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
