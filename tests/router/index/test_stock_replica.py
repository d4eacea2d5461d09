"""A stock server's blocks, by its KV events. `tests/engine/events/test_stock_events.py` holds the dialect to
SGLang's own.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global.sync.replica import Outcome
from sglang_ext.router.index.index import Index
from sglang_ext.router.index.prompt_trees import GUESS_SPAN_S, GUESS_TTL_S
from sglang_ext.router.index.stock_replica import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    StockReplica,
)
from sglang_ext.router.policies.base import Role
from sglang_ext.testing.fakes import FakeClock

NS = ("tokens", None, None, None)
BLOCK = 4
ENCODE = msgspec.msgpack.Encoder().encode


class Stock:
    """A stock server's cache: a dictionary of pages, reported as SGLang does."""

    def __init__(self, index: Index, name: str = "s", page: int = 1) -> None:
        self.index, self.name, self.page = index, name, page
        self.replica = index.attach_stock(name, Role.COLOCATED)
        self.replica.began()
        self.replica.caught_up()
        index.on_heartbeat(name, alive=True)
        self.held: dict[tuple[Any, ...], int] = {}
        self.number = 0
        self.names = iter(range(1, 1_000_000))

    def store(self, tokens: list[int], salt: str | None = None) -> None:
        end = len(tokens) // self.page * self.page
        new = [at for at in range(self.page, end + 1, self.page) if (salt, *tokens[:at]) not in self.held]
        for at in new:
            self.held[salt, *tokens[:at]] = next(self.names)
        if new:
            start = new[0] - self.page
            parent = self.held[salt, *tokens[:start]] if start else None
            names = [self.held[salt, *tokens[:at]] for at in new]
            self.report(BlockStored(names, parent, tokens[start:end], self.page, None, "GPU", salt))

    def evict(self, tokens: list[int], keep: int, salt: str | None = None) -> None:
        prefixes = [p for p in self.held if len(p) - 1 > keep and p[: keep + 1] == (salt, *tokens[:keep])]
        if prefixes:
            self.report(BlockRemoved([self.held.pop(p) for p in prefixes], "GPU"))

    def report(self, *events: Any) -> None:
        payload = ENCODE(Batch(0.0, list(events), 0))
        assert self.replica.take(self.number, payload) is Outcome.APPLIED
        self.number += 1
        self.replica.caught_up()
        self.index.stock_changed(self.name, self.replica)
        self.index.check()

    def truth(self, tokens: list[int], salt: str | None = None) -> int:
        """Tokens that the server finds again of a prompt, in whole blocks of the index."""
        at = 0
        while at + self.page <= len(tokens) and (salt, *tokens[: at + self.page]) in self.held:
            at += self.page
        return at // BLOCK * BLOCK


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def index(clock: FakeClock) -> Index:
    return Index(clock, block_size=BLOCK)


def found(index: Index, tokens: list[int], salt: str | None = None, name: str = "s") -> int:
    match = index.match(("tokens", None, None, salt), encode_tokens(tokens)).get(name)
    return 0 if match is None else match.tokens


