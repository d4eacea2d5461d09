"""Hints of a tenant are bounded in bytes, and finding them costs nothing where there are many."""

from __future__ import annotations

import math
from array import array

from sglang_ext.engine.tiers.retention import Retention, path_of
from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.router.hints.advisory_book import ENDED_KEPT_S, HintBook, HintLimits, Verdict
from sglang_ext.router.hints.hint import Hint
from sglang_ext.router.hints.remote_hints import RemoteHints
from sglang_ext.tiers import Tier

NAMESPACE = ("tokens", None, None, None)
MIB = 1 << 20


def hint(number: int, tokens: int, tenant: str = "a") -> Hint:
    key = encode_tokens([number]) * tokens
    return Hint(tenant, NAMESPACE, key)


def test_a_tenants_hints_are_bounded_in_bytes() -> None:
    """1000 hints of 128k tokens were 512 MB for as long as they live."""
    book = HintBook(HintLimits(per_second=1e6, burst=10**6, moving_tokens=1 << 30, bytes=MIB), RemoteHints())
    answers = [book.offer(str(number), hint(number, 64 << 10), 0.0) for number in range(10)]
    assert [answer.verdict for answer in answers[:3]] == [Verdict.ACCEPTED] * 3
    assert {answer.verdict for answer in answers[3:]} == {Verdict.REFUSED}
    assert "tokens" in answers[-1].reason
    assert (answers[-1].retry_after_s or 0) > 0
    assert book.size_bytes <= MIB
    book.check()
    assert book.offer("b", hint(1, 64 << 10, "b"), 0.0).verdict is Verdict.ACCEPTED, "another tenant has room"


def test_the_prompts_of_hints_that_have_ended_are_not_kept() -> None:
    """They were for a minute: at 50 hints a second, 1.5 GB."""
    book = HintBook(HintLimits(per_second=1e6, burst=10**6, moving_tokens=1 << 30, bytes=MIB), RemoteHints())
    for number in range(100):
        entry = book.offer(str(number), hint(number, 64 << 10), 1.0).entry
        assert entry is not None
        book.cancel(entry, 1.0)
        assert (entry.hint.tokens, entry.hint.key) == (64 << 10, b"")
    assert book.size_bytes < MIB // 10
    book.check()
    book.expire(1.0 + ENDED_KEPT_S)
    assert book.size_bytes == 0


def test_a_prompt_that_no_hint_announced_is_not_read() -> None:
    """64 hints of 128k tokens cost each long request of the tenant 23 ms."""

    class Counted(bytes):
        read = 0

        def __getitem__(self, where):  # type: ignore[no-untyped-def]
            found = bytes.__getitem__(self, where)
            Counted.read += len(found) if isinstance(found, bytes) else 1
            return found

    book = HintBook(HintLimits(moving_tokens=1 << 30, live=100), RemoteHints())
    for length in range(1000, 1064):
        book.offer(str(length), hint(7, length), 0.0)
    prompt = Counted(encode_tokens([8]) * 100_000)
    assert book.expected("a", NAMESPACE, prompt, None) is None
    assert Counted.read < 1000
    longest = book.expected("a", NAMESPACE, bytes(encode_tokens([7]) * 100_000), None)
    assert longest is not None
    assert longest.hint.tokens == 1063


def test_eviction_of_announced_kv_compares_no_tokens(monkeypatch) -> None:
    """It walked along every announced prompt: with 1024 of 32k tokens 69 ms of a scheduler's pass."""
    tree, hbm = RadixTree(16), Holder.of("i", 0, Tier.HBM)
    retention = Retention(tree, Holder.of("i", 1, Tier.HBM))
    for number in range(8):
        key = encode_tokens(array("i", [number]) * 64)
        tree.insert(NAMESPACE, key, hbm)
        retention.expect(str(number), NAMESPACE, key, until=math.inf)
    walked = {
        id: [node for _, node in path_of(tree, NAMESPACE, hint.key)] for id, hint in retention._hints.items()
    }
    monkeypatch.setattr("sglang_ext.engine.tiers.retention.path_of", None)
    assert {each.id: each.nodes for each in retention.strongest_first(hbm)} == walked
    gone = retention.give_up(hbm, 6, lambda node: True)
    assert sum(evicted.blocks for evicted in gone) == 6
    held = {each.id: sum(node.blocks for node in each.nodes) for each in retention.strongest_first(hbm)}
    assert sum(held.values()) == 8 * 4 - 6
