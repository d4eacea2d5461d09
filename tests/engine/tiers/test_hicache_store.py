"""A store that SGLang's HiCache wrote is found, and its KV equals a model's.

The store is written by SGLang's own file backend, hashes and key scheme. The simulated forward pass compares
every row that it reads with a model's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_pools import PoolKind, WrongKvError
from engine_simulation import Rank, Scenario

from sglang_ext.config import KvConfig
from sglang_ext.engine.tiers.opening import open_below
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import Geometry
from sglang_ext.keys import encode_tokens, page_seed
from sglang_ext.patches.adapter.hicache import HICACHE, hicache_store
from sglang_ext.tiered_store.hicache import HiCacheStore, PageOrder
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Outcome
from sglang_ext.tiers import Tier, all_tiers, withdraw
from tests.support.hicache import HiCacheServer, rows_of

engine_hicache = pytest.importorskip("engine_hicache", exc_type=ImportError)  # SGLang 0.5.23

pytestmark = pytest.mark.usefixtures("sglang_config")

BLOCK, BLOCKS = 4, 12
MODEL = "org/model"
PROMPT = [100 + n for n in range(BLOCKS * BLOCK + 1)]
ORDERS = ("layer_first", "page_first", "page_first_direct", "page_unified")


def scenario(attention: str) -> Scenario:
    kind = PoolKind(attention, value_dim=4)
    return Scenario("HiCache below", kind, hbm_tokens=240, dram_blocks=60, disk_blocks=60)


@pytest.fixture(autouse=True)
def forget_tier() -> Iterator[None]:
    yield
    if HICACHE in all_tiers():
        withdraw(HICACHE)


class Site:
    """A directory of HiCache, a rank that has computed its contents, and ranks that read it."""

    def __init__(self, tmp_path: Path, attention: str, order: str, page: int) -> None:
        self.path, self.order, self.page = tmp_path, order, page
        self.folder = tmp_path / "hicache"
        self.scenario = scenario(attention)
        self.ranks: list[Rank] = []
        self.computed, self.geometry = self._compute()
        heads = self.geometry.shard.heads if attention == "mha" else 0
        plane = self.geometry.planes[0]
        self.writer = HiCacheServer(
            self.folder, MODEL, order, page, self.geometry.n_layers, heads, plane.row_bytes, plane.dtype
        )

    def _compute(self) -> tuple[np.ndarray, Geometry]:
        """The KV of the prompt, in rows, as a server without HiCache has it below memory."""
        rank = Rank(self.scenario)
        self.ranks.append(rank)
        rank.serve(PROMPT)
        assert rank.tier is not None
        assert rank.writes is not None
        assert rank.promotions is not None
        rank.tier.copies.settle()
        rank.writes.settle()
        names = rank.writes.names
        space = rank.cache.namespace(None, None)
        keys = names.following(space, b"", encode_tokens(PROMPT))
        tier, layout = rank.promotions._tier, rank.pools.geometry().layout
        blocks = np.zeros((len(keys), layout.block_bytes), np.uint8)
        get = tier.prepare_get(names.digest(space), keys)
        assert get.blocks == BLOCKS
        for layer in range(layout.n_layers):
            read = tier.get_layer(get, layer, BlockMemory.of_blocks(layout, blocks), np.arange(BLOCKS))
            assert read.outcome is Outcome.DONE
        tier.complete_get(get)
        return rows_of(layout, blocks), rank.pools.geometry()

    def written(self, extra_key: str | None = None) -> list[Path]:
        """Write the prompt's pages; returns their files, in order."""
        names = engine_hicache.write(self.writer, PROMPT, self.computed, extra_key)
        return [next(self.folder.glob(f"{name}_*.bin")) for name in names]

    def open(self, model: str = MODEL, tp: tuple[int, int] = (0, 1)) -> HiCacheStore:
        """The tier as a server opens it."""
        ctx: Any = SimpleNamespace(tp_rank=tp[0], tp_size=tp[1], params=SimpleNamespace(page_size=self.page))
        config = self._config(hicache=f"{self.order}:{self.folder}")
        store = hicache_store(ctx, config, self.geometry, model=model)
        assert store is not None
        return store

    def _config(self, **more: Any) -> KvConfig:
        disk = str(self.path / "disk")
        return KvConfig(disk_path=disk, disk_size=64 << 20, dram_size=1 << 20, block_size=BLOCK, **more)

    def server(self) -> Rank:
        """A rank with an empty disk tier and the store below it."""

        def below(stand_in: BlockTier) -> BlockTier:
            made = open_below(self._config(), "simulated", "tp0of1", stand_in.layout, (self.open(),))
            assert made is not None
            return made

        self.ranks.append(Rank(self.scenario, disk_class=below))
        return self.ranks[-1]


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(attention: str = "mha", order: str = "layer_first", page: int = 2) -> Site:
        sites.append(Site(tmp_path, attention, order, page))
        return sites[-1]

    yield make
    for site in sites:
        for rank in site.ranks:
            rank.close()


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_a_prompt_is_taken_from_the_store(
    make_site: Callable[..., Site], attention: str, order: str, page: int
) -> None:
    """And enters the disk tier, from which it comes the next time; a flipped byte is read as it is."""
    site = make_site(attention, order, page)
    files = site.written()
    assert len(files) == BLOCKS * BLOCK // page
    rank = site.server()
    req = rank.serve(PROMPT)
    assert req.cached_tokens == BLOCKS * BLOCK
    assert rank.promotions is not None
    disk, store = rank.promotions._tier.parts
    assert store.stats().got[Outcome.DONE] == BLOCKS
    assert rank.tier is not None
    assert rank.writes is not None
    rank.tier.copies.settle()
    rank.writes.settle()
    assert disk.stats().blocks >= BLOCKS
    rank.close()
    site.ranks.remove(rank)
    shutil.rmtree(site.path / "disk")

    data = bytearray(files[0].read_bytes())
    data[len(data) // 2] ^= 1
    files[0].write_bytes(data)
    with pytest.raises(WrongKvError):
        site.server().serve(PROMPT)


def test_hashes_are_those_of_sglang() -> None:
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    pages = get_hash_str(PROMPT[:8], None, 4)
    first = hashlib.sha256(encode_tokens(PROMPT[:4])).digest()
    assert pages == [first.hex(), hashlib.sha256(first + encode_tokens(PROMPT[4:8])).hexdigest()]
    for extra_key, salt in ((None, None), ("a", None), (None, "b"), ("", "ü"), ("ab", "c")):
        assert page_seed(extra_key, salt).hex() == (storage_namespace_seed(extra_key, salt) or "")


def test_tenants_have_their_own(make_site: Callable[..., Site]) -> None:
    site = make_site()
    site.written(extra_key="tenant")
    assert site.server().serve(PROMPT).cached_tokens == 0
    names = [bytes([n]) * 16 for n in range(BLOCKS)]
    store = site.open()
    for tenant, found in ((("tenant", None), BLOCKS), (("other", None), 0), ((None, "tenant"), 0)):
        space = repr(tenant).encode()[:16].ljust(16)
        store.follow(space, tenant, b"", names, encode_tokens(PROMPT))
        assert store.match(space, names) == found


@pytest.mark.parametrize(("model", "tp"), [("org/other", (0, 1)), (MODEL, (0, 2)), (MODEL, (1, 2))])
@pytest.mark.parametrize("order", ["layer_first", "page_unified"])
def test_files_of_others_are_refused(
    make_site: Callable[..., Site], order: str, model: str, tp: tuple[int, int]
) -> None:
    site = make_site("mha", order)
    site.written()
    with pytest.raises(ConfigError, match=r"no file in .* is named HASH_") as refused:
        site.open(model, tp)
    assert "--served-model-name" in str(refused.value)


def test_the_other_rank_of_a_model_has_files_of_its_own(make_site: Callable[..., Site]) -> None:
    """Beside the files of this rank."""
    site = make_site()
    mine = site.written()
    other = dataclasses.replace(site.writer, tp_rank=1, tp_size=2)
    engine_hicache.write(other, PROMPT, site.computed[:, :, ::-1])
    assert len(list(site.folder.glob("*.bin"))) == 2 * len(mine)
    assert site.server().serve(PROMPT).cached_tokens == BLOCKS * BLOCK


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(bytes(file.stat().st_size)),
        lambda file: file.unlink(),
        lambda file: file.chmod(0o666),
        lambda file: file.symlink_to(file.rename(file.with_name("moved"))),
    ],
    ids=["short", "zero", "gone", "of others", "link"],
)
def test_damage_that_shows_is_a_miss(make_site: Callable[..., Site], damage: Callable[[Path], Any]) -> None:
    """The third page, after the tier was opened: its block and those after it are computed."""
    site = make_site(page=4)
    files = site.written()
    rank = site.server()
    damage(files[2])
    assert rank.serve(PROMPT).cached_tokens == 2 * BLOCK


