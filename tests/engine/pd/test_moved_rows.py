"""Moving a running request of a model with windows or states between two decode ranks: all that SGLang's
pools have of it comes along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_hybrid_pools import FULL, MAMBA, SWA, Ids
from engine_hybrids import OVERLAP, SCENARIOS, HybridKind, HybridRank, HybridScenario
from engine_pools import WrongKvError, chain_of, extend_chain
from pd_rig import Rows, transfer_thread
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from test_moved_pages import KeptReplies
from test_pd_whole_requests import Side, listed, side

from sglang_ext.disagg.handover import ReceiverState
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.pd.peers import Local
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.handed_over import handed_over_pools
from sglang_ext.patches.adapter.hybrid.pools import ComponentPool
from sglang_ext.patches.adapter.migration.migration import Migration
from sglang_ext.patches.adapter.pd.kv_manager import rows_beside, running_indices
from sglang_ext.patches.adapter.pd.pd_setup import ScratchRow
from sglang_ext.protocol.agent import Park, Parked, Unpark
from sglang_ext.testing.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

PROMPT = [at % 5 for at in range(64)]
ANSWER_TOKENS = 45
WINDOWS = [
    HybridScenario("window", HybridKind(window=32, page=16), 480, window_tokens=256),
    HybridScenario("window, overlap", HybridKind(window=32), window_tokens=200, settings=OVERLAP),
]
STATES = HybridScenario("states", HybridKind(states=24))
BOTH = HybridScenario("window and states", HybridKind(window=32, states=24), window_tokens=240)
GRIDS = [each for each in SCENARIOS if each.kind.grid and each.name.endswith("grid, overlap")]
SOUND = [*WINDOWS, STATES, BOTH, *GRIDS]


@dataclass
class Moving:
    """A decode rank that a request leaves, and the pools of its new rank."""

    source: HybridRank
    target: Side
    agents: list[Agent]
    migration: Migration
    replies: KeptReplies


def scheduler_of(rank: HybridRank, metadata: MetadataBuffers) -> Any:
    """The simulated scheduler, with what SGLang's has beside that."""
    scheduler: Any = rank.scheduler
    scheduler.enable_overlap = rank.scenario.settings.overlap
    scheduler.process_batch_result = scheduler._process
    scheduler.spec_algorithm = SimpleNamespace(is_none=lambda: True)
    scheduler.req_to_token_pool = rank.pools.requests
    scheduler.token_to_kv_pool_allocator = rank.pools.allocator
    scheduler.sliding_window_size = rank.scenario.kind.window or None
    scheduler.disagg_metadata_buffers = metadata
    scheduler.output_streamer = SimpleNamespace(stream_output=lambda reqs, logprobs: None)
    return scheduler


@contextmanager
def moving(scenario: HybridScenario) -> Iterator[Moving]:
    metadata = MetadataBuffers(1, 8, torch.float32, 0)
    row_bytes, page = len(ScratchRow(metadata).read()), scenario.kind.page
    with ExitStack() as stack:
        rank = HybridRank(scenario, make_cache=HybridRadixCache)
        stack.callback(rank.__exit__)
        target = stack.enter_context(side(scenario))
        pools = rank.pools
        ours = handed_over_pools(pools.params(), scenario.kind.window or None, pools.drafts)
        agents = []
        for name, found in (("a", ours), ("b", target.found)):
            specs = [pool.spec(name, 0, 1) for name, pool in found.items()]
            transfers = transfer_thread(name, specs)
            stack.callback(transfers.close)
            described = {name: pool.described(1) for name, pool in found.items()}
            config = AgentConfig(Local(0, 1, page, row_bytes, components=described), "weights")
            agents.append(Agent(config, transfers, Rows(row_bytes)))
            stack.callback(agents[-1].close)
        agents[0].meet_at(agents[0].address)
        scheduler, kinds, replies = scheduler_of(rank, metadata), target.kinds, KeptReplies()
        assert [kind.value for kind in listed(pools).state_types] == kinds
        rank.cache.join((), replies=replies)
        migration = rank.cache.migration
        assert isinstance(migration, Migration)
        manager: Any = SimpleNamespace(
            agent=agents[0],
            meeting=agents[0].address,
            beside_running=lambda req: rows_beside(kinds, running_indices(scheduler, req, kinds)),
        )
        migration.transfer_by(manager)
        found_pair = Moving(rank, target, agents, migration, replies)
        # pytest keeps the yielded value; the agents' memory has to go with it.
        stack.callback(vars(found_pair).clear)
        yield found_pair


def running(pair: Moving) -> Req:
    """A request whose window has left its prompt."""
    req = pair.source.scheduler.submit(PROMPT, new_tokens=ANSWER_TOKENS + 10)
    while len(req.output_ids) < ANSWER_TOKENS:
        pair.source.step()
    return req


