"""``RouterCosts`` for tests: by default no instance can fetch or split, and passes have any size."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from sglang_ext.cost_model import CostModel
from sglang_ext.cost_model.batch import ANY, Batching
from sglang_ext.router.placing.costs import RouterCosts


def never(source: str, target: str) -> bool:
    return False


def router_costs(
    model: CostModel,
    monotonic: Callable[[], float],
    *,
    can_fetch: Callable[[str, str], bool] = never,
    can_split: Callable[[str, str], bool] = never,
    shares_kv: Callable[[str], Hashable] = lambda name: "",
    batching: Callable[[str], Batching] = lambda name: ANY,
) -> RouterCosts:
    return RouterCosts(
        model, monotonic, can_fetch=can_fetch, shares_kv=shares_kv, can_split=can_split, batching=batching
    )