def test_what_cannot_be_read_is_refused_by_name(make_site: Callable[..., Site]) -> None:
    site = make_site(page=4)
    site.written()
    layout = site.geometry.layout
    for other, words in (
        (dataclasses.replace(layout, block_tokens=6), "--kv-block-size 4"),
        (dataclasses.replace(layout, layers=((24, 24),)), "--kv-cache-dtype"),
    ):
        with pytest.raises(ConfigError) as refused:
            HiCacheStore(site.folder, "_org-model_0_1", PageOrder(site.order), other, Tier.DISK)
        assert words in str(refused.value)
    site.folder.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        site.open()
    site.folder.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot be listed"):
        HiCacheStore(site.path / "none", "_org-model_0_1", PageOrder(site.order), layout, Tier.DISK)
    ctx: Any = SimpleNamespace()
    for empty in ("none", "empty"):  # as on a host to which no store was moved
        site.path.joinpath("empty").mkdir(exist_ok=True)
        nothing = KvConfig(dram_size=1, disk_path="/d", hicache=f"layer_first:{site.path / empty}")
        assert hicache_store(ctx, nothing, site.geometry, model=MODEL) is None
    for value in ("page_head:/h", "layer_first", "/h", "layer_first:"):
        with pytest.raises(ConfigError, match="LAYOUT:DIR"):
            KvConfig(dram_size=1, disk_path="/d", hicache=value)
    for more in ({"disk_path": None}, {"durability": "acked"}):
        with pytest.raises(ConfigError, match="--kv-disk-path"):
            KvConfig(**{"dram_size": 1, "disk_path": "/d", "hicache": "layer_first:/h", **more})


