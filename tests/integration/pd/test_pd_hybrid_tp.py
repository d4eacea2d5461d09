"""Prefill and decode that cut a model with windows or states differently: two ranks to one and one to two.

The answers are those of one server of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pd_fleet import FaultySpec, fault, nothing_is_left
from test_pd_hybrids import ANSWER_TOKENS, LIMITS, STATES, WINDOWS, Kind, conversations

from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
MODELS = {
    "windows": WINDOWS,
    "states": STATES,
    "mamba2": replace(STATES, model="tiny-mamba2"),
    "kda": replace(STATES, model="tiny-kda"),
}
SIZES = ((2, 1), (1, 2))
SERVERS = [
    pytest.param((name, sizes), id=f"{name}-{sizes[0]}-{sizes[1]}") for name in MODELS for sizes in SIZES
]


@dataclass
class Unequal:
    """A pair of which each side has another number of ranks, and turns with a lone server's answers."""

    pd: PdServers
    kind: Kind
    faults: Path
    turns: tuple[tuple[list[int], Answer], ...]
    second: tuple[tuple[list[int], Answer], ...]


@pytest.fixture(scope="module", params=SERVERS)
def rig(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    preloaded_servers: None,
    leak_guard: LeakGuard,
) -> Iterator[Unequal]:
    name, sizes = request.param
    kind, folder = MODELS[name], tmp_path_factory.mktemp("faults")
    flags = (*LIMITS, *kind.flags)
    with ServerProcess(ServerSpec(model=kind.model, flags=(*flags, "--disable-radix-cache"))) as truth:
        turns, second, _ = conversations(truth)
    spec = FaultySpec(
        model=kind.model, flags=(*flags, "--kv-pd-caching", "1", "--kv-check", "--enable-metrics")
    )

    def side(name: str, ranks: int) -> ServerSpec:
        own = spec.looking_at(folder / name)
        if ranks == 1:
            return own
        return replace(own, flags=(*own.flags, "--tp", "2"), environment={**own.environment, **TWO_RANKS})

    prefill, decode = (side(*each) for each in zip(("prefill", "decode"), sizes, strict=True))
    with leak_guard.adopting(), pd_servers([prefill], [decode]) as (servers, _):
        yield Unequal(servers, kind, folder / "decode", turns, second)


def test_conversations_get_the_answers_of_one_rank(rig: Unequal) -> None:
    for prompt, expected in (*rig.turns, *rig.second):
        # Sums over two ranks round otherwise than sums over one.
        assert_same(expected, rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS), atol=1e-3)
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)


def test_one_block_of_zeros_is_seen(rig: Unequal) -> None:
    """The twin: in each rank of decode, a block of the window or the state is zeros."""
    for prompt, expected in rig.turns[-2:]:
        with fault(rig.faults, f"zero-{rig.kind.pool}"):
            damaged = rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
        with pytest.raises(AssertionError):
            assert_same(expected, damaged, atol=1e-3)
