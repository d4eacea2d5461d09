"""Returns by name between two schedulers over models with windows or states: decode's blocks come to prefill.

Each row that a model reads and each block in DRAM equals the oracle's, as in `test_oracle_store`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from engine_drafts import GRID, PAGED_WINDOW
from engine_drafts import STATES as DRAFTED_STATES
from engine_hybrid_store import StoreBelow, our_store
from engine_hybrids import HybridRank, HybridScenario
from engine_movers import until
from engine_pools import WrongKvError
from exchange_rig import Exchange
from pd_rig import METADATA, Rows
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_oracle_store import BOTH, PAGED, PROMPT, STATES, WINDOW

from sglang_ext.clock import SystemClock
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.forward_fence import nothing_runs
from sglang_ext.engine.hybrid.components import FULL
from sglang_ext.engine.pd.agent import Agent, AgentConfig
from sglang_ext.engine.pd.bootstrap import BootstrapService
from sglang_ext.engine.pd.messages import ReturnEnd
from sglang_ext.engine.pd.peers import Local
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.linker import names_of_prompt
from sglang_ext.patches.adapter.hybrid.pools import component_pools
from sglang_ext.patches.adapter.pd.role_parts import HybridRole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

EAGLE = (PAGED_WINDOW, DRAFTED_STATES, GRID)
SCENARIOS = [WINDOW, PAGED, STATES, BOTH, *(replace(each, name=f"{each}, EAGLE") for each in EAGLE)]
ANSWER_TOKENS = 40


class Server:
    """A scheduler with its store, exchange and agent, in a role.

    Args:
        bootstrap: prefill's address; empty on decode.
    """

    def __init__(self, scenario: HybridScenario, number: int, bootstrap: str, full: int) -> None:
        self.rank = HybridRank(
            scenario, make_cache=HybridRadixCache, make_below=our_store(full=full, other=full // 2)
        )
        below, cache, pools = self.rank.below, self.rank.cache, self.rank.pools
        assert isinstance(below, StoreBelow)
        assert isinstance(cache, HybridRadixCache)
        self.cache, self.store, self.below = cache, below.store, below
        (kv,) = (
            pool
            for pool in component_pools(pools.params(), cache.sliding_window_size, pools.drafts)
            if pool.component == FULL
        )
        self.exchange = Exchange(
            self.store,
            below._weights,
            partial(names_of_prompt, page_size=scenario.kind.page, pairs=cache.tree_core.is_eagle),
            SystemClock(),
            number=number,
            handed_over=[kv.spec(HBM_POOL, 0, 1)],
        )
        commands = RankCommandQueue() if bootstrap else None
        cache.join([self.exchange.peers, self.exchange.transfers], commands=commands)
        local = Local(0, 1, scenario.kind.page, METADATA)
        self.agent = Agent(
            AgentConfig(local, "weights", bootstrap=bootstrap), self.exchange.transfers, Rows()
        )
        self.role = HybridRole(cache, self.agent, self.agent.close)
        if bootstrap:
            self.role.prefill(self.rank.scheduler, lambda: nothing_runs, returns=True)
        else:
            cache.chunks = None
            self.role.decode(lambda: nothing_runs, 0, returns=True)
        self.role.begin()

    def step(self) -> None:
        queue = self.cache.command_queue
        for command in () if queue is None else queue.take():
            self.cache.commands.handle(command.payload, 0.0)
        self.rank.step()

    def close(self) -> None:
        self.agent.close()
        if self.cache.command_queue is not None:
            self.cache.command_queue.close()
        self.rank.__exit__()  # with its cache, all planners


@dataclass
class Pair:
    prefill: Server
    decode: Server
    address: str

    def answer(self, *, new_tokens: int = ANSWER_TOKENS) -> list[int]:
        """Have decode answer a prompt that prefill has computed; the tokens that have KV."""
        self.prefill.rank.serve(PROMPT)
        req = self.decode.rank.scheduler.submit(PROMPT, new_tokens=new_tokens)
        req.bootstrap_host, _, req.bootstrap_port = self.address.rpartition(":")
        req.bootstrap_room = 7
        until(lambda: self.decode.step() or req.finished(), "the answer")
        return [*PROMPT, *req.output_ids][:-1]

    def until(self, outcome: ReturnEnd) -> None:
        """Let both schedulers pass until decode has counted a return."""
        sender = self.decode.agent._return_sender
        assert sender is not None

        def ended() -> bool:
            self.prefill.step()
            self.decode.step()
            return bool(sender.outcomes)

        until(ended, f"a return, {outcome}")
        assert sender.outcomes == {outcome: 1}


@pytest.fixture
def pair(scenario: HybridScenario, request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack:
        bootstrap = BootstrapService("127.0.0.1", 0, None)
        stack.callback(bootstrap.close)
        small = getattr(request, "param", 600)
        servers = [Server(scenario, 0, bootstrap.address, small), Server(scenario, 1, "", 600)]
        found = Pair(*servers, bootstrap.address)
        for server in servers:
            stack.callback(server.close)
        # pytest keeps the yielded value; the servers' memory has to go with it.
        stack.callback(vars(found).clear)
        decode = found.decode.agent
        decode.transfers.run(decode._peers.get(bootstrap.address))
        del servers, server, decode
        yield found


def next_turn(server: Server, tokens: Sequence[int]) -> Any:
    """The request that goes on from a conversation at a server whose HBM has nothing of it."""
    server.rank.settle()
    server.cache.check_hicache_events()
    everything = server.rank.pools.tokens
    server.cache.evict(EvictParams(everything, swa_num_tokens=everything, mamba_num=everything))
    return server.rank.serve([*tokens, 1, 2, 3])


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "wrong bits"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_prefill_goes_on_behind_the_answer(pair: Pair, damaged: bool) -> None:
    tokens = pair.answer()
    pair.decode.rank.settle()
    if damaged:
        for part in pair.decode.store.parts.values():
            part.memory.arena.blocks[list(part.memory._names), 0] ^= 1
        pair.decode.rank.below.check = lambda rank: None  # prefill is to notice it
    pair.until(ReturnEnd.RETURNED)
    page = pair.prefill.rank.pools.kind.page
    pairs = pair.prefill.cache.tree_core.is_eagle
    kept = (len(tokens) - pairs) // page * page
    sender, receiver = pair.decode.agent._return_sender, pair.prefill.agent.answers.returns
    assert sender is not None
    assert receiver is not None
    assert sender.tokens == receiver.tokens > 0
    assert receiver.outcomes == {ReturnEnd.DRAM: 1}
    with pytest.raises(WrongKvError) if damaged else nullcontext():
        assert next_turn(pair.prefill, tokens).cached_tokens == kept


@pytest.mark.parametrize("scenario", [BOTH], ids=str)
def test_a_return_of_what_prefill_has_brings_nothing(pair: Pair) -> None:
    pair.prefill.rank.serve(PROMPT, new_tokens=ANSWER_TOKENS)
    pair.prefill.rank.settle()
    pair.answer()
    pair.until(ReturnEnd.KNOWN)


@pytest.mark.parametrize("scenario", [PAGED], ids=str)
def test_less_than_a_page_is_not_returned(pair: Pair) -> None:
    req = pair.decode.rank.scheduler.submit(PROMPT[:5], new_tokens=3)
    req.bootstrap_host, _, req.bootstrap_port = pair.address.rpartition(":")
    until(lambda: pair.decode.step() or req.finished(), "the answer")
    pair.until(ReturnEnd.SHORT)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("scenario", [BOTH], ids=str)
def test_other_weights_return_nothing(pair: Pair, side: str) -> None:
    """Blocks have names of the weights of the start, and the pair compares the weights in use."""
    server = getattr(pair, side)
    if side == "decode":
        server.rank.scheduler.change_weights()
    else:
        server.agent.weights_changed("tuned")
    pair.answer()
    pair.until(ReturnEnd.WEIGHTS)


@pytest.mark.parametrize("pair", [48], indirect=True)
@pytest.mark.parametrize("scenario", [STATES], ids=str)
def test_a_return_without_room_is_given_up(pair: Pair) -> None:
    """A quarter of DRAM may be reserved for returns."""
    pair.answer()
    pair.until(ReturnEnd.MEMORY)
    for server in (pair.prefill, pair.decode):
        server.store.check()
