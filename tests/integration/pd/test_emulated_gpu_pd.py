"""Prefill and decode with pools in the memory of an emulated GPU (``tests.fake_gpu``) hand KV over by
`cuda_ipc`, and through pinned memory by `shm` and `tcp`: the answers are those of one server on such a GPU,
and with a damaged bit they are others.

Nothing is said of speed, of races, of pinning, or of what CUDA does with the handles:
``tests/gpu/test_cuda_ipc.py`` is for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hooked_server import FOLDER
from pd_fleet import ANSWER_TOKENS, RETURNED, count, fault, nothing_is_left, prompt_of

from sglang_ext.testing.waiting import wait_until
from tests import fake_gpu
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

SERVERS = Path(__file__).parents[1] / "servers"
BLOCK = 16
PROMPT_TOKENS = 5 * BLOCK - 5
"""With the answer, another block is full, which goes back to prefill."""
FLAGS = (
    *("--max-total-tokens", "2048", "--chunked-prefill-size", "128", "--max-running-requests", "4"),
    *("--skip-server-warmup", "--enable-metrics"),
)
ATOL = 1e-3


@dataclass
class Rig:
    """A pair, and one server whose answers are the truth.

    pulls: whether decode reads the KV, or prefill writes it. transport: by which. faults: where decode looks
    for its faults.
    """

    pd: PdServers
    truth: ServerProcess
    pulls: bool
    transport: str
    faults: Path

    def expected(self, prompt: list[int]) -> Answer:
        return self.truth.generate(prompt, max_new_tokens=ANSWER_TOKENS)

    def ask(self, prompt: list[int]) -> Answer:
        return self.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)

    def check(self, prompt: list[int], expected: Answer, *, known: bool, **fields: str) -> None:
        """The pair's answer is the expected one, with a hit in prefill or without; then KV comes back."""
        prefill = self.pd.prefill[0].server
        before = count(prefill, RETURNED)
        first, second = self.pd.start(prompt, max_new_tokens=ANSWER_TOKENS, **fields)
        assert_same(expected, second.result(), atol=ATOL)
        assert (first.result().cached_tokens > PROMPT_TOKENS / 2) is known
        if not known:
            wait_until(lambda: count(prefill, RETURNED) > before, seconds=60, what="the return")

    def check_damage(self, prompt: list[int]) -> None:
        """With a damaged bit in what decode got, the answer is another one."""
        with fault(self.faults, "damage"):
            damaged = self.ask(prompt)
        with pytest.raises(AssertionError):
            assert_same(self.expected(prompt), damaged, atol=ATOL)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("pull", 1, 1, "cuda_ipc"), id="pull-page1"),
        pytest.param(("pull", 16, 1, "cuda_ipc"), id="pull-page16"),
        pytest.param(("push", 16, 1, "cuda_ipc"), id="push-page16"),
        pytest.param(("push-by-layer", 16, 1, "cuda_ipc"), id="push-by-layer"),
        pytest.param(("pull", 1, 2, "cuda_ipc"), id="pull-two-ranks"),
        pytest.param(("push", 16, 2, "cuda_ipc"), id="push-two-ranks"),
        pytest.param(("pull", 1, 1, "shm"), id="pull-pinned-shm"),
        pytest.param(("push", 16, 1, "shm"), id="push-pinned-shm"),
        pytest.param(("pull", 16, 1, "tcp"), id="pull-pinned-tcp"),
        pytest.param(("push", 1, 1, "tcp"), id="push-pinned-tcp"),
    ],
)
def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard
) -> Iterator[Rig]:
    mode, page, ranks, transport = request.param
    faults = tmp_path_factory.mktemp("decode")
    # Not forked from a process that has imported SGLang for a CPU.
    alone = ServerSpec(
        flags=(*FLAGS, "--disable-radix-cache"),
        environment=fake_gpu.ENVIRONMENT,
        run=(str(SERVERS / "gpu_server.py"),),
    )
    half = replace(
        alone,
        run=(str(SERVERS / "gpu_pd_server.py"),),
        flags=(
            *(*FLAGS, "--kv-pd-caching", "3", "--page-size", str(page), "--kv-check"),
            *("--kv-transfer-mode", mode, "--kv-transports", transport, "--kv-dram-size", "32MiB"),
            *("--tp", str(ranks)),
        ),
    )
    decode = replace(half, environment={**fake_gpu.ENVIRONMENT, FOLDER: str(faults)})
    with leak_guard.adopting(), pd_servers([half], [decode], [alone]) as (pd, (truth,)):
        yield Rig(pd, truth, mode == "pull", transport, faults)


def test_conversations_get_the_answers_of_one_server(rig: Rig) -> None:
    """With returns: the second turn finds in prefill what decode computed."""
    decode, prefill = rig.pd.decode[0], rig.pd.prefill[0].server
    assert decode.server_info()["device"] == prefill.server_info()["device"] == "cuda"
    history = prompt_of(5, PROMPT_TOKENS)
    for turn in range(2):
        returned = count(prefill, RETURNED)
        answer = rig.ask(history)
        assert_same(rig.expected(history), answer, atol=ATOL)
        wait_until(lambda: count(prefill, RETURNED) > returned, seconds=60, what="the return")  # noqa: B023
        history = [*history, *answer.tokens, *prompt_of(50 + turn, 2 * BLOCK - ANSWER_TOKENS)]
    assert nothing_is_left(rig.pd.servers, seconds=30)


def test_one_damaged_bit_is_seen(rig: Rig) -> None:
    rig.check_damage(prompt_of(6, PROMPT_TOKENS))


def test_kv_goes_from_gpu_to_gpu_both_ways(rig: Rig) -> None:
    """The side that reads counts: prefill reads returned KV, and decode, where it pulls, the prompt's."""
    rig.ask(prompt_of(7, PROMPT_TOKENS))
    readers = rig.pd.servers if rig.pulls else rig.pd.servers[:1]
    name = f'sglang_ext_pd_read_bytes_total{{tp_rank="0",transport="{rig.transport}"}}'
    for server in readers:
        wait_until(lambda: count(server, name) > 0, seconds=60, what=name)  # noqa: B023
    for server in rig.pd.servers:
        assert "without a kernel" not in server.log.read_text(encoding="utf-8")


def test_tenants_share_no_kv(rig: Rig) -> None:
    """One tenant's prompt again is a hit, another tenant's is computed; all answers are alike."""
    prompt = prompt_of(8, PROMPT_TOKENS)
    expected = rig.expected(prompt)
    for tenant, known in (("one", False), ("one", True), ("other", False)):
        rig.check(prompt, expected, known=known, cache_salt=tenant)


def test_after_new_weights_kv_is_handed_over_and_back(rig: Rig) -> None:
    """Both have the new weights, and nothing of the KV of the old ones is used."""
    prompt = prompt_of(9, PROMPT_TOKENS)
    expected = rig.expected(prompt)
    rig.ask(prompt)
    path = rig.truth.server_info()["model_path"]
    rig.pd.wait_idle()
    for server in rig.pd.servers:
        assert server.post("/update_weights_from_disk", {"model_path": path})["success"]
    for known in (False, True):
        rig.check(prompt, expected, known=known)
    rig.check_damage(prompt_of(10, PROMPT_TOKENS))
