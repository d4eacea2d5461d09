"""The oracle: against all evictions that there are, on small caches."""

from __future__ import annotations

import array
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.simulator.regret import Uses, belady


def best(requests: list[tuple[list[int], list[int]]], capacity: int) -> int:
    """The most blocks of prompts that any cache can have had, by trying all."""
    states = {frozenset(): 0}
    for prompt, answer in requests:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            # A block that is used twice in a request is a hit the second time if it is kept, which is free.
            gained = hits + sum(name in held or name in prompt[:at] for at, name in enumerate(prompt))
            known = held | set(prompt) | set(answer)
            for kept in itertools.combinations(sorted(known), min(capacity, len(known))):
                state = frozenset(kept)
                following[state] = max(following.get(state, 0), gained)
        states = following
    return max(states.values())


def arrays(requests: list[tuple[list[int], list[int]]]) -> tuple[array.array[int], array.array[int]]:
    names, ends = array.array("q"), array.array("q")
    for prompt, answer in requests:
        names.extend(prompt)
        ends.append(len(names))
        names.extend(answer)
        ends.append(len(names))
    return names, ends


REQUEST = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), st.lists(st.integers(6, 8), max_size=1)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=6), st.integers(1, 4))
def test_no_cache_of_that_size_reuses_more(
    requests: list[tuple[list[int], list[int]]], capacity: int
) -> None:
    oracle, infinite = belady(*arrays(requests), capacity)
    assert oracle == best(requests, capacity)
    seen: set[int] = set()
    again = 0
    for prompt, answer in requests:
        again += sum(name in seen for name in prompt)
        seen.update(prompt, answer)
    assert infinite == again >= oracle


def test_uses_are_counted_in_tokens_of_whole_blocks_before_the_last_token() -> None:
    uses = Uses(10)
    text = bytes(range(256)) * 4  # 16 blocks of 16 tokens
    uses.add("a", 0, text[:256], text[256:384])
    uses.add("a", 0, text[:512], b"\0" * 64)
    uses.add("b", 0, text[:512], b"\0" * 64)
    uses.add("c", 1, text[:512], b"\0" * 64)
    found = uses.regret(1000)
    # Of the second: the prompt of the first and the answer but for its last token; of the third, all of the
    # second's but for the block with the last token. The fourth is another tenant's.
    assert found.infinite_tokens == found.oracle_tokens == 5 * 16 + 7 * 16
    assert uses.regret(1).oracle_tokens < found.oracle_tokens
