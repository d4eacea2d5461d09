"""The approximate index: guesses, confirmation, time to live, bound, and a model test against a dict."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_ext.keys import encode_tokens
from sglang_ext.router.index.prompt_trees import (
    GUESS_SPAN_S,
    GUESS_TTL_S,
    MANY_CHILDREN,
    SPANS_PER_TTL,
    PromptTrees,
)
from sglang_ext.router.policies import Match
from sglang_ext.testing.fakes import FakeClock

NS = ("tokens", None, None, None)


def held(trees: PromptTrees, prompt: bytes, namespace: tuple[str | None, ...] = NS) -> dict[str, int]:
    """Instance -> leading tokens it is believed to hold."""
    return {name: match.tokens for name, match in trees.match(namespace, prompt).items()}


def key(*blocks: int, size: int = 4) -> bytes:
    """A prompt of whole blocks, each with one number for all its tokens."""
    return encode_tokens([block for block in blocks for _ in range(size)])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def trees(clock: FakeClock) -> PromptTrees:
    return PromptTrees(clock, block_size=4, ttl_s=80.0)


def test_it_tells_how_much_of_a_prompt_each_instance_has(trees) -> None:
    trees.confirm(NS, key(1, 2, 3), "a")
    trees.confirm(NS, key(1, 2, 4), "b")
    assert held(trees, key(1, 2, 3, 5)) == {"a": 12, "b": 8}
    assert held(trees, key(9)) == {}
    assert held(trees, key(1, 2, 3), ("other",)) == {}
    assert trees.tokens_of("a") == 12
    assert trees.blocks == 4
    trees.check()


def test_a_guess_lives_two_seconds(trees, clock) -> None:
    trees.guess(NS, key(1, 2), "a")
    clock.advance(GUESS_TTL_S)
    assert held(trees, key(1, 2)) == {"a": 8}
    clock.advance(GUESS_SPAN_S)
    assert held(trees, key(1, 2)) == {}
    trees.check()


def test_a_confirmed_guess_stays(trees, clock) -> None:
    trees.guess(NS, key(1, 2), "a")
    trees.confirm(NS, key(1, 2, 3), "a")
    clock.advance(GUESS_TTL_S + 2 * GUESS_SPAN_S)
    assert held(trees, key(1, 2, 3)) == {"a": 12}


def test_a_guess_that_expires_does_not_take_a_confirmed_entry_with_it(trees, clock) -> None:
    trees.confirm(NS, key(1, 2), "a")
    trees.guess(NS, key(1, 2, 3), "a")
    assert held(trees, key(1, 2, 3)) == {"a": 12}
    clock.advance(GUESS_TTL_S + GUESS_SPAN_S)
    assert held(trees, key(1, 2, 3)) == {"a": 8}


def test_entries_live_for_the_ttl_and_are_refreshed_by_use(trees, clock) -> None:
    trees.confirm(NS, key(1, 2), "a")
    trees.confirm(NS, key(1, 3), "a")
    clock.advance(60.0)
    trees.confirm(NS, key(1, 2), "a")
    clock.advance(40.0)
    assert held(trees, key(1, 2)) == {"a": 8}
    assert held(trees, key(1, 3)) == {"a": 4}
    clock.advance(80.0 + 80.0 / SPANS_PER_TTL)
    assert held(trees, key(1, 2)) == {}


def test_the_ttl_of_one_instance_is_not_refreshed_by_another(trees, clock) -> None:
    trees.confirm(NS, key(1, 2), "a")
    clock.advance(60.0)
    trees.confirm(NS, key(1, 2), "b")
    clock.advance(40.0)
    assert held(trees, key(1, 2)) == {"b": 8}


def test_what_an_instance_lost_is_forgotten_at_once(trees) -> None:
    trees.confirm(NS, key(1, 2), "a")
    trees.guess(NS, key(3), "a")
    trees.confirm(NS, key(1), "b")
    trees.forget("a")
    assert held(trees, key(1, 2)) == {"b": 4}
    assert held(trees, key(3)) == {}
    assert trees.tokens_of("a") == 0
    trees.confirm(NS, key(1, 2), "a")
    assert held(trees, key(1, 2)) == {"a": 8, "b": 4}
    trees.check()


def test_it_knows_a_requests_own_past_from_a_common_beginning(trees) -> None:
    """1 is the system prompt; 2 and 4 begin conversations."""
    trees.confirm(NS, key(1, 2, 3), "a")
    trees.confirm(NS, key(1, 4), "a")
    trees.confirm(NS, key(1), "b")

    def own(*blocks: int) -> dict[str, bool]:
        return {name: match.own for name, match in trees.match(NS, key(*blocks)).items()}

    assert own(1, 2, 3, 9) == {"a": True, "b": True}
    assert own(1, 4, 9) == {"a": True, "b": True}
    assert own(1, 9) == {"a": False, "b": True}
    assert own(1, 2, 9) == {"a": False, "b": True}
    assert own(1, 2, 3) == {"a": True, "b": True}
    assert own(1, 2) == {"a": True, "b": True}


def test_a_beginning_with_very_many_continuations_is_a_common_one(trees) -> None:
    for number in range(MANY_CHILDREN + 1):
        trees.confirm(NS, key(1, 100 + number), "a")
    trees.confirm(NS, key(1), "b")
    assert trees.match(NS, key(1, 9))["b"] == Match(4, own=False)


def test_what_an_instance_holds_is_counted_once(trees, clock) -> None:
    for _ in range(5):
        trees.guess(NS, key(1, 2), "a")
        trees.confirm(NS, key(1, 2, 3), "a")
        clock.advance(12.0)
    assert trees.tokens_of("a") == 12
    trees.confirm(NS, key(1, 5), "a")
    assert trees.tokens_of("a") == 16
    clock.advance(200.0)
    while trees.tidy():
        trees.check()
    assert trees.tokens_of("a") == 0


def test_clear_forgets_everybody(trees) -> None:
    trees.confirm(NS, key(1), "a")
    trees.guess(NS, key(1), "b")
    trees.clear()
    assert held(trees, key(1)) == {}
    while trees.tidy():
        pass
    assert trees.size_bytes == 0


def test_expired_entries_leave_the_tree_in_slices(clock) -> None:
    trees = PromptTrees(clock, block_size=4, ttl_s=8.0)
    for first in range(2000):
        trees.confirm(NS, key(first, 1, 2), "a")
    clock.advance(10.0)
    assert held(trees, key(5, 1, 2)) == {}
    assert trees.blocks == 6000
    slices = 0
    while trees.tidy():
        slices += 1
        trees.check()
    assert slices > 6
    assert (trees.blocks, trees.nodes, trees.size_bytes) == (0, 0, 0)


def test_memory_is_bounded_and_the_oldest_goes_first(clock) -> None:
    bound = 200_000
    trees = PromptTrees(clock, block_size=4, ttl_s=1000.0, max_bytes=bound)
    for number in range(500):
        trees.confirm(NS, key(number, 1, 2, 3), "a")
        clock.advance(2.0)
        assert trees.size_bytes <= bound
    assert trees.evicted_blocks > 0
    assert held(trees, key(0, 1)) == {}
    assert held(trees, key(499, 1, 2, 3)) == {"a": 16}
    trees.check()


def test_a_prompt_larger_than_the_bound_does_not_stay(clock) -> None:
    trees = PromptTrees(clock, block_size=4, max_bytes=5000)
    trees.confirm(NS, key(*range(1000)), "a")
    assert trees.size_bytes <= 5000
    trees.check()


@pytest.mark.parametrize("instances", [1, 4])
def test_the_estimate_of_memory_is_near_what_python_takes(instances) -> None:
    """Conversations with a common start, as they come in. Dicts grow in steps, so the truth jumps: the
    estimate may lie above it by half, and hardly below it, or the bound would not be one."""
    rng = random.Random(0)
    prompts = []
    for _ in range(10):
        system = [rng.randrange(32_000) for _ in range(128)]
        for _ in range(30):
            turns = list(system)
            for _ in range(3):
                turns += [rng.randrange(32_000) for _ in range(80)]
                prompts.append(encode_tokens(turns))
    trees = PromptTrees(FakeClock())
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for prompt in prompts:
            for number in range(instances):
                trees.confirm(NS, prompt, f"instance-{number}")
        real = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.9 < trees.size_bytes / real < 1.6


class AgainstADict(RuleBasedStateMachine):
    """The trees against a dict of (instance, prompt) -> when it stops being believed, at the latest."""

    @initialize()
    def start(self) -> None:
        self.clock = FakeClock()
        self.trees = PromptTrees(self.clock, block_size=2, ttl_s=8.0)
        self.truth: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
        """(instance, prompt) -> (believed at least until, believed at most until)."""

    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
    instances = st.sampled_from("ab")

    def _note(self, instance: str, prompt: tuple[int, ...], ttl: float, span: float) -> None:
        now = self.clock.monotonic()
        for end in range(1, len(prompt) + 1):
            least, most = self.truth.get((instance, prompt[:end]), (0.0, 0.0))
            self.truth[instance, prompt[:end]] = max(least, now + ttl), max(most, now + ttl + span)

    @rule(instance=instances, prompt=prompts)
    def guess(self, instance: str, prompt: tuple[int, ...]) -> None:
        self.trees.guess(NS, key(*prompt, size=2), instance)
        self._note(instance, prompt, GUESS_TTL_S, GUESS_SPAN_S)

    @rule(instance=instances, prompt=prompts)
    def confirm(self, instance: str, prompt: tuple[int, ...]) -> None:
        self.trees.confirm(NS, key(*prompt, size=2), instance)
        self._note(instance, prompt, 8.0, 1.0)

    @rule(instance=instances)
    def forget(self, instance: str) -> None:
        self.trees.forget(instance)
        self.truth = {entry: life for entry, life in self.truth.items() if entry[0] != instance}

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 8.5]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def tidy(self) -> None:
        self.trees.tidy()

    @rule(prompt=prompts)
    def match(self, prompt: tuple[int, ...]) -> None:
        now = self.clock.monotonic()
        found = held(self.trees, key(*prompt, size=2))
        for instance in "ab":
            least = most = 0
            for end in range(1, len(prompt) + 1):
                surely, possibly = self.truth.get((instance, prompt[:end]), (0.0, 0.0))
                least = 2 * end if surely > now else least
                most = 2 * end if possibly > now else most
            assert least <= found.get(instance, 0) <= most

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "trees"):
            self.trees.check()


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class LongAgainstADict(AgainstADict):
    pass


TestLongAgainstADict = pytest.mark.long(LongAgainstADict.TestCase)
TestLongAgainstADict.settings = settings(max_examples=500, stateful_step_count=60, deadline=None)
