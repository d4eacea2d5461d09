"""Wrong answers of other caches, as their users reported them: each report's recipe runs here, and every
row that the model reads is compared.

Most follow one recipe: a prompt is computed, asked again while HBM has it, pushed out by other prompts, and
asked twice more. Each report has a twin with the reported fault, which reads a wrong row. docs/models.md
lists the reports.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from engine_hybrid_store import our_store
from engine_hybrids import HybridKind, HybridRank, HybridScenario
from engine_page_pools import GROUPED, PAGE
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario
from sglang.srt.managers.schedule_batch import Req

from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.keys import encode_tokens
from sglang_ext.mempool.ledger import Reservation, Use
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.testing.tiers import WrappedTier
from sglang_ext.tiered_store.copy import CopyPlan, PoolCopier
from sglang_ext.tiered_store.tier import BlockMemory, Get, Ids, LayerRead, Outcome, Put
from sglang_ext.tiers import Tier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

AnyRank: TypeAlias = Rank | HybridRank
Fault = Callable[[pytest.MonkeyPatch, AnyRank], None]

GRID = HybridScenario("states on a grid", HybridKind(states=40, grid=8), hbm_tokens=400)
STATES = HybridScenario("states", HybridKind(states=14))
INDEXED = Scenario(
    "index keys, a disk",
    kind=PoolKind("dsa", 64, layers=3),
    block=64,
    hbm_tokens=64 * 8,
    dram_blocks=8,
    disk_blocks=400,
    settings=Settings(chunk=128, new_token_ratio=0.05),
)
DRAFTED = Scenario("a draft", kind=PoolKind(draft_layers=2), hbm_tokens=256, dram_blocks=250)
PACKED = Scenario("blocks of 8", kind=PoolKind("mha", 4), block=8, hbm_tokens=256, dram_blocks=100)
ON_DISK = Scenario("a disk", hbm_tokens=256, dram_blocks=70, disk_blocks=4000)


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4) for _ in range(count)]


def hybrid(scenario: HybridScenario) -> HybridRank:
    return HybridRank(scenario, make_cache=HybridRadixCache, make_below=our_store())


def churn(rank: AnyRank, seed: int = 100) -> None:
    """Other prompts, of more tokens than HBM has slots."""
    stretch = getattr(rank.scenario, "stretch", 1)
    tokens = 0
    while tokens < 1.35 * rank.pools.tokens:
        rank.settle()
        rank.serve(words(150 * stretch, seed := seed + 1))
        tokens += 150 * stretch
    rank.settle()


def found(req: Req) -> tuple[int, int]:
    """Tokens that a request found, and how many of them below HBM."""
    return req.cached_tokens, req.host_loaded_length


def five_legs(rank: AnyRank, prompt: list[int]) -> None:
    """Cold, hit, churn, host, host again."""
    assert found(rank.serve(prompt)) == (0, 0)
    reused, loaded = found(rank.serve(prompt))
    assert reused
    assert not loaded
    churn(rank)
    reused, loaded = found(rank.serve(prompt))
    assert reused == loaded > 0
    assert found(rank.serve(prompt))[0]


def repeats(rank: AnyRank) -> None:
    five_legs(rank, words(64, seed=1))


def repeats_after_a_flood(rank: AnyRank) -> None:
    """Four replays while HBM has the prompt, six other prompts, four of them at once, and a replay."""
    assert isinstance(rank, HybridRank)
    prompt = words(4 * PAGE + 9, seed=1)
    for _ in range(4):
        rank.serve(prompt)
    for seed in range(2, 6):
        rank.scheduler.submit(words(6 * PAGE, seed), new_tokens=1)
    rank.run_out()
    for seed in (6, 7):
        rank.settle()
        rank.serve(words(6 * PAGE, seed))
    rank.settle()
    assert found(rank.serve(prompt)) == (4 * PAGE, 4 * PAGE)


class EndsEarly(WrappedTier):
    """Brings two blocks and loses those behind them."""

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        read = super().get_layer(get, layer, memory, ids)
        if read.blocks <= 2:
            return read
        get.blocks = min(get.blocks, 2)
        memory.layers[layer][ids[2:]] ^= 0xFF
        return LayerRead(2, Outcome.DAMAGED)


def partial_read(rank: AnyRank) -> None:
    """A prompt of three blocks on disk, of which two arrive."""
    assert isinstance(rank, Rank)
    prompt = words(3 * 64 + 6, seed=1)
    rank.serve(prompt)
    for seed in range(2, 8):
        rank.settle()
        rank.serve(words(180, seed))
    rank.settle()
    assert found(rank.serve(prompt)) == (128, 128)
    assert rank.scheduler.disk_tokens == 128


def dram_is_wanted_during_the_load(rank: AnyRank) -> None:
    """All of DRAM that can be given up is given to others when the first layer has been computed."""
    assert isinstance(rank, Rank)

    def take(layer: int) -> None:
        if layer or not rank.tier.copies.loading:
            return
        taken = rank.store.reserve(Tier.DRAM, "others", encode_tokens(range(1000)), Use.FETCH)
        assert isinstance(taken, Reservation)
        rank.arena.blocks[taken.places] = 0xEE
        taken.abort()

    rank.scheduler.layer_written = take
    repeats(rank)


def shared_prefix(rank: AnyRank) -> None:
    """A conversation goes on, after other prompts, from where another request left it."""
    prompt = words(70, seed=1)
    rank.serve(prompt)
    churn(rank)
    for seed in (2, 3):
        reused, loaded = found(rank.serve([*prompt, *words(20, seed)]))
        assert reused == loaded == 70
        churn(rank, seed=100 * seed)


def sessions(rank: AnyRank) -> None:
    """Sessions come back from disk, all at once and among short requests."""
    assert isinstance(rank, Rank)
    contexts = [words(100, seed) for seed in range(5)]
    for context in contexts:
        rank.serve(context)
        rank.settle()
    churn(rank)
    for number, context in enumerate(contexts):
        rank.scheduler.submit([*context, 1, 2, 3], new_tokens=4)
        rank.scheduler.submit(words(12, 50 + number), new_tokens=8)
    while not rank.scheduler.idle:
        rank.scheduler.step()
        rank.check()
    assert rank.scheduler.disk_tokens >= 300


def short_after_long(rank: AnyRank) -> None:
    """A short prompt, a long one with the same beginning, and the short one again."""
    prefix = words(56, seed=1)
    short = [*prefix, *words(12, seed=2)]
    rank.serve(short)
    rank.serve([*prefix, *words(100, seed=3)])
    rank.serve(short)
    churn(rank)
    reused, loaded = found(rank.serve(short))
    assert reused == loaded >= 56


# -- the faults -------------------------------------------------------------------------------------


def no_states(monkeypatch: pytest.MonkeyPatch, rank: AnyRank) -> None:
    """KV comes back, and the slot of the state keeps that of an earlier pass."""
    load = HybridStore.load

    def partly(store: HybridStore, handle: Any, rows: Any) -> bool:
        return load(store, handle, {part: of for part, of in rows.items() if part.name != "state"})

    monkeypatch.setattr(HybridStore, "load", partly)


def no_index_keys(monkeypatch: pytest.MonkeyPatch, rank: AnyRank) -> None:
    """KV comes back, and its index keys do not."""
    scatter = PoolCopier.scatter

    def partly(copier: PoolCopier, plan: CopyPlan, layer: int) -> int:
        _, *keys = copier.arena.layout.planes_of(layer)
        whole = copier._planes
        copier._planes = whole.copy()
        copier._planes[keys, 2] = 0  # bytes of a row
        moved = scatter(copier, plan, layer)
        copier._planes = whole
        return moved

    if isinstance(rank, HybridRank):
        assert [len(layer) for layer in rank.pools.planes[next(iter(rank.pools.planes))]] == [2, 2]
    monkeypatch.setattr(PoolCopier, "scatter", partly)


def unlocks_early(monkeypatch: pytest.MonkeyPatch, rank: AnyRank) -> None:
    """Blocks in DRAM may be given up while they are copied to HBM."""
    load = DramTier.load

    def loads(tier: DramTier, what: Sequence[Any], places: Any, landed: Any = None) -> None:
        load(tier, list(what), places, landed)
        tier._tree.unlock(what[-1], tier._dram)

    monkeypatch.setattr(DramTier, "load", loads)
    monkeypatch.setattr(DramTier, "_loaded", lambda tier, last, *_: tier._tree.unlock(last, tier._hbm))


def one_group_for_all(monkeypatch: pytest.MonkeyPatch, rank: AnyRank) -> None:
    """States are addressed by the numbers of blocks of KV."""
    load = HybridStore.load

    def mixed(store: HybridStore, handle: Any, rows: Any) -> bool:
        assert load(store, handle, rows)
        full, state = store._queued[handle]
        store._queued[handle] = [full, dataclasses.replace(state, ids=full.ids[-1:])]
        return True

    monkeypatch.setattr(HybridStore, "load", mixed)


def exchanged_dims(monkeypatch: pytest.MonkeyPatch, rank: AnyRank) -> None:
    """The rows of a block are read as if tokens were another dim of it."""
    scatter = PoolCopier.scatter

    def transposed(copier: PoolCopier, plan: CopyPlan, layer: int) -> int:
        tokens = copier.arena.layout.block_tokens
        order = np.arange(tokens).reshape(2, -1).T.ravel()
        runs = np.array([(slot + i, row + i, 1) for slot, row, n in plan.runs for i in range(n)])
        runs[:, 1] += order[runs[:, 1] % tokens] - runs[:, 1] % tokens
        return scatter(copier, dataclasses.replace(plan, runs=runs), layer)

    monkeypatch.setattr(PoolCopier, "scatter", transposed)


class ReadsTheFirst(WrappedTier):
    """Reads the blocks that were written first instead of those that are asked for."""

    swaps = False

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._first: list[bytes] = []

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:
        if len(self._first) < 20:
            self._first += keys
        return super().prepare_put(namespace, keys)

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> Get:
        if self.swaps and keys and keys[0] not in self._first:
            keys = [*self._first, *keys[len(self._first) :]][: len(keys)]
        return super().prepare_get(namespace, keys)


def others_blocks(monkeypatch: pytest.MonkeyPatch, rank: AnyRank) -> None:
    """The disk hands over blocks of another request, which verify."""
    monkeypatch.setattr(ReadsTheFirst, "swaps", True)


def names_the_beginning(monkeypatch: pytest.MonkeyPatch, rank: AnyRank) -> None:
    """The state of a run's end is found where the run begins."""
    save = HybridStore.save

    def misnamed(store: HybridStore, rows: Any) -> None:
        full = next(of for part, of in rows.items() if part.name == "full")
        save(
            store,
            {
                part: dataclasses.replace(of, names=full.names[:1]) if part.name == "state" else of
                for part, of in rows.items()
            },
        )

    monkeypatch.setattr(HybridStore, "save", misnamed)


