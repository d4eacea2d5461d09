"""Speculative decoding of a model with windows, prefill and decode apart: the draft's KV is in the pages.

The draft is an EAGLE head without windows, which guesses well up to the length of a window. After a hand-over
it must guess as well as in one server, also where prompts are longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from draft_models import windowed_eagle_head, windowed_target
from pd_fleet import FaultySpec, fault, nothing_is_left, prompt_of

from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.long, pytest.mark.integration, pytest.mark.timeout(600)]

WINDOW = 256
NEW_TOKENS = 24
LENGTHS = (203, 417)
"""The last is longer than a window. In a prompt of 90 tokens the draft guesses as well without its KV."""
LIMITS = (
    *("--max-total-tokens", "2048", "--max-running-requests", "4", "--chunked-prefill-size", "128"),
    *("--page-size", "16", "--swa-full-tokens-ratio", "0.5"),
)


@dataclass
class Servers:
    """A pair, and a server without a cache."""

    pd: PdServers
    alone: ServerProcess
    faults: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("models")
    target = windowed_target(folder / "target", WINDOW)
    head = windowed_eagle_head(target, folder / "head")
    flags = (
        *("--model-path", str(target), "--speculative-algorithm", "EAGLE"),
        *("--speculative-draft-model-path", str(head), "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", *LIMITS),
    )
    spec = FaultySpec(
        model="tiny-spark", flags=(*flags, "--kv-pd-caching", "1", "--kv-check", "--enable-metrics")
    )
    prefill, decode = spec.looking_at(folder / "prefill"), spec.looking_at(folder / "decode")
    prefill = replace(prefill, flags=(*prefill.flags, "--kv-dram-size", "64MB"))
    alone = ServerSpec(model="tiny-spark", flags=(*flags, "--disable-radix-cache"))
    with pd_servers([prefill], [decode], [alone]) as (pd, (server,)):
        yield Servers(pd, server, folder / "decode")


def body_of(length: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": prompt_of(length, length), "sampling_params": sampling}


def ask(pd: PdServers, length: int) -> dict[str, Any]:
    """The answer of decode."""
    body = body_of(length) | pd.pair()
    sent = [pd.pool.submit(each.post, "/generate", body) for each in (pd.prefill[0].server, pd.decode[0])]
    prefilled, decoded = (each.result() for each in sent)
    assert prefilled["meta_info"]["prompt_tokens"] == length
    return dict(decoded)


def passes(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["spec_verify_ct"])


@pytest.mark.parametrize("length", LENGTHS)
def test_the_draft_guesses_as_well_after_a_hand_over(servers: Servers, length: int) -> None:
    """Twice: prefill finds the prompt in its cache, the draft's KV with it. The twin: without the draft's KV
    it guesses worse, and the answer is the same."""
    expected = servers.alone.post("/generate", body_of(length))
    for cached in (0, length - 32):
        answer = ask(servers.pd, length)
        assert answer["output_ids"] == expected["output_ids"]
        assert passes(answer) <= passes(expected) + 1
        assert answer["meta_info"]["cached_tokens"] >= cached
    if length < WINDOW - NEW_TOKENS:
        assert passes(expected) <= NEW_TOKENS / 2
        with fault(servers.faults, "zero-draft"):
            damaged = ask(servers.pd, length)
        assert damaged["output_ids"] == expected["output_ids"]
        assert passes(damaged) > passes(expected) + 2
    assert nothing_is_left(servers.pd.servers)
