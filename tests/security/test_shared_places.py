"""Places that all tenants of an instance share: one may have all of them until others want theirs."""

from __future__ import annotations

import itertools
import math

from sglang_ext.engine.tiers.retention import MOST_HINTS, Retention
from sglang_ext.keys import encode_tokens
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier

KEY = encode_tokens([1, 1])


def make() -> Retention:
    clock = itertools.count(1)
    tree = RadixTree(2, clock=lambda: float(next(clock)))
    return Retention(tree, Holder.of("a announced", 1, Tier.HBM))


def expect(retention: Retention, tenant: str, number: int, *, until: float, priority: int = 0) -> None:
    space = (0, f"key {number}", tenant)  # extra keys are the client's choice
    retention.expect(f"{tenant}{number}", space, KEY, until=until, priority=priority)


def left(retention: Retention, tenant: str, count: int) -> int:
    return sum(retention.knows(f"{tenant}{number}") for number in range(count))


def test_hints_that_live_long_take_no_place_of_another_tenants() -> None:
    retention = make()
    many = 2 * MOST_HINTS
    for number in range(many):
        expect(retention, "a", number, until=math.inf, priority=9)
    assert left(retention, "a", many) == MOST_HINTS, "the twin: alone, it has all places"
    for number in range(10):
        expect(retention, "b", number, until=1.0)
    for number in range(many):
        expect(retention, "a", many + number, until=math.inf, priority=9)
    assert left(retention, "b", 10) == 10
    assert len(retention) == MOST_HINTS


def test_two_tenants_that_want_all_have_half_each() -> None:
    retention = make()
    for number in range(2 * MOST_HINTS):
        expect(retention, "a", number, until=math.inf)
        expect(retention, "b", number, until=1.0)
    shares = [left(retention, tenant, 2 * MOST_HINTS) for tenant in "ab"]
    assert sum(shares) == MOST_HINTS
    assert min(shares) >= MOST_HINTS // 2 - 1
