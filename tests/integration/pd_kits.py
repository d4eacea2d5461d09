"""SGLang's own test kits against servers that run.

``python pd_kits.py KIT ROUTER PREFILL DECODE ALONE MODEL FILE SIZE``

The kits start servers for themselves; here they are given ours. ALONE is a colocated server, the reference of
the parity kit. FILE is a data set in ShareGPT's form. SIZE scales the number of requests.
"""

from __future__ import annotations

import subprocess
import sys
import unittest
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def parity(router: str, prefill: str, decode: str, alone: str, size: int) -> None:
    """`pd_parity_kit`: log probabilities are those of one server, also where prefill has a prefix."""
    from sglang.test.kits.pd_parity_kit import PDLogprobParityMixin

    class Ours(PDLogprobParityMixin, unittest.TestCase):  # type: ignore[misc]
        lb_url, prefill_url, decode_url = router, prefill, decode
        lb_process_stands_for_all = subprocess.Popen(["sleep", "600"])
        process_lb = process_prefill = process_decode = lb_process_stands_for_all
        parity_prompts = [
            [5 + (number * 7 + i * 13) % 2000 for i in range(length)]
            for number, length in enumerate((40, 300, 700)[: 1 + size])
        ]
        parity_logprob_delta = 1e-3
        parity_cached_prefix_min_prompt_tokens = 64

        def _collect_references(self) -> list[Any]:
            found = []
            for prompt in self.parity_prompts:
                self._flush_cache(alone)
                found.append(self._generate(base_url=alone, input_ids=prompt))
            return found

        def launch_all(self) -> None:
            """They run."""

    try:
        result = unittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(Ours))
    finally:
        Ours.lb_process_stands_for_all.kill()
        Ours.lb_process_stands_for_all.wait()
    if result.testsRun != 1 or not result.wasSuccessful():
        raise SystemExit(1)


def multiturn(router: str, model: str, dataset: str, size: int) -> None:
    """`cache_hit_kit`: in each round, prompt and answer of the one before are found."""
    from sglang.test.kits import cache_hit_kit

    # A router does not report SGLang's page size; our blocks have 16 tokens, and the last answer comes back a
    # moment after the client has it.
    cache_hit_kit._get_page_size = lambda _: 16
    found = cache_hit_kit.run_multiturn_cache_hit_test(
        router,
        model,
        num_clients=2 * size,
        num_rounds=3,
        request_length=100,
        output_length=20,
        miss_tolerance=21,
        dataset_path=dataset,
    )
    assert found["rounds"]["round_2"]["cache_hit_rate"] > 0.4, found


def radix(router: str, size: int) -> None:
    """`radix_cache_server_kit`: many prompts that branch off each other, in one request."""
    from sglang.test.kits import radix_cache_server_kit as kit

    kit.gen_radix_tree = partial(kit.gen_radix_tree, num_nodes=10 * size, chunk_len=24)
    kit.run_radix_attention_test(router)


def stand_in_for_datasets() -> None:
    """The kits import all data sets of SGLang, one of which needs a package that no kit here uses."""
    if find_spec("datasets") is None:
        module = ModuleType("datasets")
        module.load_dataset = None  # type: ignore[attr-defined]
        sys.modules["datasets"] = module


if __name__ == "__main__":
    stand_in_for_datasets()
    name, router, prefill, decode, alone, model, dataset = sys.argv[1:8]
    size = int(sys.argv[8])
    if name == "parity":
        parity(router, prefill, decode, alone, size)
    elif name == "multiturn":
        multiturn(router, model, dataset, size)
    elif name == "radix":
        radix(router, size)
    else:
        raise SystemExit(f"no kit {name!r}")
    print(f"{name} passed")
