"""Two schedulers over models with windows or states, of which one reads the other's blocks by name.

Each row that a model reads and each block in DRAM equals the oracle's, as in `test_oracle_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
from engine_drafts import GRID, PAGED_WINDOW
from engine_drafts import STATES as DRAFTED_STATES
from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import SCENARIOS, HybridRank, HybridScenario
from engine_movers import until
from engine_page_pools import COMPRESSED, GROUPED, LOW_RATIO, PAGE, QSA, whole
from engine_pools import WrongKvError
from engine_simulation import Traffic
from exchange_rig import Exchange
from test_oracle_drafts import zero_the_last_row
from test_oracle_store import BOTH, PAGED, PROMPT, STATES, WINDOW, damage, flip_a_bit

from sglang_ext.clock import SystemClock
from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.linker import names_of_prompt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


class Engine:
    """A scheduler, its store, and its exchange with others."""

    def __init__(self, scenario: HybridScenario, number: int, sizes: Sizes) -> None:
        self.rank = HybridRank(
            scenario,
            make_cache=HybridRadixCache,
            make_below=lambda pools, cache: StoreBelow(pools, cache, sizes),
        )
        below, page = self.rank.below, scenario.kind.page
        assert isinstance(below, StoreBelow)
        self.store = below.store
        pairs = self.rank.cache.tree_core.is_eagle
        names = partial(names_of_prompt, page_size=page, pairs=pairs)
        clock = SystemClock()
        self.exchange = Exchange(self.store, below._weights, names, clock, number=number, behind=int(pairs))
        self.rank.cache.join([self.exchange.peers, self.exchange.transfers])

    def passes_until(self, condition: Callable[[], bool], what: str) -> None:
        def once() -> bool:
            self.rank.step()
            return condition()

        until(once, what)

    def close(self) -> None:
        self.rank.__exit__()  # with its cache, all planners


Pair = tuple[Engine, Engine]
PAGES = [at % 5 for at in range(4 * PAGE)]
PROMPTS = [
    pytest.param(WINDOW, PROMPT, id="window"),
    pytest.param(PAGED, PROMPT, id="window, page 16"),
    pytest.param(STATES, PROMPT, id="states"),
    pytest.param(BOTH, PROMPT, id="window and states"),
    pytest.param(whole(COMPRESSED), PAGES, id="compressed"),
    pytest.param(whole(LOW_RATIO), PAGES, id="low-ratio"),
    pytest.param(whole(GROUPED), PAGES, id="grouped"),
    pytest.param(whole(QSA), PAGES, id="qsa"),
]
"""A scenario of each kind of model, with a prompt."""


@contextmanager
def engines(scenario: HybridScenario, sizes: Sizes) -> Iterator[Pair]:
    """Two instances."""
    with ExitStack() as stack:
        pair = []
        for number in range(2):
            pair.append(Engine(scenario, number, sizes))
            stack.callback(pair[-1].close)
        yield pair[0], pair[1]


@pytest.fixture
def pair(scenario: HybridScenario) -> Iterator[Pair]:
    """Two engines with the test's scenario."""
    room = {"full": 120, "other": 60} if scenario.kind.page == PAGE else {"full": 600, "other": 400}
    with engines(scenario, Sizes(**room)) as pair:
        yield pair


