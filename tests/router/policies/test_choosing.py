"""A request's instance: by a hint or by the policy, and its record."""

from types import SimpleNamespace
from typing import Any

import pytest
from router_costs import router_costs

from sglang_ext.cost_model import CostModel
from sglang_ext.router.hints.hint import Place
from sglang_ext.router.placing.placing import Placement, PlacingOptions
from sglang_ext.router.policies import Instance, Match, PolicyOptions, Reason, Role, policy_named
from sglang_ext.router.policies.plan import Plan
from sglang_ext.router.telemetry.fetch_note import NOT_WORTH_IT, UNDER_WAY, UNSENT, FetchNote
from sglang_ext.router.tokens.encoded import Encoded
from tests.support.sources import from_sources

choosing = from_sources("sglang_ext.router.dispatch.choosing")
"""Compiled code checks the types of its parts, and here some are stand-ins."""

KEY = bytes(4 * 1000)
FLEET = tuple(Instance(name, 0, 0, 0, 0) for name in ("a", "b"))
HELD = {"a": Match(960, own=True)}
MODEL = CostModel()


class Announced:
    """Announces every request for ``place``."""

    def __init__(self, place: Place | None) -> None:
        self.place = place

    def expected_at(self, scope: Any, session: Any, prompts: Any, fleet: Any) -> Place | None:
        return self.place


class Fetches:
    """Carries out plans; the agents answer as ``end`` says."""

    def __init__(self, end: str) -> None:
        self.end = end

    def carry_out(self, plan: Plan | None, prompts: Any) -> FetchNote | None:
        if plan is None:
            return None
        end = self.end if plan.worth_it else NOT_WORTH_IT
        return FetchNote(plan.instance, [], plan.transfer_s, plan.saved_s, calibrated=True, end=end)


def choose(
    *,
    slow: bool = False,
    linked: bool = True,
    end: str = UNDER_WAY,
    announced: bool = True,
    instances: tuple[Instance, ...] = FLEET,
) -> tuple[Placement, Any]:
    """Choose for a request that was announced for ``b``, while ``a`` holds its prompt. slow: fetches from
    ``a`` have taken minutes. linked: ``b`` can fetch from ``a``."""
    metrics: Any = SimpleNamespace(decided=lambda policy, reason: None)
    fleet: Any = SimpleNamespace(usable=lambda excluded=frozenset(): instances)
    trees: Any = SimpleNamespace(
        match=lambda namespace, key: dict(HELD), guess=lambda namespace, key, name: None, block_size=16
    )
    costs = router_costs(MODEL, lambda: 0.0, can_fetch=lambda source, target: linked)
    if slow:
        costs.observe_transfer("a", "b", 960, 300.0)
    placing = PlacingOptions(policy=policy_named("prompt-tree"), thresholds=PolicyOptions())
    routing = choosing.Routing(name="prompt-tree", placing=placing)
    expectations = Announced(Place("b") if announced else None)
    chooser = choosing.Chooser(routing, fleet, trees, costs, metrics, Fetches(end), expectations)
    caller = SimpleNamespace(scope="")
    record = SimpleNamespace(priority=0, request_id="r1", prompt_tokens=1000, caller=caller)
    flight: Any = SimpleNamespace(
        admitted=SimpleNamespace(session="s"),
        prompts=[Encoded(("tokens", None, None, None), KEY, 1000)],
        units=1000,
        record=record,
    )
    found = chooser.choose(flight, frozenset())
    assert found is not None
    return found[0], record


@pytest.mark.parametrize("linked", [False, True])
def test_an_announced_request_goes_where_its_kv_is_or_comes(linked: bool) -> None:
    placed, record = choose(linked=linked)
    assert (placed.instance, placed.reason) == ("b", Reason.ADVISED)
    assert (record.fetch is None) == (not linked)


def test_an_announced_request_whose_kv_does_not_come_goes_to_its_holder() -> None:
    placed, record = choose(slow=True)
    assert (placed.instance, placed.reason) == ("a", Reason.PREFIX)
    assert (record.instance, record.fetch) == ("a", None)


def test_without_a_hint_the_policy_decides() -> None:
    placed, _ = choose(announced=False)
    assert (placed.instance, placed.reason) == ("a", Reason.PREFIX)


def test_an_estimate_has_the_instances_computing_and_its_transfers() -> None:
    _, record = choose(linked=False)
    assert (record.estimate.transfer_s, record.estimate.exec_s) == (0, MODEL.exec_s(1000, 0))
    transfer_s = router_costs(MODEL, lambda: 0.0, can_fetch=lambda *_: True).transfer_s(*FLEET, 960)
    _, record = choose()
    assert (record.estimate.transfer_s, record.estimate.exec_s) == (transfer_s, MODEL.exec_s(40, 960))
    _, record = choose(end=UNSENT)
    assert (record.estimate.transfer_s, record.estimate.exec_s) == (0, MODEL.exec_s(1000, 0))
    _, record = choose(announced=False)
    assert (record.estimate.transfer_s, record.estimate.exec_s) == (0, MODEL.exec_s(40, 960))


def test_an_estimate_of_a_pair_has_the_hand_over() -> None:
    pair = (Instance("a", 0, 0, 0, 0, Role.PREFILL), Instance("d", 0, 0, 0, 0, Role.DECODE))
    placed, record = choose(announced=False, instances=pair)
    assert (placed.instance, placed.decode) == ("a", "d")
    assert record.estimate.transfer_s == MODEL.transfer_s(1000)
    assert record.estimate.exec_s == MODEL.exec_s(40, 960)
