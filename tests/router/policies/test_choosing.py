"""Who decides: a hint, or the policy."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.cost_model import CostModel
from sglang_ext.router.dispatch.costs import RouterCosts
from sglang_ext.router.dispatch.hint import Place
from sglang_ext.router.policies import (
    Decision,
    Instance,
    Match,
    PolicyOptions,
    Reason,
    Role,
    policy_named,
)
from sglang_ext.router.telemetry.fetch_note import NOT_WORTH_IT, UNDER_WAY, FetchNote, SpanNote
from sglang_ext.router.tokens.encoded import Encoded
from tests.support.sources import from_sources

choosing = from_sources("sglang_ext.router.dispatch.choosing")
"""Compiled code checks the types of its parts, and here some are stand-ins."""

KEY = bytes(4 * 1000)
FLEET = tuple(Instance(name, 0, 0, 0, 0) for name in ("a", "b"))
HELD = {"a": Match(960, own=True)}


class Announced:
    """Every request was announced to run at ``b``."""

    def expected_at(self, flight: Any, fleet: Any) -> Place | None:
        return Place("b")


class Fetches:
    """What ``b`` would fetch from ``a`` ends as told; ``a`` needs nothing."""

    def __init__(self, end: str) -> None:
        self.end = end

    def consider(self, flight: Any, decision: Decision, fleet: Any, matches: Any) -> FetchNote | None:
        if decision.instance == "a":
            return None
        note = FetchNote("b", [SpanNote("a", "hbm", 0, 960, 2.0)], 2.0, 1.0, calibrated=True)
        note.end = self.end
        return note


def choose(
    end: str | None, *, announced: bool = True, instances: tuple[Instance, ...] = FLEET
) -> tuple[Decision, Any]:
    metrics: Any = SimpleNamespace(decided=lambda policy, reason: None)
    fleet: Any = SimpleNamespace(usable=lambda excluded=frozenset(): instances)
    trees: Any = SimpleNamespace(
        match=lambda namespace, key: dict(HELD), guess=lambda namespace, key, name: None, block_size=16
    )
    costs = RouterCosts(CostModel(), lambda: 0.0)
    policy = policy_named("prompt-tree")
    routing = choosing.Routing(name="prompt-tree", policy=policy, options=PolicyOptions())
    fetching: Any = None if end is None else Fetches(end)
    expectations = Announced() if announced else None
    chooser = choosing.Chooser(routing, fleet, trees, costs, metrics, fetching, expectations)
    record = SimpleNamespace(priority=0, request_id="r1", prompt_tokens=1000)
    flight: Any = SimpleNamespace(
        admitted=SimpleNamespace(session="s"),
        prompts=[Encoded(("tokens", None, None, None), KEY, 1000)],
        units=1000,
        record=record,
    )
    found = chooser.choose(flight, frozenset())
    assert found is not None
    return found[0], record


@pytest.mark.parametrize("end", [None, UNDER_WAY])
def test_an_announced_request_goes_where_its_kv_is_or_comes(end: str | None) -> None:
    decision, record = choose(end)
    assert (decision.instance, decision.reason) == ("b", Reason.ADVISED)
    assert (record.fetch is None) == (end is None)


def test_an_announced_request_whose_kv_does_not_come_goes_to_who_holds_it() -> None:
    decision, record = choose(NOT_WORTH_IT)
    assert (decision.instance, decision.reason) == ("a", Reason.PREFIX)
    assert (record.instance, record.fetch) == ("a", None)


def test_without_a_hint_the_policy_decides() -> None:
    decision, _ = choose(UNDER_WAY, announced=False)
    assert (decision.instance, decision.reason) == ("a", Reason.PREFIX)


def test_an_estimate_has_what_the_instance_computes_and_what_it_is_sent() -> None:
    model = CostModel()
    _, record = choose(None)
    assert (record.estimate.transfer_s, record.estimate.exec_s) == (0, model.exec_s(1000, 0))
    _, record = choose(UNDER_WAY)
    assert (record.estimate.transfer_s, record.estimate.exec_s) == (2.0, model.exec_s(40, 960))
    _, record = choose(UNDER_WAY, announced=False)
    assert (record.estimate.transfer_s, record.estimate.exec_s) == (0, model.exec_s(40, 960))


def test_an_estimate_of_a_pair_has_the_hand_over() -> None:
    pair = (Instance("a", 0, 0, 0, 0, Role.PREFILL), Instance("d", 0, 0, 0, 0, Role.DECODE))
    decision, record = choose(None, announced=False, instances=pair)
    assert (decision.instance, decision.decode) == ("a", "d")
    assert record.estimate.transfer_s == CostModel().transfer_s(1000)
    assert record.estimate.exec_s == CostModel().exec_s(40, 960)
