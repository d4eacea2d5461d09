"""Servers on an emulated GPU (``tests.fake_gpu``): SGLang's CUDA branches, and ``CudaMover``, find
the computed answer in HBM, DRAM and, after a restart, on disk; with a damaged bit it is another one.

Nothing is said of speed, of races (streams and events do nothing in the emulator), of CUDA graphs, or of the
bytes that real kernels write: tests/gpu and ``sglang-ext gpu-check`` are for a GPU.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import aiohttp
import pytest
from emulated_gpu import (
    ANSWER,
    ANSWER_TOKENS,
    ATOL,
    HBM_TOKENS,
    PROMPT_TOKENS,
    SERVER,
    TWO_RANKS,
    ask,
    damage,
    damage_disk,
    fill,
    on_disk,
    prompt,
    spec,
)
from token_requests import advise, generate, held_in_hbm, settled

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until, wait_until
from tests import fake_gpu
from tests.support.compare import Answer, assert_same
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("page", "flags"),
    [
        pytest.param(1, (), id="page-1"),
        pytest.param(16, (), id="page-16", marks=pytest.mark.long),
        pytest.param(1, TWO_RANKS, id="two-ranks", marks=pytest.mark.long),
    ],
)
def test_each_tier_gives_the_computed_answer_and_damage_is_seen(
    page: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    with ServerProcess(spec(tmp_path, *flags, page=page)) as server:
        assert server.server_info()["device"] == "cuda"
        assert "NVIDIA H100" in server.log.read_text(encoding="utf-8"), "the start says what the link reaches"
        cold = ask(server, prompt())
        assert cold.cached_tokens == 0
        hbm = ask(server, prompt())
        assert hbm.hbm_tokens > PROMPT_TOKENS / 2
        fill(server)
        dram = ask(server, prompt())
        assert dram.dram_tokens > PROMPT_TOKENS / 2
        fill(server)
        with damage(server.pid):
            other = ask(server, prompt())
        assert other.dram_tokens > PROMPT_TOKENS / 2
        assert "without our kernel" not in server.log.read_text(encoding="utf-8")
    for found in (hbm, dram):
        assert_same(cold, found, atol=ATOL)
    with pytest.raises(AssertionError):
        assert_same(cold, other, atol=ATOL)


@pytest.mark.long
@pytest.mark.parametrize("flags", [pytest.param((), id="one-rank"), pytest.param(TWO_RANKS, id="two-ranks")])
def test_disk_gives_the_computed_answer_and_damage_is_seen(flags: tuple[str, ...], tmp_path: Path) -> None:
    """After a restart. The twin's damaged file has checksums that fit."""
    wanted = spec(tmp_path, *flags)
    with ServerProcess(wanted) as server:
        cold = ask(server, prompt())
        wait_until(lambda: on_disk(tmp_path), seconds=60, what="writes to disk")
    with ServerProcess(wanted) as server:
        whole = ask(server, prompt())

    damage_disk(tmp_path)
    with ServerProcess(wanted) as server:
        other = ask(server, prompt())
    assert min(whole.disk_tokens, other.disk_tokens) > PROMPT_TOKENS / 2
    assert_same(cold, whole, atol=ATOL)
    with pytest.raises(AssertionError):
        assert_same(cold, other, atol=ATOL)


def streamed_blocks(server: ServerProcess) -> float:
    """How many blocks have come from disk layer by layer."""
    name = "sglang_ext_cache_disk_blocks_total{"
    return sum(v for k, v in server.metrics().items() if k.startswith(name) and '"streamed"' in k)


@pytest.mark.long
def test_a_prompt_that_goes_on_in_chunks_hits_dram_and_by_layer_disk(tmp_path: Path) -> None:
    """The tokens behind its cached beginning are computed in two passes. They are others each time, so that
    the beginning alone is cached."""
    wanted = spec(tmp_path, "--chunked-prefill-size", "48", "--enable-metrics")

    def asked(server: ServerProcess, number: int) -> tuple[Answer, Answer]:
        ids = [*prompt(), *prompt(200 + number, 80)]
        found = ask(server, ids)
        return found, server.generate(ids, max_new_tokens=ANSWER_TOKENS, cache_salt=f"cold {number}")

    with ServerProcess(wanted) as server:
        ask(server, prompt())
        fill(server)
        dram = asked(server, 1)
        fill(server)
        with damage(server.pid):
            other_dram = asked(server, 2)
        wait_until(lambda: on_disk(tmp_path), seconds=60, what="writes to disk")
    with ServerProcess(wanted) as server:
        disk = asked(server, 3)
        wait_until(lambda: streamed_blocks(server) > 0, seconds=30, what="blocks by layer")
    damage_disk(tmp_path)
    with ServerProcess(wanted) as server:
        other_disk = asked(server, 4)
    whole = PROMPT_TOKENS // 16 * 16
    assert [found.dram_tokens for found, _ in (dram, other_dram)] == [whole] * 2
    assert [found.disk_tokens for found, _ in (disk, other_disk)] == [whole] * 2
    for found, cold in (dram, disk):
        assert_same(cold, found, atol=ATOL)
    for found, cold in (other_dram, other_disk):
        with pytest.raises(AssertionError):
            assert_same(cold, found, atol=ATOL)