@pytest.mark.parametrize("page", [1, 2, 4, 16])
def test_the_copy_is_what_the_server_finds_again(index: Index, page: int) -> None:
    rng = random.Random(page)
    stock = Stock(index, page=page)
    prompts: list[tuple[list[int], str | None]] = []
    seen = set()
    for _ in range(200):
        base = rng.choice(prompts)[0] if prompts and rng.random() < 0.7 else []
        tokens = [
            *base[: rng.randrange(len(base) + 1)],
            *(rng.randrange(3) for _ in range(rng.randrange(50))),
        ]
        salt = rng.choice([None, "a"])
        prompts.append((tokens, salt))
        stock.store(tokens, salt)
        if rng.random() < 0.4:
            there, whose = rng.choice(prompts)
            stock.evict(there, rng.randrange(len(there) // page + 1) * page, whose)
        if rng.random() < 0.02:
            stock.held.clear()
            stock.report(AllBlocksCleared())
        for there, whose in rng.sample(prompts, min(len(prompts), 5)):
            assert found(index, there, whose) == stock.truth(there, whose)
            seen.add(stock.truth(there, whose))
    assert len(seen) > 5


def test_a_copy_that_misses_a_removal_differs(index: Index) -> None:
    stock = Stock(index)
    stock.store(list(range(16)))
    stock.held = {prefix: name for prefix, name in stock.held.items() if len(prefix) <= 9}
    assert found(index, list(range(16))) == 16 != stock.truth(list(range(16)))


def test_what_is_in_another_medium_is_passed_over(index: Index) -> None:
    stock = Stock(index)
    stock.store(list(range(8)))
    names = [stock.held[None, *range(at)] for at in range(1, 9)]
    stock.report(BlockStored([99], names[-1], [7], 1, None, "CPU_PINNED"), BlockRemoved(names, "CPU_PINNED"))
    assert found(index, list(range(8))) == 8


def test_what_an_adapter_has_computed_is_passed_over(index: Index) -> None:
    stock = Stock(index)
    stock.store(list(range(8)))
    end = stock.held[None, *range(8)]
    stock.report(BlockStored([96, 97, 98, 99], end, [8, 9, 10, 11], 1, None, "GPU", lora_name="adapter"))
    assert found(index, list(range(12))) == 8
    stock.report(BlockStored([96, 97, 98, 99], end, [8, 9, 10, 11], 1, None, "GPU"))
    assert found(index, list(range(12))) == 12


def test_a_batch_that_is_missing_is_missed_and_one_that_comes_again_is_not_taken_twice(index: Index) -> None:
    stock = Stock(index)
    stock.store(list(range(8)))
    later = ENCODE(Batch(0.0, [BlockStored([7001], None, [5], 1, None, "GPU")]))
    assert stock.replica.take(0, later) is Outcome.IGNORED
    assert index.trusted("s")
    assert stock.replica.take(2, later) is Outcome.BROKEN
    assert not index.trusted("s")
    assert index.match(NS, encode_tokens(list(range(8)))) == {}
    stock.report(AllBlocksCleared())  # it was number 1
    assert stock.replica.take(2, later) is Outcome.APPLIED
    assert index.trusted("s")
    assert not stock.replica.partial


def test_what_was_lost_is_all_dropped_and_what_passes_by_is_believed_beside_the_rest(
    index: Index, clock: FakeClock
) -> None:
    stock = Stock(index)
    old, new = list(range(8)), list(range(50, 58))
    stock.store(old)
    index.confirm(NS, encode_tokens(old), "s")  # of no interest: it tells
    stock.replica.lost(5)
    stock.number = 5
    stock.report()
    assert (found(index, old), stock.replica.partial, stock.replica.lost_count) == (0, True, 1)
    index.confirm(NS, encode_tokens(old), "s")
    stock.held.clear()
    stock.store(new)
    stock.report(BlockStored([999], 4242, [1], 1, None, "GPU"))  # continues a run that was reported before
    assert (found(index, old), found(index, new)) == (8, 8)
    stock.held.clear()
    stock.report(AllBlocksCleared())  # nothing is missing any more
    assert (found(index, old), found(index, new), stock.replica.partial) == (0, 0, False)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x93", ENCODE([0.0, [{"type": "Other"}], None]), ENCODE([0.0, "x", 1])]
    + [ENCODE(Batch(0.0, [BlockStored([1, 2], None, tokens, 4, None)]))
       for tokens in ([1, 2, 3], [-1] * 8, [-(2**40)] * 8)]
    + [ENCODE(Batch(0.0, [BlockStored([500], 77, [1, 2, 3, 4], 4, None)]))],
)  # fmt: skip
def test_a_batch_that_says_nothing_counts_as_lost(index: Index, payload: bytes) -> None:
    stock = Stock(index)
    stock.store(list(range(8)))
    assert stock.replica.take(1, payload) is Outcome.APPLIED
    assert (stock.replica.bad, stock.replica.partial, stock.replica.next) == (1, True, 2)
    assert found(index, list(range(8))) == 0
    stock.replica.check()


def test_random_bytes_never_raise() -> None:
    rng = random.Random(3)
    index = Index(FakeClock(), block_size=BLOCK)
    replica: StockReplica = Stock(index).replica
    valid = ENCODE(Batch(1.0, [BlockStored([1, 2], None, [1, 2], 1, None), BlockRemoved([1, 1, 9])]))
    for number in range(2000):
        data = bytearray(valid)
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        assert replica.take(number, bytes(data)) is Outcome.APPLIED
        replica.check()
    assert 0 < replica.bad < 2000


def test_prompts_with_an_extra_key_look_like_others_so_their_salt_is_believed_only(
    index: Index, clock: FakeClock
) -> None:
    stock = Stock(index)
    tokens = list(range(8))
    key = encode_tokens(tokens)
    index.guess(("tokens", None, "mine", "a"), key, "s")
    clock.advance(GUESS_TTL_S + GUESS_SPAN_S + 1)
    stock.store(tokens, "a")
    stock.store(tokens)
    assert (found(index, tokens, "a"), found(index, tokens)) == (0, 8)
    assert index.learns_of(("tokens", None, None, "a"), "s")
    index.confirm(("tokens", None, None, "a"), key, "s")
    assert found(index, tokens, "a") == 8
    assert index.learns_of(("tokens", "adapter", None, None), "s")
    assert not index.learns_of(NS, "s")


def test_an_instance_with_too_many_pages_is_followed_no_more(clock: FakeClock) -> None:
    index = Index(clock, block_size=BLOCK, max_bytes=64 << 10)
    stock = Stock(index)
    for start in range(0, 100_000, 100):
        if index.stock("s") is None:
            break
        stock.store(list(range(start, start + 40)))
    assert not index.reports("s")
    assert index.size_bytes < 64 << 10
    assert index.learns_of(NS, "s")
    index.check()


def test_two_instances_share_the_tree_and_one_restart_concerns_one(index: Index) -> None:
    one, two = Stock(index, "s"), Stock(index, "t")
    for stock in (one, two):
        stock.store(list(range(12)))
    one.replica.restart()
    assert (found(index, list(range(12))), found(index, list(range(12)), name="t")) == (0, 12)
    assert not index.trusted("s")
    index.detach("s")
    while index.tidy():
        pass
    index.check()


@pytest.mark.parametrize("page", [1, BLOCK])
def test_pictures_of_a_stock_server_are_pages_like_any_other(index: Index, page: int) -> None:
    """From SGLang 0.5.23 on their ids have 62 bits."""
    stock = Stock(index, page=page)
    text, ids = list(range(2 * BLOCK)), [2**61 + at % 4 for at in range(6 * BLOCK)]
    stock.store([*text, *ids])
    assert found(index, [*text, *ids]) == 8 * BLOCK
    assert found(index, [*text, *range(BLOCK)]) == 2 * BLOCK
    stock.evict([*text, *ids], keep=3 * BLOCK)
    assert found(index, [*text, *ids]) == 3 * BLOCK
