"""Live regret: the oracle against an exhaustive search, and the last hour of a router."""

from __future__ import annotations

import functools
import math
import random

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import Beat, Fill
from sglang_ext.router.dispatch.explain import LoggedRequest
from sglang_ext.router.dispatch.regret import MOST_UNITS, Regret, Unit, belady, units_of
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.tiers import Tier

NAMESPACE = ("tokens", None, None, None)


def best(uses: list[list[int]], size: int) -> int:
    """The most hits of any cache of ``size`` blocks, by trying all evictions."""
    flat = [name for use in uses for name in use]

    @functools.cache
    def after(at: int, held: frozenset[int]) -> int:
        if at == len(flat):
            return 0
        name = flat[at]
        if name in held:
            return 1 + after(at + 1, held)
        choices = [held]  # it need not be taken in
        if len(held) < size:
            choices.append(held | {name})
        else:
            choices += [held - {one} | {name} for one in held]
        return max(after(at + 1, each) for each in choices)

    return after(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_the_oracle_finds_as_much_as_any_cache_can(seed: int) -> None:
    rng = random.Random(seed)
    uses = [[rng.randrange(5) for _ in range(1)] for _ in range(12)]
    for size in (1, 2, 3):
        units = [[(name, 1, True) for name in use] for use in uses]
        assert sum(belady(units, size)) == best(uses, size)
    assert sum(belady(units, math.inf)) == len(uses) - len({use[0] for use in uses})


def test_it_keeps_the_beginnings_of_prompts() -> None:
    # The end of the long prompt is used as late as its beginning: with too little room, the end goes.
    long: list[Unit] = [(at, 1, True) for at in range(8)]
    other: list[Unit] = [(100 + at, 1, True) for at in range(3)]
    assert belady([long, other, long], 5) == [0, 0, 5]
    answer: list[Unit] = [(at, 1, at < 4) for at in range(8)]
    assert belady([answer, long], 100) == [0, 8]
    assert belady([long, answer], 100) == [0, 4]


def test_units_are_prefixes_and_grow() -> None:
    tokens = list(range(16 * 1000))
    key = encode_tokens(tokens)
    units = list(units_of(key, len(key), 16, b"s"))
    assert sum(blocks for _, blocks, _ in units) == 960 + (1000 - 960) // 64 * 64
    assert len(units) < 70
    shorter = list(units_of(key[: 16 * 4 * 300], 16 * 4 * 20, 16, b"s"))
    assert [unit[0] for unit in shorter] == [unit[0] for unit in units[: len(shorter)]]
    assert sum(blocks for _, blocks, counts in shorter if counts) == 20
    other = list(units_of(encode_tokens([7, *tokens[1:]]), len(key), 16, b"s"))
    assert not {unit[0] for unit in other} & {unit[0] for unit in units}


def ended(regret: Regret, clock: FakeClock, name: str, tokens: list[int], cached: int) -> None:
    record = Record(name, "POST", "/generate", clock.monotonic())
    record.status, record.prompt_tokens, record.cached_tokens = 200, len(tokens), cached
    prompt = Encoded(NAMESPACE, encode_tokens(tokens), len(tokens))
    regret.on_ended(LoggedRequest(record, (prompt,), 0.0), clock.monotonic())


def test_the_last_hour_is_compared_and_what_was_before_is_not() -> None:
    clock = FakeClock()
    regret = Regret(clock, 16, lambda: 1000)
    assert regret.comparison()() is None
    ended(regret, clock, "old", list(range(160)), 0)
    clock.advance(3700)
    ended(regret, clock, "one", list(range(160)), 0)  # the oracle has it from before
    ended(regret, clock, "two", [*range(160), *range(160)], 160)
    found = regret.comparison()()
    assert found is not None
    regret.show(found)
    assert (found.requests, found.prompt_tokens, found.capacity_blocks) == (2, 480, 1000)
    assert found.hit == pytest.approx(160 / 480)
    assert found.oracle == found.unlimited == pytest.approx(20 / 30)
    shown = regret.explain("two", admin=True)
    assert shown is not None
    assert shown["tokens"] == 160
    assert shown["last_hour"]["requests"] == 2
    assert regret.explain("two", admin=False) == {"tokens": 160, "last_hour": None}
    assert regret.explain("none", admin=True) is None
    clock.advance(7300)
    regret.forget_old()
    assert len(regret) == 0 == regret.size_bytes


def test_memory_is_bounded_and_a_sample_tells_the_same(monkeypatch) -> None:
    clock, rng = FakeClock(), random.Random(1)
    every, some = Regret(clock, 16, lambda: 700), Regret(clock, 16, lambda: 700)
    talks = [[rng.randrange(9999) for _ in range(64)] for _ in range(60)]
    for number in range(900):
        clock.advance(1)
        talk = talks[min(rng.randrange(60), rng.randrange(60))]
        talk += [rng.randrange(9999) for _ in range(80)]
        monkeypatch.setattr("sglang_ext.router.dispatch.regret.MOST_UNITS", 1 << 30)
        ended(every, clock, f"{number}", talk, 0)
        monkeypatch.setattr("sglang_ext.router.dispatch.regret.MOST_UNITS", 6000)
        ended(some, clock, f"{number}", talk, 0)
    whole, sample = every.comparison()(), some.comparison()()
    assert whole is not None
    assert sample is not None
    assert whole.sampled == 1.0
    assert sample.sampled < 0.3
    assert some.size_bytes < 6000 * 128 + 900 * 256 + 1 < every.size_bytes
    assert 0.2 < whole.oracle < whole.unlimited - 0.02
    assert sample.oracle == pytest.approx(whole.oracle, abs=0.05)
    assert sample.unlimited == pytest.approx(whole.unlimited, abs=0.03)
    assert MOST_UNITS * 128 <= 2 << 20


async def test_a_router_shows_its_last_hour_everywhere(
    start_worker, start_router, client, monkeypatch
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    beat = Beat(bytes(16), 0, fills=(Fill(Tier.HBM.level, 10, 64), Fill(Tier.DRAM.level, 10, 400)))
    monkeypatch.setattr(router.agents, "beat", {worker.url: beat}.get)
    body = {"input_ids": list(range(100, 420)), "sampling_params": {"max_new_tokens": 4}}
    for name in ("first", "second"):
        async with client.post(router.url + "/generate", json=body, headers={"x-request-id": name}) as answer:
            assert answer.status == 200
    await router.history.round()
    async with client.get(router.url + "/metrics/last_hour") as answer:
        told = await answer.json()
    assert told["cached"]["requests"] == 2
    assert told["cached"]["capacity_blocks"] == 400
    assert told["cached"]["oracle"] == pytest.approx(0.5)
    assert told["samples"][-1]["prompt"] == 640
    assert told["samples"][-1]["ago_s"] >= 0
    async with client.get(router.url + "/explain/second") as answer:
        assert (await answer.json())["oracle"]["tokens"] == 320
    async with client.get(router.url + "/metrics") as answer:
        text = await answer.text()
    assert 'sglang_ext_router_last_hour_cached_ratio{what="oracle"} 0.5' in text
    assert 'sglang_ext_router_table_entries{table="regret"} 2.0' in text
