"""Properties of the policies over a simulated fleet, and of the simulator itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.data import data_folder
from benchmarks.policies.simulator import BlockCache, Chains, FleetPlan, Outcome, simulate
from benchmarks.policies.workloads import (
    BLOCK_TOKENS,
    SimRequest,
    SimSession,
    arriving,
    loogle,
    mooncake,
    popular_prefix,
    repeated,
    sharegpt,
    tokens_of,
)
from sglang_ext.cost_model import Batching, CostModel
from sglang_ext.cost_model.batch import Batch
from sglang_ext.cost_model.model import Execution
from sglang_ext.errors import ConfigError
from sglang_ext.router.policies import POLICIES

SEED = 11
SEEDS = range(1, 9)
ONE_BY_ONE = Batching(most=1)
"""A pass for each prompt."""


def outcomes(sessions, plan: FleetPlan, *names: str) -> list[Outcome]:
    return [simulate(sessions, POLICIES[name], plan) for name in names]


def documents(copies: int = 1, seed: int = SEED, count: int = 40, per_second: float = 16.0):
    """Synthetic: ``count`` documents of 1,024 tokens with three questions each."""
    found = []
    for number in range(count):
        document = tuple(range(number * 1000, number * 1000 + 64))
        asked = tuple(
            SimRequest((*document, number * 1000 + 100 + q, number * 1000 + 200 + q), 32) for q in range(3)
        )
        found.append(SimSession(f"d{number}", asked))
    return arriving(repeated(found, copies), per_second, seed)


def test_at_share_ratio_2_prompts_count_more_than_sessions() -> None:
    """MemServe, figure 15: the duplicates of a session are other sessions, and meet its cache only by prompt.

    How much depends on the load; that it is less, does not. Over eight arrivals, for the P99 of one is three
    requests.
    """
    p99: dict[str, float] = Counter()
    reused: dict[str, float] = Counter()
    for seed in SEEDS:
        for name in ("cost", "prompt-tree", "session"):
            outcome = simulate(documents(2, seed), POLICIES[name], FleetPlan(4))
            p99[name] += outcome.ttft(99)
            reused[name] += outcome.reused
    assert p99["cost"] <= p99["prompt-tree"]
    assert p99["cost"] < 0.6 * p99["session"]
    assert p99["prompt-tree"] < 0.6 * p99["session"]
    assert min(reused["cost"], reused["prompt-tree"]) > 0.95 * reused["session"]


@pytest.mark.parametrize("policy", ["cost", "prompt-tree", "auto"])
def test_a_popular_prefix_is_everybodys(policy) -> None:
    sessions = arriving(popular_prefix(200, 2048, 256), 20.0, SEED)
    (outcome,) = outcomes(sessions, FleetPlan(4), policy)
    counts = outcome.spread
    assert len(counts) == 4
    assert max(counts.values()) <= 1.5 * min(counts.values())
    # Each instance computes it once or, while the first is still being computed, a few times.
    assert outcome.reused > 0.8


def test_conversations_find_their_past_again() -> None:
    past: tuple[int, ...] = ()
    sessions = []
    for number in range(24):
        past, turns = (), []
        for turn in range(6):
            past = (*past, *range(number * 10_000 + turn * 40, number * 10_000 + turn * 40 + 40))
            turns.append(SimRequest(past, 32, think_s=2.0))
        sessions.append(SimSession(f"c{number}", tuple(turns)))
    arrived = arriving(sessions, 4.0, SEED)
    cost, tree, session, chance = outcomes(arrived, FleetPlan(4), "cost", "prompt-tree", "session", "random")
    best = session.reused
    assert min(cost.reused, tree.reused) > 0.95 * best
    assert chance.reused < 0.8 * best
    assert max(cost.ttft(99), tree.ttft(99)) < chance.ttft(99)


def test_wrong_beliefs_are_corrected() -> None:
    """The fleet is ten times as slow as the router believes at first."""

    class TenTimes:
        def __init__(self, execution: Execution) -> None:
            self.around_s = 0.0
            self._execution = execution

        def batch_s(self, batch: Batch) -> float:
            return 10 * self._execution.batch_s(batch)

    slow = CostModel()
    slow.execution = TenTimes(slow.execution)
    sessions = documents(2, per_second=1.6)
    right = simulate(sessions, POLICIES["cost"], FleetPlan(4, model=slow))
    wrong = simulate(sessions, POLICIES["cost"], FleetPlan(4, model=slow, believed=CostModel()))
    assert wrong.ttft(99) < 1.25 * right.ttft(99)


@pytest.mark.parametrize("policy", ["cost", "prompt-tree"])
def test_a_true_index_is_worth_its_events_when_caches_are_scarce(policy) -> None:
    """A router's outdated belief in evicted prefixes sends requests to instances where nothing is found."""
    knows, guesses = [
        [
            simulate(
                documents(4, seed, per_second=8.0),
                POLICIES[policy],
                FleetPlan(4, cache_blocks=200, exact=exact),
            )
            for seed in SEEDS
        ]
        for exact in (True, False)
    ]
    assert sum(one.reused for one in knows) > 1.05 * sum(one.reused for one in guesses)
    assert sum(one.ttft(99) for one in knows) < 0.8 * sum(one.ttft(99) for one in guesses)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_is_served_once_and_twice_alike(policy) -> None:
    sessions = documents(1, count=10)
    first = simulate(sessions, POLICIES[policy], FleetPlan(3, cache_blocks=200))
    assert len(first.served) == 30
    assert all(one.ttft_s > 0 and 0 <= one.cached_tokens < one.prompt_tokens for one in first.served)
    again = simulate(sessions, POLICIES[policy], FleetPlan(3, cache_blocks=200))
    assert again.served == first.served


