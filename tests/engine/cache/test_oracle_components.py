"""An oracle engine over a model with two components: each row that attention would read is compared.

A component with a window goes through the tree, DRAM, a disk, a peer and a hand-over, on SGLang's own pools.
The twins damage one row, and the forward pass must find it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_components import BLOCK, SPACE, WINDOW, ComponentRank
from engine_pools import WrongKvError, chain_of

from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.disagg.transports import TransportName
from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global.components import FULL, Component

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

DRAM = {FULL: 40, WINDOW: 12}
POOLS = {FULL: "dram", WINDOW: "dram window"}
PAGES = {FULL: "hbm", WINDOW: "window"}
PROMPT = [at % 5 for at in range(33)]
SECONDS = 30.0


def prompts(seed: int) -> Callable[[], list[int]]:
    """Draws prompts that continue or fork earlier ones."""
    rnd = random.Random(seed)
    known: list[list[int]] = [[0] * 9]

    def draw() -> list[int]:
        begin = rnd.choice(known[-3:])
        begin = begin[: rnd.choice((len(begin), len(begin), rnd.randrange(1, len(begin) + 1)))]
        found = (begin + [rnd.randrange(3) for _ in range(rnd.choice((1, 3, 9, 20)))])[:90]
        known.append(found)
        return found

    return draw


def steps(rank: ComponentRank, seed: int, count: int) -> None:
    """Random requests, evictions, and moves to and from disk; everything is checked after each."""
    rnd, draw = random.Random(seed + 1), prompts(seed)
    last = draw()
    for _ in range(count):
        what = rnd.random()
        if what < 0.55:
            last = draw()
            rank.serve(last)
        elif what < 0.75:
            rank.evict(rnd.choice((FULL, WINDOW)), rnd.randrange(1, 9))
        elif rank.disks and what < 0.88:
            rank.to_disk(last)
        elif rank.disks:
            rank.from_disk(last)
        rank.check()


@pytest.mark.parametrize("seed", range(3))
def test_every_row_that_a_model_reads_is_right(seed: int, tmp_path: Path) -> None:
    with ComponentRank(f"random {seed}", dram=DRAM, disks=tmp_path) as rank:
        steps(rank, seed, 60)
        assert sum(rank.resumed) > 50
        assert all(rank.store.ledger.evicted[holder] for holder in rank.holders.values())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
def test_every_row_that_a_model_reads_is_right_for_long(seed: int, tmp_path: Path) -> None:
    with ComponentRank(f"random {seed}", dram=DRAM, disks=tmp_path) as rank:
        steps(rank, seed, 1000)


def test_a_request_resumes_only_where_a_whole_window_is() -> None:
    with ComponentRank("window", dram=DRAM) as rank:
        assert rank.serve(PROMPT) == 0
        assert rank.serve([*PROMPT, 7]) == 32, "the window before the end was saved"
        assert rank.serve([*PROMPT[:20], 8, 8, 8, 8, 8]) == 0, "there is KV of 20 tokens, and no window"
        assert rank.serve([*PROMPT[:20], 8, 8, 8, 8, 9]) == 24, "that request saved its own window"
        full, window = (rank.holders[part] for part in (FULL, WINDOW))
        assert rank.tree.blocks_of(full) > rank.tree.blocks_of(window) > 0
        assert rank.evict(WINDOW, 100) > 0
        assert rank.tree.blocks_of(window) == 0
        assert rank.serve([*PROMPT, 7]) == 0
        assert rank.tree.blocks_of(window) > 0
        rank.evict(FULL, 100)
        assert rank.tree.node_count == 0, "windows go with the KV that they belong to"
        assert all(shelf.free_blocks == shelf.n_blocks for shelf in rank.shelves.values())
        rank.check()


def test_locked_windows_and_their_prefix_stay() -> None:
    with ComponentRank("locked", dram=DRAM) as rank:
        rank.serve(PROMPT)
        node, blocks = rank.resume([*PROMPT, 0])
        assert blocks == 8
        rank.tree.lock(node, rank.holders[WINDOW])
        assert (rank.evict(WINDOW, 100), rank.evict(FULL, 100)) == (0, 0)
        rank.tree.unlock(node, rank.holders[WINDOW])
        assert rank.evict(FULL, 100) == 8


def damage(rank: ComponentRank, part: Component, tokens: Sequence[int], block: int, token: int = 0) -> None:
    """Flip one bit of a token's row, in one of the blocks that a resume at the end of a prompt needs."""
    node, blocks = rank.resume([*tokens, 0])
    places, _ = rank.places(node, blocks, part)
    arena = rank.arenas[part]
    arena.blocks[places[block], token * arena.layout.row_bytes[0]] ^= 1


# The window before token 32 is [27, 32): the last token of one block, and all of the next.
@pytest.mark.parametrize(
    ("part", "block", "token"), [(FULL, 0, 0), (FULL, -1, 0), (WINDOW, 0, 3), (WINDOW, -1, 0)]
)
def test_a_flipped_bit_is_found(part: Component, block: int, token: int) -> None:
    """Twin."""
    with ComponentRank("flipped", dram=DRAM) as rank:
        rank.serve(PROMPT)
        damage(rank, part, PROMPT, block, token)
        with pytest.raises(WrongKvError, match=f"{part!r} of"):
            rank.serve([*PROMPT, 7])


