"""`sglang-ext cluster` with a model that has windows, beside the KV of every token.

Its servers join the router, later turns of a conversation find the earlier ones, and a cluster that is
started again finds them on its disks.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from disk_damage import damage_last_layer
from test_cluster import START_S, RunningCluster, addresses, ask
from test_hybrid_tiers import ANSWER_TOKENS, MODELS, TURN, random_tokens, settled, spoil

from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(3 * START_S)]

CONVERSATIONS = 4
LIMITS = ("--max-running-requests", "2", "--chunked-prefill-size", "128")


def said(url: str, prompt: Sequence[int]) -> Answer:
    """The answer of a cluster, as `ServerProcess.generate` asks for it."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body = {
        "input_ids": list(prompt),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    return Answer.of(ask(url, body))


@pytest.mark.parametrize("model", ["tiny-spark"])
def test_later_turns_find_the_earlier_ones_also_after_a_restart(tmp_path: Path, model: str) -> None:
    """The answers are those of a server of SGLang alone. The twin: the blocks that a conversation's
    second turn wrote to disk are damaged, with checksums that fit, and the third turn has another answer."""
    flags, component = MODELS[model]
    flags = (*flags, *LIMITS)
    histories = [random_tokens(TURN, seed) for seed in range(CONVERSATIONS)]
    turns: list[list[tuple[list[int], Answer]]] = []
    alone = (*flags, "--max-total-tokens", "8192", "--disable-radix-cache")
    with ServerProcess(ServerSpec(model=model, flags=alone)) as truth:
        for number in range(3):
            turns.append([])
            for index, history in enumerate(histories):
                history += random_tokens(30 * bool(number), seed=100 * number + index)
                answer = truth.generate(history, max_new_tokens=ANSWER_TOKENS)
                turns[-1].append((list(history), answer))
                history += answer.tokens
    start = ("--colocated", "2"), (*flags, "--dtype", "float32")

    with closing(RunningCluster(tmp_path, *start[0], flags=start[1], model=model)) as cluster:
        url = addresses(cluster)["router"]
        for prompt, expected in turns[0]:
            assert_same(expected, said(url, prompt))
        for (before, _), (prompt, expected) in zip(turns[0], turns[1], strict=True):
            sound = settled(cluster.disk)
            answer = said(url, prompt)
            assert answer.cached_tokens >= len(before) - 16
            assert_same(expected, answer)
        last = {place for place in settled(cluster.disk) - sound if component in place[0].parts}
    assert last
    damage_last_layer(last, spoil, forge=True)
    for rank in {segment.parent for segment, _ in last}:
        # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
        shutil.rmtree(rank / INDEX_DIRECTORY)
        repair_directory(rank)

    with closing(RunningCluster(tmp_path, *start[0], flags=start[1], model=model)) as cluster:
        url = addresses(cluster)["router"]
        for (before, _), (prompt, expected) in zip(turns[1], turns[2], strict=True):
            answer = said(url, prompt)
            assert answer.disk_tokens >= len(before) - 17
            if (prompt, expected) != turns[2][-1]:
                assert_same(expected, answer)
                continue
            with pytest.raises(AssertionError):
                assert_same(expected, answer)