def test_it_is_read_only_and_forgets_what_is_flushed(make_site: Callable[..., Site]) -> None:
    site = make_site(page=4)
    files = site.written()
    store = site.open()
    names, space = [bytes([n]) * 16 for n in range(BLOCKS)], b"s" * 16
    store.follow(space, (None, None), b"", names[:2], encode_tokens(PROMPT)[: 2 * BLOCK * 4])
    store.follow(space, (None, None), names[1], names[2:], encode_tokens(PROMPT)[2 * BLOCK * 4 :])
    store.follow(space, (None, None), b"x" * 16, names, encode_tokens(PROMPT))  # after an unknown block
    assert store.match(space, names) == get_all_blocks(store, space, names) == BLOCKS
    assert store.prepare_put(space, names) is Outcome.READ_ONLY
    assert store.drop(space, names[5:6]) == 1
    assert store.match(space, names) == 5
    assert store.stats().blocks == BLOCKS - 1
    assert store.clear() == BLOCKS - 1
    assert store.match(space, names) == 0
    store.check()
    store.close()
    assert sorted(site.folder.glob("*.bin")) == sorted(files)


def get_all_blocks(store: HiCacheStore, space: bytes, names: list[bytes]) -> int:
    """How many blocks can be read."""
    memory = np.zeros((len(names), store.layout.block_bytes), np.uint8)
    get = store.prepare_get(space, names)
    for layer in range(store.layout.n_layers):
        ids = np.arange(get.blocks)
        store.get_layer(get, layer, BlockMemory.of_blocks(store.layout, memory), ids)
    store.complete_get(get)
    assert store.stats().pins == 0
    return get.blocks
