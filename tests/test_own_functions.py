"""Policies of one's own: the examples, each where it is used, and the effect of a failure."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_ext.config import KvConfig
from sglang_ext.engine.tiers.retention import Retention, pressure_policy_by_name
from sglang_ext.errors import ConfigError
from sglang_ext.keys import encode_tokens
from sglang_ext.own_functions import order_named
from sglang_ext.radix_global import Holder, RadixTree, policy_by_name
from sglang_ext.router import RouterConfig
from sglang_ext.router.dispatch.queueing import Line, Waiting, queue_policy_named
from sglang_ext.router.policies import Instance, Match, PolicyOptions, Prompt, policy_named
from sglang_ext.tiers import Tier

EXAMPLES = Path(__file__).parents[1] / "examples" / "policies"
HBM = Holder.of("a", 1, Tier.HBM)


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def key(text: str) -> bytes:
    return encode_tokens([ord(letter) for letter in text])


def tree_of(policy: str, *prompts: str) -> RadixTree:
    clock = itertools.count(1)
    tree = RadixTree(1, policy=policy_by_name(policy), clock=lambda: float(next(clock)))
    for prompt in prompts:
        tree.insert("n", key(prompt), HBM, list(prompt))
    return tree


def first_to_go(tree: RadixTree) -> str:
    (gone,) = tree.evict(HBM, 1)
    return str(gone.address[0])


def test_eviction() -> None:
    for policy, gone in (("lru", "a"), ("eviction:least_frequently_used", "b")):
        tree = tree_of(policy, "a", "b")
        for _ in range(3):
            tree.insert("n", key("a"), HBM, ["a"])
        tree.insert("n", key("b"), HBM, ["b"])
        assert first_to_go(tree) == gone, policy


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        # Of low priority first, under every policy.
        ("weakest-first", ["low", "soon", "long", "late"]),
        ("smallest-first", ["low", "late", "soon", "long"]),
        ("pressure:newest_first", ["low", "late", "long", "soon"]),
    ],
)
def test_the_order_under_pressure(policy: str, order: list[str]) -> None:
    prompts = {"low": "aaaaaaaa", "soon": "bbbb", "long": "cccccc", "late": "dd"}
    hints = {"low": (0, 99.0), "soon": (1, 10.0), "long": (1, 20.0), "late": (1, 30.0)}
    tree = tree_of("lru", *prompts.values())
    retention = Retention(tree, Holder.of("a announced", 1, Tier.HBM), pressure_policy_by_name(policy))
    for name in ("low", "soon", "long", "late"):
        priority, until = hints[name]
        retention.expect(name, "n", key(prompts[name]), priority=priority, until=until)
    gone = []
    for name in order:
        for evicted in retention.give_up(HBM, len(prompts[name]), lambda node: True):
            gone += evicted.address
    assert "".join(dict.fromkeys(gone)) == "".join(prompts[name][0] for name in order)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("priority", [4, 0, 1, 2, 3]),
        ("shortest-first", [4, 1, 3, 2, 0]),
        ("queue_order:people_first", [4, 3, 2, 1, 0]),
    ],
)
def test_who_is_next_in_the_line(policy: str, order: list[int]) -> None:
    requests = [
        Waiting(prompt_tokens=900),
        Waiting(prompt_tokens=10),
        Waiting(prompt_tokens=500, streams=True),
        Waiting(prompt_tokens=20, streams=True),
        Waiting(1, prompt_tokens=5000),
    ]
    line = Line(10, queue_policy_named(policy))
    tickets = [line.join(request)[0] for request in requests]
    assert [tickets.index(ticket) for ticket in iter(line.next, None)] == order


def test_placement() -> None:
    fleet = tuple(Instance(name, 0, 0, 0, 0) for name in "abcd")
    policy = policy_named("placement:long_prompts_apart")
    options = PolicyOptions()
    costs: Any = None
    assert policy(Prompt(5000), fleet, {"b": Match(64)}, costs, options).instance == "b"
    assert policy(Prompt(100), fleet, {"b": Match(64), "d": Match(16)}, costs, options).instance == "d"


@pytest.mark.parametrize("wrong", [lambda: 1 / 0, lambda: "a", lambda: (float("nan"),), lambda: ("a",)])
def test_a_function_that_fails_is_replaced_and_logged_once(
    wrong: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType("wrong_order")
    module.order = lambda thing: wrong() if thing == 2 else (0.5,)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    known = {"largest": lambda thing: (-thing,)}
    order = order_named("wrong_order:order", known, "(thing) -> tuple of numbers", field="--order")
    with caplog.at_level(logging.ERROR):
        assert [order(thing) for thing in (1, 2, 2)] == [(0.5,), (-2,), (-2,)]
    (said,) = caplog.records
    assert "--order wrong_order:order" in said.getMessage()
    assert "largest is used instead" in said.getMessage()


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda name: policy_by_name(name), "--kv-eviction-policy"),
        (lambda name: pressure_policy_by_name(name), "--kv-eviction-policy pressure"),
        (lambda name: RouterConfig(queue_policy=name), "--queue-policy"),
        (lambda name: RouterConfig(policy=name), "--policy"),
    ],
)
@pytest.mark.parametrize("name", ["no_such_module_here:f", "eviction:gone", "json:JSONDecoder", "os:getpid"])
def test_what_cannot_be_used_is_refused_at_start_by_the_flag(make: Any, flag: str, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(name)
    assert refused.value.field == flag
    assert refused.value.hint


@pytest.mark.parametrize("field", ["eviction_policy", "pressure_policy"])
def test_a_server_refuses_an_unknown_word_with_its_flags(field: str) -> None:
    assert getattr(KvConfig(**{field: "my.own:order"}), field) == "my.own:order"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nor a package"):
        KvConfig(**{field: "fifo"})  # type: ignore[arg-type]
