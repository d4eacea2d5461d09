"""Decode's own cache of a model that has windows or states, and its returns to prefill.

Decode keeps received and generated KV in HBM (``--kv-pd-caching 2`` and 3), in SGLang's tree, so that
hand-overs bring only the rest. The window of a request, or its state, comes with each hand-over. With 3,
prefill gets what decode has computed, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pd_fleet import RETURNED, FaultySpec, count, fault, nothing_is_left, prompt_of, settled
from test_pd_hybrids import ANSWER_TOKENS, LIMITS, STATES, WINDOWS, Kind, conversations

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

Turns = tuple[tuple[list[int], Answer], ...]
READ = "sglang_ext_pd_read_bytes"
KINDS = [
    pytest.param((WINDOWS, "3"), id="windows-3"),
    pytest.param((WINDOWS, "2"), id="windows-2", marks=pytest.mark.long),
    pytest.param((STATES, "3"), id="states-3", marks=pytest.mark.long),
    pytest.param((STATES, "2"), id="states-2", marks=pytest.mark.long),
]
MIDDLE = 4
"""A conversation whose first answer ends in another page than its prompt."""


@dataclass
class Keeping:
    """A pair of which decode keeps KV.

    Args:
        caching: ``--kv-pd-caching``.
        faults: where prefill and decode look for faults.
        turns, second: two turns of conversations, with the answers of a server of SGLang alone.
    """

    pd: PdServers
    kind: Kind
    caching: str
    faults: tuple[Path, Path]
    turns: Turns
    second: Turns

    @property
    def page(self) -> int:
        return int(self.kind.flags[self.kind.flags.index("--page-size") + 1])

    def answered(self, turns: Turns) -> None:
        """Ask the pair, whose answers are those of the lone server."""
        for prompt, expected in turns:
            assert_same(expected, self.generate(prompt))

    def generate(self, prompt: list[int]) -> Answer:
        return self.pd.generate(prompt, max_new_tokens=ANSWER_TOKENS)

    def bytes_for(self, prompt: list[int], expected: Answer | None = None) -> float:
        """How much decode reads for a prompt."""
        decode = self.pd.decode[0]
        self.pd.wait_idle()
        before = settled(decode, READ)
        answer = self.generate(prompt)
        if expected is not None:
            assert_same(expected, answer)
        wait_until(lambda: count(decode, READ) > before, seconds=30, what="bytes that were read")
        return settled(decode, READ) - before

    def first_turn(self) -> None:
        """Hold a conversation's first turn with empty caches, and wait for its return."""
        for server in self.pd.servers:
            server.flush()
        prefill = self.pd.prefill[0].server
        before = count(prefill, RETURNED)
        self.answered(self.turns[MIDDLE : MIDDLE + 1])
        if self.caching == "3":
            wait_until(lambda: count(prefill, RETURNED) > before, seconds=30, what="a return")


@pytest.fixture(scope="module", params=KINDS)
def rig(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    preloaded_servers: None,
    leak_guard: LeakGuard,
) -> Iterator[Keeping]:
    kind, caching = request.param
    folder, flags = tmp_path_factory.mktemp("faults"), (*LIMITS, *kind.flags)
    with ServerProcess(ServerSpec(model=kind.model, flags=(*flags, "--disable-radix-cache"))) as truth:
        turns, second, _ = conversations(truth)
    common = ("--kv-pd-caching", caching, "--kv-dram-size", "64MB", "--kv-check", "--enable-metrics")
    spec = FaultySpec(model=kind.model, flags=(*flags, *common))
    folders = folder / "prefill", folder / "decode"
    prefill, decode = (spec.looking_at(each) for each in folders)
    with leak_guard.adopting(), pd_servers([prefill], [decode]) as (servers, _):
        yield Keeping(servers, kind, caching, folders, turns, second)


def test_decode_is_sent_what_it_lacks(rig: Keeping) -> None:
    """Of a second turn, decode has the first one up to the window, or up to a state."""
    rig.answered(rig.turns)
    rig.answered(rig.second[:-1])
    prompt, expected = rig.second[-1]
    whole = rig.bytes_for(prompt_of(50, len(prompt)))
    lacking = rig.bytes_for(prompt, expected)
    assert lacking < 0.7 * whole, (lacking, whole)
    rig.answered(rig.second)
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)


def test_the_next_turn_finds_what_its_design_keeps(rig: Keeping) -> None:
    """At prefill: the first turn's prompt, and with returns its answer up to the last token."""
    rig.first_turn()
    (prompt, _), (second, expected) = rig.turns[MIDDLE], rig.second[MIDDLE]
    # Decode's answer counts what decode had where that is more.
    at_prefill, answer = rig.pd.start(second, max_new_tokens=ANSWER_TOKENS)
    assert_same(expected, answer.result())
    kept, found = (len(prompt) + ANSWER_TOKENS - 1) // rig.page * rig.page, at_prefill.result().cached_tokens
    if rig.caching == "3":
        assert found == kept
    else:
        assert len(prompt) - rig.kind.resumed <= found < kept
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)


def test_memory_that_requests_need_is_given_back(rig: Keeping) -> None:
    """More is kept than the pools have: the least recently used KV goes."""
    rig.answered(rig.turns)
    for seed in range(6):
        rig.generate(prompt_of(2000 + seed, 500))
    rig.answered(rig.second)
    rig.pd.wait_idle()
    assert nothing_is_left(rig.pd.servers)


def test_damaged_kv_that_decode_keeps_is_seen(rig: Keeping) -> None:
    """The twin: the KV of a first turn is filled with zeros at decode alone, and the next turn, for which
    prefill's is right, differs. If it did not, decode would not have used its own."""
    decode = rig.pd.decode[0]
    decode.flush()
    (first, expected_first), (second, expected) = rig.turns[-1], rig.second[-1]
    with fault(rig.faults[1], "zero-hbm"), pytest.raises(AssertionError):
        assert_same(expected_first, rig.generate(first))
    rig.pd.wait_idle()
    with pytest.raises(AssertionError):
        assert_same(expected, rig.generate(second))
    rig.pd.wait_idle()
    decode.flush()
    assert_same(expected, rig.generate(second))


def test_damaged_returns_are_seen(rig: Keeping) -> None:
    """The twin: the returned blocks are filled with zeros at prefill, whose next turn begins behind it."""
    if rig.caching != "3":
        return
    with fault(rig.faults[0], "zero-returned"):
        rig.first_turn()
        # Decode has the right KV of the first turn.
        rig.pd.decode[0].flush()
    second, expected = rig.second[MIDDLE]
    with pytest.raises(AssertionError):
        assert_same(expected, rig.generate(second))
    for server in rig.pd.servers:
        server.flush()
    assert_same(expected, rig.generate(second))
