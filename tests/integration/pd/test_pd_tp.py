"""Prefill and decode that cut the model differently: tensor parallelism 2 to 1 and 1 to 2, on servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hooked_server import FOLDER
from listening import BOOTSTRAP, GLOO, HTTP, QUEUE, STORE, TRANSFER, beyond_loopback, ports_of_server, rows
from pd_fleet import (
    ANSWER_TOKENS,
    COMMON,
    RETURNED,
    FaultySpec,
    count,
    fault,
    nothing_is_left,
    one_side_is_updated_first,
    prompt_of,
)

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import assert_same, random_conversations
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which decode looks for faults."""
    return tmp_path_factory.mktemp("decode-faults")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 1, "pull"), marks=pytest.mark.long),
        pytest.param((1, 2, "pull"), marks=pytest.mark.long),
        # A server of two ranks, and plain push, in every run: each rank fills its heads of one page.
        (2, 1, "push"),
        pytest.param((1, 2, "push"), marks=pytest.mark.long),
        pytest.param((2, 1, "push-by-layer"), marks=pytest.mark.long),
        pytest.param((1, 2, "push-by-layer"), marks=pytest.mark.long),
        pytest.param((2, 2, "pull"), marks=pytest.mark.long),
    ],
    ids=lambda p: f"prefill{p[0]}-decode{p[1]}-{p[2]}",
)
def servers(
    request: pytest.FixtureRequest, truth: ServerProcess, faults: Path
) -> Iterator[tuple[PdServers, ServerProcess]]:
    *sizes, mode = request.param
    base = ServerSpec(flags=(*COMMON, "--page-size", "16", "--kv-transfer-mode", mode), environment=STRICT)
    specs = [
        replace(base, flags=(*base.flags, "--tp", "2"), environment={**STRICT, **TWO_RANKS})
        if size == 2
        else base
        for size in sizes
    ]
    decode = replace(specs[1], run=FaultySpec.run, environment={**specs[1].environment, FOLDER: str(faults)})
    with pd_servers(specs[:1], [decode]) as (found, _):
        yield found, truth


def test_conversations_get_the_answers_of_one_rank(servers: tuple[PdServers, ServerProcess]) -> None:
    pd, truth = servers
    conversations = random_conversations(seed=9, count=4, turns=(2, 3), tokens=(8, 300), system_tokens=60)
    for turns in conversations:
        history: list[int] = []
        for added in turns:
            history = history + added
            answer = pd.generate(history, max_new_tokens=ANSWER_TOKENS)
            # Sums over two ranks round otherwise than sums over one.
            assert_same(truth.generate(history, max_new_tokens=ANSWER_TOKENS), answer, atol=1e-3)
            history = history + answer.tokens
    pd.wait_idle()
    nothing_is_left(pd.servers)


def test_ranks_meet_on_loopback(servers: tuple[PdServers, ServerProcess]) -> None:
    """One of two ranks has the store and the queue; each has a transfer of its own. Without a router there is
    no agent."""
    pd = servers[0]
    for server in pd.servers:
        pids = server.pids
        assert beyond_loopback(pids) == []
        found = rows(pids, ports_of_server(server.server_info()))
        assert found.pop(GLOO) > 0
        ranks = len(server.processes("sglang::scheduler"))
        is_prefill = server in [each.server for each in pd.prefill]
        assert found == Counter(
            {HTTP: 1, STORE: 1, TRANSFER: 2 * ranks}
            | ({BOOTSTRAP: 1} if is_prefill else {})
            | ({QUEUE: 1} if ranks > 1 else {})
        )


def test_one_damaged_bit_is_another_answer(servers: tuple[PdServers, ServerProcess], faults: Path) -> None:
    """The twin of the test above: one bit of the received KV, at decode."""
    pd, truth = servers
    prompt = prompt_of(5, 203)
    with fault(faults, "damage"):
        damaged = pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(truth.generate(prompt, max_new_tokens=ANSWER_TOKENS), damaged, atol=1e-3)
    pd.wait_idle()
    for server in pd.servers:
        server.flush()


def test_answers_go_back_to_all_ranks(servers: tuple[PdServers, ServerProcess]) -> None:
    """The next turn's prefill finds prompt and answer, and continues decode's KV."""
    pd, truth = servers
    prefill = pd.prefill[0].server
    prompt, before = prompt_of(40, 100), count(pd.prefill[0].server, RETURNED)
    first = pd.generate(prompt, max_new_tokens=60)
    wait_until(lambda: count(prefill, RETURNED) > before, seconds=30, what="the return")
    history = prompt + first.tokens + prompt_of(41, 40)
    at_prefill, at_decode = pd.start(history, max_new_tokens=ANSWER_TOKENS)
    assert_same(truth.generate(history, max_new_tokens=ANSWER_TOKENS), at_decode.result(), atol=1e-3)
    assert at_prefill.result().cached_tokens in range(144, 161)
    pd.wait_idle()
    nothing_is_left(pd.servers)


def test_weights_updated_on_one_side_end_requests_until_the_other_has_them_too(
    servers: tuple[PdServers, ServerProcess], tmp_path: Path
) -> None:
    """Their digest does not depend on how many ranks share the model."""
    one_side_is_updated_first(*servers, tmp_path)
