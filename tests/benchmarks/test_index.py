"""The index benchmark compares like with like: same prompts, verified answers, the trees it names."""

from __future__ import annotations

import itertools
import os
import statistics
import warnings

import numpy as np
import pytest

from benchmarks.index import __main__ as index
from benchmarks.index import hashes
from benchmarks.index.workload import SYSTEM_TOKENS, TURN_TOKENS, Workload
from benchmarks.lib.common import SEED, Report
from sglang_ext.patches.cpu import runtime

runtime.prepare_process(os.environ)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang and its dependencies warn about kernels that a CPU lacks
    import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401

LENGTH = min(TURN_TOKENS)


def workload(conversations: int = 4) -> Workload:
    return Workload(100, LENGTH, conversations, SEED)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_every_index_answers_the_same_prompts(page: int) -> None:
    work = workload()
    indexes = index.caches(page)
    index.build(indexes, work)
    times = index.measure(indexes, work, calls=3)
    assert {name for name, _ in times.seconds} == {index.OURS, *index.PEERS}
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in times.seconds.values())
    assert len(times.seconds) == 4 * sum(map(len, index.KINDS.values()))


def test_a_wrong_answer_stops_the_benchmark() -> None:
    work = workload()
    ours = index.caches(1)[0]
    index.build([ours], work)
    prompt = work.whole(0)
    slots = ours.match(prompt)
    ours.verify(prompt, len(slots), slots)
    slots[-1] += 1
    with pytest.raises(RuntimeError, match="wrong slots"):
        ours.verify(prompt, len(slots), slots)
    with pytest.raises(RuntimeError, match="ours knows 16 tokens of a prompt of which it has 2048"):
        ours.verify(prompt, 16, slots[:16])


def test_the_same_seed_makes_the_same_prompts() -> None:
    first, second = workload(), workload()
    for a, b in zip(first.filling(), second.filling(), strict=True):
        assert (a.tokens, a.known) == (b.tokens, b.known)
    assert first.parting(1).tokens == second.parting(1).tokens


def test_conversations_share_system_prompts_and_grow() -> None:
    work = workload()
    prompts = list(work.filling())
    starts = {tuple(prompt.tokens[: SYSTEM_TOKENS[0]]) for prompt in prompts}
    assert 1 < len(starts) <= 8 < len(prompts)
    for before, after in itertools.pairwise(prompts):
        if after.known == len(before.tokens):
            assert after.tokens[: after.known] == before.tokens
    assert statistics.mean(prompt.known > 0 for prompt in prompts) > 0.8


def test_prompts_know_what_they_share_with_the_tree() -> None:
    work = workload()
    known = {tuple(prompt.tokens) for prompt in work.filling()}
    whole, longer, parting = work.whole(2), work.next_turn(2), work.parting(2)
    assert whole.known == LENGTH == len(longer.tokens) == len(parting.tokens)
    assert tuple(whole.tokens) in known
    assert tuple(longer.tokens[: longer.known]) in known
    for prompt in (longer, parting):
        assert prompt.tokens[: prompt.known] == whole.tokens[: prompt.known]
        assert prompt.tokens[prompt.known] != whole.tokens[prompt.known]
    assert work.unknown().tokens[0] not in {tokens[0] for tokens in known}


def test_the_summary_is_calls_per_second_of_an_equal_mix() -> None:
    report = Report("index")
    kinds = [kind for group in index.KINDS.values() for kind in group]

    def times(theirs: float) -> index.Times:
        seconds = {(index.OURS, kind): [1e-6] * 3 for kind in kinds}
        for peer in index.PEERS:
            for kind in kinds:
                slow = kind.endswith(("full hit", "new chat"))
                seconds[peer, kind] = [theirs * (4e-6 if slow else 2e-6)] * 3
        return index.Times(seconds)

    measured = {index.Case(number, LENGTH, 1): times(number) for number in (1, 2, 9)}
    measured[index.Case(1, LENGTH, 16)] = times(100)
    index.summarize(report, measured)
    assert report.summary["match_vs_sglang_python"] == pytest.approx(2 * (4 + 3 * 2) / 4)
    assert report.summary["insert_vs_sglang_rust"] == pytest.approx(2 * (4 + 2 * 2) / 3)
    assert report.summary["match_vs_sglang_rust_paged"] == pytest.approx(100 * (4 + 3 * 2) / 4)


def test_quick_measures_a_part_of_what_is_measured_in_full() -> None:
    quick, full = index.cases(quick=True), index.cases(quick=False)
    assert set(quick) < set(full)
    assert {(c.nodes, c.length) for c in full if c.page == 1} == {
        (nodes, length) for nodes in (1_000, 10_000, 100_000) for length in (2_048, 8_192, 32_768)
    }


def test_hashes_answer_as_a_tree_does_and_jumps_find_every_border() -> None:
    """Holders of none, part or all; the twin, whose jumps skip a border, does not."""
    numbers = np.random.default_rng(SEED)
    key = numbers.integers(0, 32_000, 40 * hashes.BLOCK, dtype=np.int32).tobytes()
    found = hashes.Hashes()
    held = {number: int(numbers.integers(0, 41)) for number in range(30)}
    for number, blocks in held.items():
        found.store(number, key[: blocks * hashes.BLOCK_BYTES])
    expected = {number: blocks for number, blocks in held.items() if blocks}
    assert found.holders(key) == expected
    assert found.holders(key[hashes.BLOCK_BYTES :]) == {}
    (longest, who), *_ = found.runs(key)
    assert longest == max(held.values())
    assert {number for number in held if who >> number & 1} == {n for n, b in held.items() if b == longest}

    class Skips(hashes.Hashes):
        def runs(self, key: bytes) -> list[tuple[int, int]]:
            return super().runs(key)[::2]

    damaged = Skips()
    damaged._masks = found._masks
    assert damaged.holders(key) != expected