@pytest.mark.long
async def test_a_hint_brings_kv_to_hbm_and_damage_is_seen(
    tmp_path: Path, patient_client: aiohttp.ClientSession
) -> None:
    """From DRAM, ahead of its request. The twin's damage is in DRAM when the hint comes."""
    port = free_port()
    wanted = spec(tmp_path, "--kv-router", f"http://127.0.0.1:{port}")
    async with Router(RouterConfig(port=port)) as router:
        server = ServerProcess(wanted)
        try:
            await asyncio.to_thread(server.start)
            await until(lambda: router.trees.trusted(server.url) and router.fleet.usable(), 60, "the server")
            cold = await asyncio.to_thread(ask, server, prompt())
            answers = []
            for place in (nullcontext(), damage(server.pid)):
                await asyncio.to_thread(fill, server)
                await until(lambda: not held_in_hbm(router, server, prompt()), 60, "HBM to give it up")
                with place:
                    told = await advise(patient_client, router, session="s", input_ids=prompt())
                    assert (told["instance"], told["tokens"]["hbm"]) == (server.url, 0)
                    ready = await settled(patient_client, router, told["id"])
                    assert (ready["state"], ready["moved_tokens"]) == ("ready", PROMPT_TOKENS // 16 * 16)
                # By the router, which ends the hint: its KV is held back no longer.
                answer, _ = await generate(patient_client, router.url, prompt(), session="s", **ANSWER)
                answers.append(answer)
        finally:
            await asyncio.to_thread(server.stop)
    for found in answers:
        assert (found.hbm_tokens, found.dram_tokens) == (PROMPT_TOKENS // 16 * 16, 0)
    assert_same(cold, answers[0], atol=ATOL)
    with pytest.raises(AssertionError):
        assert_same(cold, answers[1], atol=ATOL)


@pytest.mark.long
def test_new_weights_share_nothing_with_old_ones(tmp_path: Path) -> None:
    with ServerProcess(spec(tmp_path)) as server:
        ask(server, prompt())
        path = server.server_info()["model_path"]
        assert server.post("/update_weights_from_disk", {"model_path": path})["success"]
        assert ask(server, prompt()).cached_tokens == 0
        assert ask(server, prompt()).hbm_tokens > PROMPT_TOKENS / 2


@pytest.mark.long
def test_hicache_gives_the_same_answer_from_its_host_pool(tmp_path: Path) -> None:
    """Stock SGLang beside it, with HiCache's copies that are not compiled when it runs; those of its default
    backend are (``--hicache-io-backend kernel``)."""
    stock = ServerSpec(
        flags=(
            *("--max-total-tokens", str(HBM_TOKENS), "--page-size", "16", "--skip-server-warmup"),
            *("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-io-backend", "direct"),
            *("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through"),
        ),
        environment=fake_gpu.ENVIRONMENT,
        run=(str(SERVER),),
    )
    with ServerProcess(stock) as server:
        cold = ask(server, prompt())
        # HiCache writes a prefix down when it is used again.
        ask(server, prompt())
        fill(server)
        theirs = ask(server, prompt())
        assert theirs.cached_tokens > PROMPT_TOKENS / 2
    with ServerProcess(spec(tmp_path, page=16)) as server:
        assert_same(cold, ask(server, prompt()), atol=1e-4)
        fill(server)
        ours = ask(server, prompt())
        assert ours.dram_tokens > PROMPT_TOKENS / 2
    assert_same(theirs, ours, atol=1e-4)


def test_other_processes_do_not_take_the_cpu_for_one_with_amx() -> None:
    """SGLang recognises Intel AMX by an operator; the emulator defines operators in its own process."""
    asked = (
        "import torch\n"
        "from tests import fake_gpu\n"
        "fake_gpu.install()\n"
        "assert hasattr(torch.ops.sgl_kernel, 'rmsnorm')\n"
        "print(hasattr(torch.ops.sgl_kernel, 'convert_weight_packed'))\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"