def fetch(owner: Engine, reader: Engine, prompt: list[int], **tenant: Any) -> None:
    """Export and fetch a prompt, and send it to the reader at once."""
    whole = prompt[: len(prompt) // owner.store.block_tokens * owner.store.block_tokens]
    reader.exchange.results.clear()
    owner.exchange.export(whole, **tenant)
    reader.exchange.fetch([(owner.exchange.address,)], whole, **tenant)
    owner.passes_until(lambda: not owner.exchange.exports._asked, "the export")


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
@pytest.mark.parametrize(("scenario", "prompt"), PROMPTS)
def test_a_prompt_of_another_instance_is_found(pair: Pair, prompt: list[int], damaged: bool) -> None:
    owner, reader = pair
    owner.rank.serve(prompt)
    owner.rank.settle()
    if damaged:
        for part in owner.store.parts.values():
            damage(owner.rank, part.component.name, flip_a_bit)
        owner.rank.below.check = lambda rank: None  # the reader is to notice it
    fetch(owner, reader, prompt)
    req = reader.rank.scheduler.submit([*prompt, 1, 2, 3], new_tokens=1)
    with pytest.raises(WrongKvError) if damaged else nullcontext():
        reader.passes_until(lambda: req.finished() and reader.rank.scheduler.idle, "the request")
        assert reader.rank.scheduler.loaded == len(prompt)
        assert req.cached_tokens == len(prompt)
    assert reader.exchange.fetches.counters.ends[FetchEnd.DONE] == 1


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "a row of zeros"])
@pytest.mark.parametrize("scenario", [PAGED_WINDOW, DRAFTED_STATES, GRID], ids=str)
def test_a_draft_s_rows_come_with_a_prompt(pair: Pair, damaged: bool) -> None:
    """EAGLE: the last page has a name with the token behind it, which routers send."""
    owner, reader = pair
    prompt = [*PROMPT, 1, 2, 3]
    owner.rank.serve(prompt)
    owner.rank.settle()
    if damaged:
        damage(owner.rank, "full", zero_the_last_row)
        owner.rank.below.check = lambda rank: None
        reader.rank.look_inside = False
    owner.exchange.export(prompt)
    reader.exchange.fetch([(owner.exchange.address,)], prompt)
    owner.passes_until(lambda: not owner.exchange.exports._asked, "the export")
    req = reader.rank.scheduler.submit([*prompt, 1, 2, 3], new_tokens=8)
    with pytest.raises(WrongKvError, match=r"^draft of .* in forward") if damaged else nullcontext():
        reader.passes_until(lambda: req.finished() and reader.rank.scheduler.idle, "the request")
        page = owner.rank.pools.kind.page
        assert reader.rank.scheduler.loaded == len(prompt) // page * page
    assert reader.exchange.fetches.counters.ends[FetchEnd.DONE] == 1


@pytest.mark.parametrize("scenario", [BOTH], ids=str)
def test_a_request_waits_for_its_blocks_and_others_go_first(pair: Pair) -> None:
    owner, reader = pair
    owner.rank.serve(PROMPT)
    owner.rank.settle()
    reader.exchange.fetch([(owner.exchange.address,)], PROMPT)  # it is not exported yet
    waiting = reader.rank.scheduler.submit([*PROMPT, 1], new_tokens=1)
    other = reader.rank.scheduler.submit([7, *PROMPT], new_tokens=1)
    reader.passes_until(other.finished, "the other request")
    assert not waiting.finished()
    owner.exchange.export(PROMPT)
    owner.passes_until(lambda: not owner.exchange.exports._asked, "the export")
    reader.passes_until(waiting.finished, "the request")
    assert waiting.cached_tokens == 64


@pytest.mark.parametrize("scenario", [PAGED, BOTH], ids=str)
def test_every_row_is_right_when_prompts_move(pair: Pair, scenario: HybridScenario) -> None:
    assert move_prompts(pair, scenario, seed=3, steps=60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scenario", [*SCENARIOS, COMPRESSED, GROUPED, QSA], ids=str)
def test_every_row_is_right_when_prompts_move_for_long(
    pair: Pair, scenario: HybridScenario, seed: int
) -> None:
    assert move_prompts(pair, scenario, seed=100 + seed, steps=400)


def move_prompts(pair: Pair, scenario: HybridScenario, *, seed: int, steps: int) -> int:
    """Traffic at both, and in every tenth pass a prompt that ended at one comes to the other.

    Returns how many blocks were fetched.
    """
    owner, reader = pair
    traffic = [Traffic(scenario, seed + number, scenario.stretch) for number in range(2)]
    brought = 0
    for step in range(steps):
        for engine, each in zip((owner, reader), traffic, strict=True):
            each.act(engine.rank.scheduler)
            engine.rank.step()
        ended = owner.rank.scheduler.finished
        if step % 10 == 9 and ended:
            req = traffic[0].random.choice(ended)
            prompt = list(req.origin_input_ids)
            own, salt = owner.rank.scheduler.tenant_of(req)
            tenant = {"cache_salt": salt, "extra_key": own}
            fetch(owner, reader, prompt, **tenant)
            scheduler = reader.rank.scheduler
            scheduler.submit([*prompt, 1], new_tokens=2, extra_key=own, salt=salt)
            fetches = reader.exchange.fetches
            reader.passes_until(lambda fetches=fetches: not fetches.busy, "the fetch")
            brought += fetches.counters.fetched_blocks
            owner, reader = reader, owner
            traffic.reverse()
    for engine in pair:
        engine.rank.run_out()
    return brought