def test_a_stale_window_row_is_found() -> None:
    """Twin: the cache has the window of another prompt, whose last tokens are the same."""
    with ComponentRank("stale", dram=DRAM) as rank:
        other = [4, *PROMPT[1:]]
        rank.serve(PROMPT)
        rank.serve(other)
        nodes = [rank.resume([*tokens, 0]) for tokens in (PROMPT, other)]
        right, wrong = (rank.places(node, blocks, WINDOW)[0] for node, blocks in nodes)
        rank.arenas[WINDOW].blocks[right[-1]] = rank.arenas[WINDOW].blocks[wrong[-1]]
        with pytest.raises(WrongKvError, match="window of"):
            rank.serve([*PROMPT, 7])


def test_a_layer_that_was_not_copied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: a load reports its layers as done without copying them."""
    with ComponentRank("early", dram=DRAM) as rank:
        rank.serve(PROMPT)
        monkeypatch.setattr(rank.mover._copier, "scatter", lambda plan, layer: 0)
        with pytest.raises(WrongKvError):
            rank.serve([*PROMPT, 7])


def test_from_disk_after_dram_was_lost(tmp_path: Path) -> None:
    with ComponentRank("disk", dram=DRAM, disks=tmp_path) as rank:
        rank.serve(PROMPT)
        rank.to_disk(PROMPT)
        rank.store.ledger.clear()
        assert rank.serve([*PROMPT, 7]) == 0
        rank.store.ledger.clear()
        assert rank.from_disk(PROMPT) == 8
        rank.check()
        assert rank.serve([*PROMPT, 7]) == 32
        rank.store.ledger.clear()
        # Without the window's last block, no place is left from which a request could go on.
        disk = rank.disks[WINDOW]
        disk.drop(b"n" * 16, rank.names(WINDOW, encode_tokens(PROMPT))[7:8])
        assert rank.from_disk(PROMPT) == 0


async def endpoint(rank: ComponentRank) -> Endpoint:
    """Both components in DRAM and in HBM, each a pool of its own."""
    config = EndpointConfig("x", "model", transports=(TransportName.TCP,))
    specs = [PoolSpec.of_arena(POOLS[part], rank.pools[part].geometry, rank.arenas[part]) for part in POOLS]
    specs += [rank.pools[part].spec(PAGES[part]) for part in PAGES]
    return await Endpoint.start(config, specs)


@pytest.mark.parametrize("damaged", [None, FULL, WINDOW], ids=["whole", "full", "window"])
async def test_a_peer_serves_both_components(damaged: Component | None) -> None:
    with ComponentRank("owner", dram=DRAM) as owner, ComponentRank("reader", dram=DRAM) as reader:
        owner.serve(PROMPT)
        if damaged is not None:
            damage(owner, damaged, PROMPT, -1)
        theirs, mine = await endpoint(owner), await endpoint(reader)
        try:
            instance = await mine.connect([theirs.address])
            node, blocks = owner.resume([*PROMPT, 0])
            fetched: list[tuple[Component, str]] = []

            def fill(part: Component, key: bytes, wanted: range, places: np.ndarray) -> int:
                held, whole = owner.places(node, blocks, part)
                sources = held[wanted.start - whole.start : wanted.stop - whole.start]
                offer = theirs.publish(POOLS[part], f"{part!r} {wanted}", sources)
                instance.transfer(offer.request, [offer], POOLS[part], places)
                fetched.append((part, offer.request))
                return len(wanted)

            assert reader.bring(encode_tokens(PROMPT), blocks, fill) == 8
            for _, request in fetched:
                await instance.complete(request, SECONDS)
            assert {part for part, _ in fetched} == {FULL, WINDOW}
            if damaged is None:
                reader.check()
                assert reader.serve([*PROMPT, 7]) == 32
            else:
                with pytest.raises(WrongKvError):
                    reader.serve([*PROMPT, 7])
        finally:
            await mine.close()
            await theirs.close()


@pytest.mark.parametrize("late", [False, True], ids=["whole", "a token late"])
async def test_a_hand_over_brings_pages_of_each_component(late: bool) -> None:
    """From HBM to HBM: all pages of full, of the window those that the next token attends to."""
    with ComponentRank("prefill", dram=DRAM) as prefill, ComponentRank("decode", dram=DRAM) as decode:
        chain = np.array(chain_of(SPACE, PROMPT), np.uint64)
        slots = {rank: rank.allocator.alloc(len(PROMPT)).numpy() for rank in (prefill, decode)}
        for part, oracle in prefill.oracles.items():
            for local in range(oracle.layers):
                oracle.write(prefill.rows[part](slots[prefill]), chain, local)
        theirs, mine = await endpoint(prefill), await endpoint(decode)
        try:
            instance = await mine.connect([theirs.address])
            needed = {
                FULL: range(len(PROMPT)),
                WINDOW: range(len(PROMPT) + 1 - WINDOW.coverage.tokens, len(PROMPT)),
            }
            for part, tokens in needed.items():
                tokens = range(tokens.start - late, tokens.stop - late) if part is WINDOW else tokens
                sources = prefill.rows[part](slots[prefill][tokens.start : tokens.stop])
                offer = theirs.publish(PAGES[part], part.name, sources)
                targets = decode.rows[part](slots[decode][needed[part].start : needed[part].stop])
                instance.transfer(part.name, [offer], PAGES[part], targets)
                await instance.complete(part.name, SECONDS)

            def read() -> None:
                for part, tokens in needed.items():
                    rows = decode.rows[part](slots[decode])[tokens.start : tokens.stop]
                    for local in range(decode.oracles[part].layers):
                        decode.oracles[part].compare(rows, chain[tokens.start : tokens.stop], local, part)

            if late:
                with pytest.raises(WrongKvError, match="window"):
                    read()
            else:
                read()
        finally:
            await mine.close()
            await theirs.close()


def test_the_window_of_these_tests_begins_inside_a_block() -> None:
    """Such a block is saved whole or not at all."""
    assert WINDOW.coverage.tokens % BLOCK
