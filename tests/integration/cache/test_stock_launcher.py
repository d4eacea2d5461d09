"""SGLang's own launcher with the plugin installed: the backend needs neither our launcher nor our runtime.

On a host without a GPU stock SGLang cannot be imported; a ``sitecustomize`` that is independent of the plugin
makes it importable, from outside. Everything else is as on a GPU host.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest

from tests.support.compare import assert_same
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

IMPORTABLE = """
from sglang_ext.patches.cpu import kernels, torchvision
torchvision.apply()
kernels.apply()
"""
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    "--sleep-on-idle",
    *("--max-total-tokens", "1600", "--chunked-prefill-size", "256"),
    *("--radix-cache-backend", "global", "--kv-dram-size", "64MB", "--kv-check"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("importable")
    (folder / "sitecustomize.py").write_text(IMPORTABLE)
    environment = {
        "PYTHONPATH": str(folder),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXT_CPU_RUNTIME": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    spec = ServerSpec(flags=FLAGS, environment=environment, run=("-m", "sglang.launch_server"))
    with ServerProcess(spec) as server:
        yield server


def test_flags_hooks_and_tiers_work_without_our_launcher(server: ServerProcess) -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(100, 32_000) for _ in range(600)]
    cold = server.generate(prompt, max_new_tokens=8)
    from_hbm = server.generate(prompt, max_new_tokens=8)
    for _ in range(3):  # more than HBM holds
        server.generate([rng.randrange(100, 32_000) for _ in range(900)], max_new_tokens=1)
    from_dram = server.generate(prompt, max_new_tokens=8)
    assert cold.hbm_tokens == cold.dram_tokens == 0
    assert from_hbm.hbm_tokens >= 576
    assert from_dram.dram_tokens >= 512, "--kv-dram-size did not reach the scheduler"
    assert_same(cold, from_hbm)
    assert_same(cold, from_dram)


def test_ids_outside_the_vocabulary_are_refused_here_too(server: ServerProcess) -> None:
    body = {"input_ids": [1, -7], "sampling_params": {"max_new_tokens": 1}}
    refused = httpx.post(f"{server.url}/generate", json=body, timeout=60, trust_env=False)
    assert refused.status_code == 400
    assert "input_ids[1] is -7, outside the vocabulary" in refused.text
    assert server.generate([5, 6, 7], max_new_tokens=1).tokens