def test_who_knows_what_is_computed_together_chooses_better() -> None:
    """A loaded fleet, whose router takes exec over batches, or for the sum of single prompts."""
    seconds: dict[str, list[float]] = {}
    for seed in SEEDS:
        sessions = documents(2, seed, per_second=40.0)
        for name, told in (("batches", None), ("singles", ONE_BY_ONE)):
            outcome = simulate(sessions, POLICIES["cost"], FleetPlan(4, told=told))
            seconds.setdefault(f"{name} P50", []).append(outcome.ttft(50))
            seconds.setdefault(f"{name} P99", []).append(outcome.ttft(99))
    total = {name: sum(each) for name, each in seconds.items()}
    assert total["batches P50"] < 0.9 * total["singles P50"]
    assert total["batches P99"] < total["singles P99"]


def test_one_instance_computes_as_its_model_says() -> None:
    request = SimRequest(tuple(range(64)), 16)
    sessions = [SimSession("s", (request, request))]
    served = simulate(sessions, POLICIES["cost"], FleetPlan(1)).served
    model = CostModel()
    assert served[0].ttft_s == pytest.approx(model.exec_s(1024, 0))
    assert served[1].cached_tokens == 1023
    assert served[1].ttft_s == pytest.approx(model.exec_s(1, 1023))


# -- the cache ------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple), max_size=40),
    st.integers(1, 12),
)
def test_a_cache_holds_whole_prefixes_and_no_more_than_its_size(prompts, limit) -> None:
    cache, chains = BlockCache(limit), Chains()
    for prompt in prompts:
        chain = chains.of(prompt)
        cache.insert(chain)
        assert len(cache) <= limit
        held, ended = cache.match(chain)
        assert held == min(len(chain), limit)
        assert ended or len(chain) > limit


def test_what_was_used_last_stays() -> None:
    cache, chains = BlockCache(4), Chains()
    first, second, third = chains.of((1, 2)), chains.of((3, 4)), chains.of((5, 6))
    cache.insert(first)
    cache.insert(second)
    cache.insert(first)
    cache.insert(third)
    assert [cache.match(chain)[0] for chain in (first, second, third)] == [2, 0, 2]


def test_the_same_block_behind_another_prefix_is_another() -> None:
    chains = Chains()
    assert chains.of((1, 2))[1] != chains.of((3, 2))[1]
    assert chains.of((1, 2)) == chains.of((1, 2))


# -- real workloads ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder():
    try:
        return data_folder()
    except ConfigError as error:
        pytest.skip(str(error))


def test_real_workloads_share_what_they_should(folder) -> None:
    papers, talks, trace = loogle(folder), sharegpt(folder, 50), mooncake(folder, 200)
    assert len(papers) == 80
    assert 230 <= sum(len(session.requests) for session in papers) <= 290
    for session in papers:
        shared = {request.blocks[:64] for request in session.requests}
        assert len(shared) == 1
    assert len({session.requests[0].blocks[:64] for session in papers}) == 80
    assert len(talks) == 50
    for session in talks:
        for before, after in zip(session.requests, session.requests[1:], strict=False):
            assert after.blocks[: len(before.blocks)] == before.blocks
    starts = [session.start_s for session in trace]
    assert starts == sorted(starts)
    assert all(len(session.requests[0].blocks) * BLOCK_TOKENS <= 140_000 for session in trace)


def test_real_documents_at_share_ratio_2(folder) -> None:
    sessions = arriving(repeated(loogle(folder), 2), 16.0, SEED)
    cost, session = outcomes(sessions, FleetPlan(4), "cost", "session")
    assert cost.ttft(99) < 0.7 * session.ttft(99)


def test_texts_are_counted_by_their_script() -> None:
    assert tokens_of("a" * 400) == 100
    assert tokens_of("请" * 100) == 100
    assert tokens_of("") == 1