# -- the reports ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Report:
    """make: the model and its tiers. recipe: of the report. fault: the reported one."""

    make: Callable[[], AnyRank]
    recipe: Callable[[AnyRank], None]
    fault: Fault


REPORTS = {
    "sgl-project/sglang/issues/39830": Report(lambda: hybrid(GRID), repeats, no_states),
    "sgl-project/sglang/issues/38031": Report(lambda: hybrid(GROUPED), repeats_after_a_flood, no_index_keys),
    "sgl-project/sglang/issues/30057": Report(
        lambda: Rank(INDEXED, disk_class=EndsEarly), partial_read, no_index_keys
    ),
    "sgl-project/sglang/issues/30321": Report(
        lambda: Rank(DRAFTED), dram_is_wanted_during_the_load, unlocks_early
    ),
    "LMCache/LMCache/issues/4247": Report(lambda: hybrid(STATES), shared_prefix, one_group_for_all),
    "LMCache/LMCache/issues/4463": Report(lambda: Rank(PACKED), repeats, exchanged_dims),
    "ai-dynamo/dynamo/issues/14416": Report(
        lambda: Rank(ON_DISK, disk_class=ReadsTheFirst), sessions, others_blocks
    ),
    "vllm-project/vllm/issues/49127": Report(lambda: hybrid(GRID), short_after_long, names_the_beginning),
}


def short(name: str) -> str:
    return f"{name.split('/')[1]}-{name.split('/')[-1]}"


each_report = pytest.mark.parametrize("report", REPORTS.values(), ids=map(short, REPORTS))


@each_report
def test_every_row_of_a_reported_recipe_is_right(report: Report) -> None:
    with report.make() as rank:
        report.recipe(rank)


@each_report
def test_the_reported_fault_is_seen(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    with report.make() as rank:
        rank.look_inside = False
        report.fault(monkeypatch, rank)
        with pytest.raises(WrongKvError, match="in forward"):
            report.recipe(rank)


def test_the_page_on_models_lists_every_report() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    rows = [line for line in page.splitlines() if "test_every_row_of_a_reported_recipe_is_right[" in line]
    assert len(rows) == len(REPORTS)
    for name in REPORTS:
        assert any(f"https://github.com/{name}" in row and f"[{short(name)}]" in row for row in rows), name
