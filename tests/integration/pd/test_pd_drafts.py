"""Speculative decoding with prefill and decode apart: the draft model's KV moves with the model's.

The draft is an EAGLE head that guesses well. After a hand-over it must guess as well as in one server, and
the KV that decode returns has the draft's, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from draft_models import eagle_head
from pd_fleet import prompt_of

from sglang_ext.patches.versions import decode_caches_drafts, installed_sglang_version
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BLOCK = 16
NEW_TOKENS = 24
COMMON = ("--max-total-tokens", "4000", "--chunked-prefill-size", "256", "--max-running-requests", "8")
RETURNS = decode_caches_drafts(installed_sglang_version())
"""Older releases of SGLang let decode keep no cache beside a draft model."""
CACHED = (
    *("--kv-pd-caching", "3" if RETURNS else "1"),
    *("--kv-dram-size", "32MB", "--kv-check", "--enable-metrics"),
)


@dataclass
class Servers:
    """A pair with a draft model, a decode server without one, and a drafting server without a cache."""

    pd: PdServers
    alone: ServerProcess


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    head: Path = eagle_head(tmp_path_factory.mktemp("eagle") / "head")
    draft = (
        *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(head)),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4"),
    )
    drafted = ServerSpec(flags=(*COMMON, *CACHED, *draft), environment=STRICT)
    plain = ServerSpec(flags=(*COMMON, *CACHED), environment=STRICT)
    alone = ServerSpec(flags=(*COMMON, *draft, "--disable-radix-cache"))
    with pd_servers([drafted], [drafted, plain], [alone]) as (pd, (server,)):
        yield Servers(pd, server)


def body_of(prompt: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


def ask(pd: PdServers, prompt: list[int], decode: int = 0) -> list[Future[dict[str, Any]]]:
    """The answers of prefill and of decode."""
    body = body_of(prompt) | pd.pair()
    return [
        pd.pool.submit(each.post, "/generate", body) for each in (pd.prefill[0].server, pd.decode[decode])
    ]


@pytest.mark.parametrize("seed", range(2))
def test_the_draft_guesses_as_well_after_a_hand_over(servers: Servers, seed: int) -> None:
    prompt, cached = prompt_of(seed, 20 * BLOCK + 3), 0
    for _ in range(2):
        expected = servers.alone.post("/generate", body_of(prompt))
        first, second = (answer.result() for answer in ask(servers.pd, prompt))
        assert second["output_ids"] == expected["output_ids"]
        assert second["meta_info"]["spec_verify_ct"] <= expected["meta_info"]["spec_verify_ct"] + 1
        assert second["meta_info"]["spec_verify_ct"] <= NEW_TOKENS / 2
        # The second turn begins with KV that decode has returned, or else that prefill has computed.
        assert first["meta_info"]["cached_tokens"] >= cached
        cached = (len(prompt) + (NEW_TOKENS - 1 if RETURNS else 0)) // BLOCK * BLOCK
        servers.pd.wait_idle()
        prompt = [*prompt, *expected["output_ids"], *prompt_of(seed + 10, 20)]


def test_a_pair_with_unequal_drafts_is_refused_by_name(servers: Servers) -> None:
    first, second = ask(servers.pd, prompt_of(7, 40), decode=1)
    with pytest.raises(AssertionError, match="speculative_algorithm"):
        second.result()
    assert first.exception() is not None