@dataclass(frozen=True)
class Received:
    """A request's place at the target, in pages of its pools."""

    at: Side
    chain: Ids
    pages: Ids
    window: Ids
    state: int = 3

    @staticmethod
    def of(at: Side, tokens: list[int]) -> Received:
        kind, rng = at.scenario.kind, np.random.default_rng(5)
        count = -(-len(tokens) // kind.page)
        first = max(0, len(tokens) - kind.window) // kind.page if kind.window else count
        pages = rng.permutation(np.arange(1, at.pools.tokens // kind.page + 1))[:count]
        last = at.pools.window_tokens // kind.page
        window = rng.permutation(np.arange(1, last + 1))[: count - first]
        chain = np.array(chain_of((0, None, None), tokens), np.uint64)
        return Received(at, chain, pages, window)

    def wanted(self) -> Wanted:
        named = {"swa": self.window, "mamba": [np.array([self.state])]}
        beside = rows_beside(self.at.kinds, [named[kind] for kind in self.at.kinds])
        return Wanted(self.pages, 0, 0, beside=beside)

    def rows(self, part: ComponentType) -> Ids:
        """The last rows of a component, up to the last token."""
        page, tokens = self.at.scenario.kind.page, len(self.chain)
        if part == MAMBA:
            return np.array([self.state])
        slots = self.pages if part == FULL else self.window
        behind = -tokens % page
        rows = (slots[:, None] * page + np.arange(page)).ravel()
        return rows[: len(rows) - behind]

    def compare(self) -> None:
        for part, oracle in self.at.pools.oracles.items():
            rows = self.rows(part)
            for layer in range(oracle.layers):
                oracle.compare(rows, self.chain[-len(rows) :], layer, "moved")


def received(pair: Moving, req: Req) -> Received:
    """Stop a request, and read all of it."""
    assert pair.migration.takes_command(Park("move 1", req.rid), 0.0)
    (parked,) = pair.replies.sent
    assert isinstance(parked, Parked)
    assert not parked.why
    place = Received.of(pair.target, list(req.origin_input_ids + req.output_ids)[:-1])
    receiver = pair.agents[1].receiver
    taken = receiver.open(parked.meeting, parked.bootstrap_room, read=True)
    wait_until(lambda: taken.state is ReceiverState.READY, seconds=20, what="the offer")
    receiver.read(taken, place.wanted())
    wait_until(lambda: taken.over, seconds=20, what="the KV")
    assert taken.state is ReceiverState.HELD, taken.reason
    receiver.settle(taken)
    return place


def planes_of(pools: dict[str, ComponentPool]) -> Iterator[tuple[str, torch.Tensor, int]]:
    for name, pool in pools.items():
        for layer in pool.planes_by_layer:
            for plane in layer:
                yield name, plane, pool.block_rows


@pytest.mark.parametrize("scenario", SOUND, ids=str)
def test_all_of_a_moved_request_comes(scenario: HybridScenario) -> None:
    """Prompt and answer, up to the last token, which has no KV yet. The twin: a byte of any plane that is
    another one is seen."""
    with moving(scenario) as pair:
        req = running(pair)
        place = received(pair, req)
        place.compare()
        blocks = {"hbm": place.pages, "window": place.window, "state": [place.state]}
        seen = 0
        for name, plane, block_rows in planes_of(pair.target.found):
            row = plane[int(blocks[name][0]) * block_rows + block_rows - 1]
            row[0] ^= 1
            with pytest.raises(WrongKvError):
                place.compare()
            row[0] ^= 1
            seen += 1
        assert seen >= 2 * len(pair.target.found)
        place.compare()
        assert pair.migration.takes_command(Unpark("move 1", stay=False), 0.0)
        assert pair.migration.counts == {"parked": 1, "left": 1}
        pair.source.finish()


def _stale_row(pair: Moving, req: Req, chain: list[int]) -> None:
    pools = pair.source.pools
    slots = pools.requests.req_to_token[req.kv.req_pool_idx, len(chain) - 1 : len(chain)]
    rows = pools.window_rows(slots.numpy().astype(np.int64))
    for layer in range(pools.oracles[SWA].layers):
        pools.oracles[SWA].write(rows, np.array(chain[-4:-3], np.uint64), layer)


def _late_state(pair: Moving, req: Req, chain: list[int]) -> None:
    late = list(chain)
    extend_chain(late, (0, None, None), req.output_ids[-1:])
    oracle, rows = pair.source.pools.oracles[MAMBA], np.array([int(req.kv.mamba_pool_idx)])
    for layer in range(oracle.layers):
        oracle.write(rows, np.array(late[-1:], np.uint64), layer)


@pytest.mark.parametrize(
    ("scenario", "damage"),
    [(WINDOWS[0], None), (WINDOWS[0], _stale_row), (STATES, None), (STATES, _late_state)],
)
def test_a_stale_row_or_a_late_state_is_seen(
    scenario: HybridScenario, damage: Callable[[Moving, Req, list[int]], None] | None
) -> None:
    """More twins: the last row of the window is that of an earlier token, or the state has one token more."""
    with moving(scenario) as pair:
        req = running(pair)
        if damage is not None:
            damage(pair, req, chain_of((0, None, None), list(req.origin_input_ids + req.output_ids)[:-1]))
        place = received(pair, req)
        with nullcontext() if damage is None else pytest.raises(WrongKvError):
            place.compare()
        assert pair.migration.takes_command(Unpark("move 1", stay=False), 0.0)
