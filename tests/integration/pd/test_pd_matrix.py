"""Every way to serve with prefill and decode apart gives the answers of one server without a cache.

Design, transfer mode, transport, page size and parallelism, each with each. All of it runs
with ``--long``, which takes hours. In portions: ``-k pairwise`` is a sample in which every two of these
values meet, ``-k 'caching3-push-cma-page16-tp11'`` is one way, and SGLANG_EXT_TEST_CONVERSATIONS sets the
number of conversations for each, instead of 50. Short forms are in test_pd.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations, product
from pathlib import Path

import pytest
from pd_fleet import (
    ANSWER_TOKENS,
    COMMON,
    FaultySpec,
    Rig,
    conversations_are_answered_alike,
    fault,
    nothing_is_left,
    prompt_of,
)

from tests.support.compare import assert_same
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
CONVERSATIONS = int(os.environ.get("SGLANG_EXT_TEST_CONVERSATIONS", "50"))
TWO_RANKS_ATOL = 1e-3
"""Sums over two ranks round otherwise than sums over one."""


@dataclass(frozen=True)
class Way:
    """prefill, decode: ranks of each."""

    caching: str
    mode: str
    transport: str
    page: int
    prefill: int
    decode: int

    @property
    def pairs(self) -> frozenset[object]:
        """Every two of its values, the ranks of both sides as one."""
        values = (*astuple(self)[:4], (self.prefill, self.decode))
        return frozenset(combinations(enumerate(values), 2))

    def __str__(self) -> str:
        ranks = f"tp{self.prefill}{self.decode}"
        return f"caching{self.caching}-{self.mode}-{self.transport}-page{self.page}-{ranks}"


WAYS = [
    Way(caching, mode, transport, page, prefill, decode)
    for caching, mode, transport, page, (prefill, decode) in product(
        ("basic", "1", "2", "3"),
        ("pull", "push", "push-by-layer"),
        ("cma", "tcp"),
        (1, 16),
        ((1, 1), (2, 1), (1, 2)),
    )
]


def pairwise(ways: Sequence[Way]) -> list[Way]:
    """A few of the ways in which every two values meet that meet in any."""
    missing = set().union(*(way.pairs for way in ways))
    found: list[Way] = []
    while missing:
        found.append(max(ways, key=lambda way: len(way.pairs & missing)))
        missing -= found[-1].pairs
    return found


SAMPLE = pairwise(WAYS)


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: f"{way}-pairwise" if way in SAMPLE else f"{way}")
def rig(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    truth: ServerProcess,
) -> Iterator[Rig]:
    way: Way = request.param
    folder = tmp_path_factory.mktemp("faults")
    base = FaultySpec(
        flags=(
            *(*COMMON, "--kv-pd-caching", way.caching, "--kv-transfer-mode", way.mode),
            *("--page-size", str(way.page), "--kv-transports", way.transport),
        )
    )
    specs = [server(base, folder / "prefill", way.prefill), server(base, folder / "decode", way.decode)]
    with pd_servers(specs[:1], specs[1:]) as (servers, _):
        yield Rig(servers, truth, [folder / "prefill"], [folder / "decode"])


def server(base: FaultySpec, folder: Path, ranks: int) -> ServerSpec:
    spec = base.looking_at(folder)
    if ranks == 1:
        return spec
    return replace(
        spec, flags=(*spec.flags, "--tp", str(ranks)), environment={**spec.environment, **TWO_RANKS}
    )


def atol_of(rig: Rig) -> float:
    two = any("--tp" in each.spec.flags for each in rig.pd.servers)
    return TWO_RANKS_ATOL if two else 1e-4


def test_conversations(rig: Rig) -> None:
    conversations_are_answered_alike(rig.pd, rig.truth, count=CONVERSATIONS, atol=atol_of(rig))
    nothing_is_left(rig.pd.servers)


def test_one_damaged_bit_is_seen(rig: Rig) -> None:
    """The twin of the test above."""
    prompt = prompt_of(5, 203)
    with fault(rig.decode_faults[0], "damage"):
        damaged = rig.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(rig.expected(prompt), damaged, atol=atol_of(rig))
