"""Prefill and decode apart with a model that has windows: the answers are those of one server.

The window's rows of a request come beside the KV of all tokens, from a pool of their own.
Prefill keeps what it computed in HBM, DRAM and on disk (``--kv-pd-caching 1``); decode keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from pd_fleet import PREFILL_IS_GONE, FaultySpec, Rig, assert_failed, fault, kill, nothing_is_left, prompt_of

from sglang_ext.testing.models import RECIPES
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ANSWER_TOKENS = 8
MODEL, POOL = "tiny-spark", "window"
FLAGS = (
    *("--page-size", "16", "--swa-full-tokens-ratio", "0.5", "--max-total-tokens", "2048"),
    *("--max-running-requests", "4", "--chunked-prefill-size", "128"),
)
WINDOW: int = RECIPES[MODEL].config["sliding_window"]
LENGTHS = (5, WINDOW - 1, WINDOW, WINDOW + 1, 300, 417)
"""Of the first turns: less than the window and more, less than a chunk and more."""
TURN = 90


@dataclass
class HybridRig(Rig):
    """The pair, and two turns of conversations with the answers of a server of SGLang alone."""

    turns: tuple[tuple[list[int], Answer], ...] = ()
    second: tuple[tuple[list[int], Answer], ...] = ()


def conversations(server: ServerProcess) -> list[tuple[tuple[list[int], Answer], ...]]:
    """The first turns and the second ones, with their answers."""
    prompts = [prompt_of(length, length) for length in LENGTHS]
    first = [(prompt, server.generate(prompt, max_new_tokens=ANSWER_TOKENS)) for prompt in prompts]
    longer = [[*prompt, *answer.tokens, *prompt_of(7 * len(prompt), TURN)] for prompt, answer in first]
    second = [(prompt, server.generate(prompt, max_new_tokens=ANSWER_TOKENS)) for prompt in longer]
    return [tuple(first), tuple(second)]


@pytest.fixture(scope="module")
def rig(
    tmp_path_factory: pytest.TempPathFactory,
    preloaded_servers: None,
    leak_guard: LeakGuard,
) -> Iterator[HybridRig]:
    folder = tmp_path_factory.mktemp("faults")
    alone = ServerSpec(model=MODEL, flags=(*FLAGS, "--disable-radix-cache"))
    with ServerProcess(alone) as truth:
        first, second = conversations(truth)
    spec = FaultySpec(model=MODEL, flags=(*FLAGS, "--kv-pd-caching", "1", "--kv-check", "--enable-metrics"))
    disk = ("--kv-disk-path", str(folder / "disk"), "--kv-disk-size", "1GB")
    prefill, decode = spec.looking_at(folder / "prefill"), spec.looking_at(folder / "decode")
    prefill = replace(prefill, flags=(*prefill.flags, "--kv-dram-size", "64MB", *disk))
    with leak_guard.adopting(), pd_servers([prefill], [decode]) as (servers, _):
        faults = [folder / "prefill"], [folder / "decode"]
        yield HybridRig(servers, servers.decode[0], *faults, None, first, second)
        # A test may have started it anew.
        servers.prefill[0].server.stop()


def answered(rig: HybridRig, turns: tuple[tuple[list[int], Answer], ...]) -> list[Answer]:
    """The answers of the pair, two prompts at a time; each is the lone server's."""
    with ThreadPoolExecutor(2) as pool:
        asked = lambda prompt: rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)  # noqa: E731
        answers = list(pool.map(asked, [prompt for prompt, _ in turns]))
    for (_, expected), answer in zip(turns, answers, strict=True):
        assert_same(expected, answer)
    return answers


def loaded(server: ServerProcess) -> float:
    """Blocks that have come from DRAM; metrics are a moment old."""
    name = "sglang_ext_cache_dram_blocks"
    samples = server.metrics().items()
    return sum(value for sample, value in samples if sample.startswith(name) and '"loaded"' in sample)


def assert_first_turns_found(answers: list[Answer]) -> None:
    """Prefill has computed no whole page of the long first turns again."""
    found = [answer.cached_tokens for answer in answers]
    assert all(
        tokens >= length // 16 * 16 for tokens, length in list(zip(found, LENGTHS, strict=True))[-2:]
    ), found


def test_conversations_get_the_answers_of_one_server(rig: HybridRig) -> None:
    """First turns, second ones that prefill finds in HBM, and these again, from DRAM or disk."""
    answered(rig, rig.turns)
    found = answered(rig, rig.second)
    assert_first_turns_found(found)
    for seed in range(6):
        rig.pd.generate(prompt_of(1000 + seed, 500), max_new_tokens=1)
    found = answered(rig, rig.second)
    assert_first_turns_found(found)
    rig.pd.wait_idle()
    wait_until(lambda: loaded(rig.pd.prefill[0].server) > 0, seconds=10, what="blocks from DRAM")
    assert nothing_is_left(rig.pd.servers)


def test_one_block_of_zeros_is_seen(rig: HybridRig) -> None:
    """The twin: if this did not fail, the test above would prove nothing."""
    for prompt, expected in rig.turns[-2:]:
        with fault(rig.decode_faults[0], f"zero-{POOL}"):
            damaged = rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
        with pytest.raises(AssertionError):
            assert_same(expected, damaged)


def test_decode_goes_on_after_prefill_was_killed_in_a_hand_over(
    rig: HybridRig, leak_guard: LeakGuard
) -> None:
    prompt, expected = rig.turns[-1]
    prefill = rig.pd.prefill[0]
    with fault(rig.decode_faults[0], "hold-reading") as reading:
        _, answer = rig.pd.start(prompt, max_new_tokens=ANSWER_TOKENS)
        wait_until(reading.exists, seconds=60, what="reading")
        kill(prefill.server)
    assert_failed(answer, PREFILL_IS_GONE)
    assert nothing_is_left(rig.pd.decode)
    with leak_guard.adopting():
        prefill.server.stop()
        prefill.server = ServerProcess(prefill.server.spec)
        prefill.server.start()
    assert_same(expected, rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS))
