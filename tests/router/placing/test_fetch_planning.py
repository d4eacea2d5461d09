"""Sources and targets of fetches, when they are worth it, and the messages to agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from router_costs import router_costs

from sglang_ext.cost_model import CostModel
from sglang_ext.protocol import agent as agent_messages
from sglang_ext.protocol.agent import (
    Expecting,
    Export,
    Fetched,
    FetchedSpan,
    FetchSpan,
    FromAgent,
    ToAgent,
)
from sglang_ext.protocol.cluster import Registration
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.placing.fetching import (
    LEAST_WAIT_S,
    MOST_BUSY_S,
    MOST_KEY_BYTES,
    MOST_WAIT_S,
    Fetching,
)
from sglang_ext.router.placing.placing import (
    PlacingOptions,
    fetches_everywhere,
    gathering_plan,
    place,
)
from sglang_ext.router.policies import Decision, Fetch, Instance, Match, PolicyOptions, Prompt, Reason
from sglang_ext.router.policies.simple import balanced
from sglang_ext.router.policies.splitting import SplitTerms
from sglang_ext.router.telemetry.fetch_note import NOT_WORTH_IT, UNDER_WAY, UNSENT, FetchNote
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.signals import Signal
from sglang_ext.tiers import Tier

TOKENS = ("tokens", None, None, "salt")
KEY = bytes(4 * 1000)


def registration(name: str, **more: Any) -> Registration:
    facts: dict[str, Any] = {
        "url": f"http://{name}:1",
        "instance": name,
        "epoch": "0" * 32,
        "namespace": "same",
        "endpoints": (f"{name}:7",),
    }
    return Registration(**(facts | more))


@dataclass
class Channels(AgentChannels):
    """Agents that receive every message, but for those that are deaf."""

    known: dict[str, Registration] = field(
        default_factory=lambda: {name: registration(name) for name in ("a", "b")}
    )
    deaf: set[str] = field(default_factory=set)
    sent: list[tuple[str, ToAgent]] = field(default_factory=list)
    messages: Signal[[str, FromAgent]] = field(default_factory=Signal)

    def registration(self, name: str) -> Registration | None:
        return self.known.get(name)

    def send(self, name: str, message: ToAgent) -> bool:
        if name in self.deaf:
            return False
        self.sent.append((name, message))
        return True


def instance(name: str, in_flight: int = 0, *, trusted: bool = True) -> Instance:
    return Instance(name, in_flight, 0, 0, 0, trusted=trusted)


FLEET = (instance("a"), instance("b"))
FROM_B = Decision("a", Reason.FETCH, fetch=(Fetch("b", 960),))


def fetching(
    channels: Channels | None = None,
    now: Callable[[], float] = lambda: 0.0,
    metrics: RouterMetrics | None = None,
) -> Fetching:
    made = channels or Channels()
    costs = router_costs(CostModel(), now, can_fetch=made.can_fetch, can_split=made.can_split)
    ids = (f"r{number}" for number in count(1))
    return Fetching(made, costs, metrics or RouterMetrics(), new_id=lambda: next(ids))


def carried_out(
    found: Fetching,
    decision: Decision,
    fleet: tuple[Instance, ...],
    matches: dict[str, Match],
    prompts: list[Encoded] | None = None,
    split: SplitTerms | None = None,
) -> FetchNote | None:
    """Place a prompt, by default of 1000 tokens, by a given decision, and carry out its plan."""
    prompts = prompts or prompts_of()
    options = PlacingOptions(policy=lambda *_: decision, thresholds=PolicyOptions(), split=split)
    tokens = sum(prompt.units for prompt in prompts)
    return found.carry_out(place(Prompt(tokens), fleet, matches, found._costs, options).plan, prompts)


def fetch_from_b(found: Fetching, matches: dict[str, Match] | None = None) -> FetchNote | None:
    """Carry out a decision that names a span."""
    return carried_out(found, FROM_B, FLEET, matches or {"b": Match(960)})


def prompts_of(
    key: bytes = KEY, namespace: tuple[str | None, ...] = TOKENS, prompts: int = 1
) -> list[Encoded]:
    return [Encoded(namespace, key, len(key) // 4)] * prompts


# -- instances that can fetch -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"namespace": "other weights"}, False),
        ({"endpoints": ()}, False),
        ({"endpoints": ("a:7", "a:8")}, False),
        ({"block_size": 32}, False),
    ],
)
def test_who_can_fetch_from_whom(changes: dict[str, Any], expected: bool) -> None:
    channels = Channels()
    channels.known["a"] = registration("a", **changes)
    assert channels.can_fetch("a", "b") is expected
    assert fetches_everywhere(FLEET, fetching(channels)._costs) is expected


def test_an_instance_fetches_neither_from_itself_nor_from_a_silent_agent() -> None:
    assert not Channels().can_fetch("a", "a")
    assert not Channels().can_fetch("a", "z")
    assert not fetches_everywhere(FLEET[:1], fetching()._costs)


def wanted(
    found: Fetching, decision: Decision, fleet: tuple[Instance, ...], matches: dict[str, Match]
) -> Fetch | None:
    """The fetch that an instance is ordered to make for a prompt of 1000 tokens."""
    note = carried_out(found, decision, fleet, matches)
    if note is None or note.end == NOT_WORTH_IT:
        return None
    (span,) = note.read
    assert span.source is not None
    return Fetch(span.source, span.stop)


# -- computing together -----------------------------------------------------------------------------

TERMS = SplitTerms(500, 0.0)


def splitting(**registered: Any) -> tuple[Fetching, Channels]:
    channels = Channels()
    for name in channels.known:
        channels.known[name] = registration(name, **({"splits": True} | registered))
    return fetching(channels), channels


def test_another_instance_gets_the_command_to_compute_the_beginning() -> None:
    found, channels = splitting()
    note = carried_out(found, Decision("a", Reason.NO_PREFIX), FLEET, {}, split=TERMS)
    assert note is not None
    first, rest = note.spans
    assert (first.source, first.tier, first.start) == ("b", "compute", 0)
    assert (rest.source, rest.start, rest.stop) == (None, first.stop, 1000)
    (helper, export), (target, fetch) = channels.sent
    assert (helper, target) == ("b", "a")
    assert isinstance(export, Export)
    assert export.compute
    assert export.tokens == KEY[: 4 * first.stop]
    assert isinstance(fetch, agent_messages.Fetch)
    (span,) = fetch.spans
    assert (span.tokens, span.computed, span.source.export) == (first.stop, True, export.export)
    assert fetch.wait_s == export.ttl_s
    assert note.as_json()["plan"][0]["tier"] == "compute"
    # Its computing for this prompt keeps others waiting, until that has ended.
    assert found._costs.queue_s(FLEET[1]) > 0
    channels.messages("a", Fetched(b"e" * 16, fetch.id, False, "done", (FetchedSpan("done", 512, 1.0),)))
    assert found._costs.queue_s(FLEET[1]) == 0
    assert not found._costs._transfers.factor("b", 0.0) > 1.0, "computing is no transfer"


def test_requests_of_one_id_free_their_helper_each() -> None:
    """Ids of requests are their clients' choice: several may be alike."""
    found, channels = splitting()
    for _ in range(5):
        assert carried_out(found, Decision("a", Reason.NO_PREFIX), FLEET, {}, split=TERMS) is not None
    ids = [message.id for _, message in channels.sent if isinstance(message, agent_messages.Fetch)]
    assert (len(set(ids)), found.under_way) == (5, 5)
    for id in ids:
        channels.messages("a", Fetched(b"e" * 16, id, False, "done", (FetchedSpan("done", 512, 1.0),)))
    assert found.under_way == 0
    assert found._costs.queue_s(FLEET[1]) == 0, "nothing is computed for them any more"


def test_a_death_ends_what_is_computed_for_it() -> None:
    found, _ = splitting()
    carried_out(found, Decision("a", Reason.NO_PREFIX), FLEET, {}, split=TERMS)
    found.forget("a")
    assert found._costs.queue_s(FLEET[1]) == 0


@pytest.mark.parametrize(
    ("registered", "decision", "matches"),
    [
        pytest.param({"splits": False}, Decision("a", Reason.NO_PREFIX), {}, id="who cannot"),
        pytest.param({"role": "prefill"}, Decision("a", Reason.NO_PREFIX), {}, id="who only prefills"),
        pytest.param({}, Decision("a", Reason.NO_PREFIX, decode="b"), {}, id="a pair"),
        pytest.param({}, Decision("a", Reason.PREFIX), {"a": Match(900)}, id="little is left"),
    ],
)
def test_who_computes_alone(registered: Any, decision: Decision, matches: dict[str, Match]) -> None:
    found, channels = splitting(**registered)
    assert carried_out(found, decision, FLEET, matches, split=TERMS) is None
    assert not channels.sent


def test_what_another_one_holds_is_fetched_and_not_computed_again() -> None:
    found, channels = splitting()
    decision = Decision("a", Reason.REBALANCED)
    note = carried_out(found, decision, FLEET, {"b": Match(960)}, split=TERMS)
    assert note is not None
    assert not any(isinstance(sent, Export) and sent.compute for _, sent in channels.sent)


# -- whether ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matches", "expected"),
    [
        pytest.param({"b": Match(960)}, Fetch("b", 960), id="another one holds it"),
        pytest.param({"b": Match(960, below={Tier.DISK: 900})}, Fetch("b", 60), id="a disk that is too slow"),
        pytest.param({"b": Match(960), "a": Match(960)}, None, id="the chosen one holds as much"),
        pytest.param({"b": Match(960), "a": Match(500)}, Fetch("b", 960), id="the chosen one holds less"),
        pytest.param({}, None, id="nobody holds it"),
        pytest.param({"b": Match(2000)}, Fetch("b", 1000), id="no more than the prompt"),
    ],
)
def test_what_is_fetched(matches: dict[str, Match], expected: Fetch | None) -> None:
    decision = Decision("a", Reason.REBALANCED)
    assert wanted(fetching(), decision, FLEET, matches) == expected


def test_what_is_computed_sooner_is_not_fetched() -> None:
    found = fetching()
    # Moving anything has a fixed cost, above that of computing a token.
    assert wanted(found, Decision("a", Reason.REBALANCED), FLEET, {"b": Match(1)}) is None


def test_an_index_that_is_not_believed_names_no_source() -> None:
    fleet = (instance("a"), instance("b", trusted=False))
    assert wanted(fetching(), Decision("a", Reason.UNTRUSTED), fleet, {"b": Match(960)}) is None


def test_the_policys_word_counts() -> None:
    decision = Decision("a", Reason.FETCH, fetch=(Fetch("b", 16),))
    assert wanted(fetching(), decision, FLEET, {"b": Match(960)}) == Fetch("b", 16)


# -- telling ----------------------------------------------------------------------------------------


def test_both_instances_get_the_same_loan() -> None:
    channels = Channels()
    assert fetch_from_b(fetching(channels))
    (holder, export), (chosen, fetch) = channels.sent
    assert (holder, chosen) == ("b", "a")
    assert isinstance(export, Export)
    assert isinstance(fetch, agent_messages.Fetch)
    # And part of the next block, behind which a model with states may have one.
    assert export.tokens == fetch.tokens == KEY[: (960 + 15) * 4]
    (span,) = fetch.spans
    assert export.export == span.source.export
    assert (span.source.endpoints, span.tokens) == (("b:7",), 960)
    assert export.cache_salt == fetch.cache_salt == "salt"
    assert LEAST_WAIT_S <= fetch.wait_s <= MOST_WAIT_S


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(prompts_of(namespace=("text", None, None, None)), id="text"),
        pytest.param(prompts_of(namespace=("tokens", "adapter", None, None)), id="adapter"),
        pytest.param(prompts_of(prompts=2), id="batch"),
        pytest.param(prompts_of(bytes(MOST_KEY_BYTES + 4)), id="too long"),
    ],
)
def test_what_cannot_be_moved_is_left_alone(made: list[Encoded]) -> None:
    channels = Channels()
    decision = Decision("a", Reason.FETCH, fetch=(Fetch("b", made[0].units),))
    assert not carried_out(fetching(channels), decision, FLEET, {"b": Match(960)}, made)
    assert channels.sent == []


def test_without_an_export_sent_there_is_no_fetch() -> None:
    channels = Channels(deaf={"b"})
    note = fetch_from_b(fetching(channels))
    assert note is not None
    assert note.end == UNSENT
    assert channels.sent == []


# -- the outcome of a fetch -------------------------------------------------------------------------


def fetched(end: str = "done", tokens: int = 960, seconds: float = 0.05, id: str = "r2") -> Fetched:
    """The end of a fetch, which is named after its export."""
    return Fetched(b"e" * 16, id, False, end, (FetchedSpan(end, tokens, seconds),))


def test_what_came_of_it_is_noted_once() -> None:
    metrics = RouterMetrics()
    found = fetching(metrics=metrics)
    note = fetch_from_b(found)
    assert note is not None
    assert found.under_way == 1
    found.on_message("b", fetched())  # b was not asked to fetch
    found.on_message("a", fetched())
    found.on_message("a", fetched())
    value = metrics.registry.get_sample_value
    assert value("sglang_ext_router_fetches_ended_total", {"how": "done"}) == 1
    assert value("sglang_ext_router_fetched_tokens_total") == 960
    assert value("sglang_ext_router_fetched_spans_total", {"how": "done"}) == 1
    assert (note.end, note.moved, note.read[0].took_s) == ("done", 960, 0.05)
    assert found.under_way == 0


async def test_a_request_waits_until_its_instance_knows_of_the_fetch() -> None:
    found = fetching()
    found.least_wait_s = 60.0
    note = fetch_from_b(found)
    assert note is not None
    request = asyncio.create_task(found.acknowledged(note))
    for name, id in (("b", "r2"), ("a", "r3")):  # another instance, and another request
        found.on_message(name, Expecting(b"e" * 16, id))
        await asyncio.sleep(0)
        assert not request.done()
    found.on_message("a", Expecting(b"e" * 16, "r2"))
    await request
    assert note.end == UNDER_WAY


@pytest.mark.parametrize("how", ["fetched", "gone", "silent", "unheard"])
async def test_a_request_does_not_wait_in_vain(how: str) -> None:
    found = fetching(Channels(deaf={"a"} if how == "unheard" else set()))
    found.least_wait_s = 0.01 if how == "silent" else 60.0
    note = fetch_from_b(found)
    assert note is not None
    if how == "fetched":
        found.on_message("a", fetched())
    elif how == "gone":
        found.forget("a")
    await asyncio.wait_for(found.acknowledged(note), 30)


def test_of_who_is_gone_nothing_more_is_heard() -> None:
    found = fetching()
    note = fetch_from_b(found)
    assert note is not None
    found.forget("b")
    assert found.under_way == 1
    found.forget("a")
    assert (note.end, found.under_way) == ("gone", 0)


@pytest.mark.parametrize("end", ["late", "gone", "done"])
def test_who_takes_too_long_is_not_fetched_from_for_a_while(end: str) -> None:
    now = [0.0]
    found = fetching(now=lambda: now[0])
    decision, matches = Decision("a", Reason.REBALANCED), {"b": Match(960)}
    assert wanted(found, decision, FLEET, matches) is not None
    fetch_from_b(found, matches)
    found.on_message("a", fetched(end, seconds=3.0))
    assert wanted(found, decision, FLEET, matches) is None
    note = carried_out(found, decision, FLEET, matches)
    assert note is not None
    assert note.end == NOT_WORTH_IT
    assert note.transfer_s > note.saved_s
    now[0] = 300.0
    assert wanted(found, decision, FLEET, matches) is not None


def test_of_equal_holders_the_one_that_was_faster_is_read_from() -> None:
    channels = Channels({name: registration(name) for name in "abc"})
    found = fetching(channels)
    fleet, matches = (*FLEET, instance("c")), {"b": Match(960), "c": Match(960)}
    decision = Decision("a", Reason.REBALANCED)
    carried_out(found, FROM_B, fleet, matches)
    found.on_message("a", fetched(seconds=0.5, id="r3"))  # after an export of each
    assert wanted(found, decision, fleet, matches) == Fetch("c", 960)
    channels.sent.clear()
    assert exported(found, "a", fleet, matches)
    # And the other one is asked too, for the case that this does not come.
    assert [name for name, _ in channels.sent] == ["c", "b"]


def test_a_disk_is_read_from_while_it_is_fast_enough() -> None:
    """The instances' load times count for both, the disk and the way from there."""
    now = [0.0]
    found = fetching(now=lambda: now[0])
    costs, slow = found._costs, costs_of(found, 900)
    matches, decision = {"b": Match(960, below={Tier.DISK: 900})}, Decision("a", Reason.REBALANCED)
    costs.observe_load("b", slow, slow / 100)
    assert costs_of(found, 900) < slow / 2
    assert wanted(found, decision, FLEET, matches) == Fetch("b", 960)
    own = {**matches, "a": Match(970, below={Tier.DISK: 970})}
    assert wanted(found, decision, FLEET, own) is None, "blocks on its own disk are read there"
    note = fetch_from_b(found, matches)
    assert note is not None
    (span,) = note.read
    assert (span.tier, span.as_json()["loading_s"]) == ("disk", costs_of(found, 900))
    assert 0 < span.loading_s < span.expected_s
    found.on_message("a", fetched(seconds=30.0))
    assert costs_of(found, 900) > slow
    assert wanted(found, decision, FLEET, matches) is None
    found.forget("a")
    costs.forget("b")
    assert costs_of(found, 900) == slow


def costs_of(found: Fetching, tokens: int) -> float:
    """Expected seconds of a load from b's disk."""
    return found._costs.load_s(instance("b"), Tier.DISK, tokens)


def test_who_has_it_too_is_asked_for_the_case_that_it_does_not_come() -> None:
    channels = Channels({name: registration(name) for name in "abc"})
    found = fetching(channels)
    fleet, matches = (*FLEET, instance("c")), {"b": Match(960), "c": Match(900)}
    note = carried_out(found, FROM_B, fleet, matches)
    assert note is not None
    assert [name for name, _ in channels.sent] == ["b", "c", "a"]
    message = channels.sent[-1][1]
    assert isinstance(message, agent_messages.Fetch)
    assert [span.tokens for span in message.spans] == [960, 900]
    ends = (FetchedSpan("gone", 0, 0.1), FetchedSpan("done", 900, 0.1))
    found.on_message("a", Fetched(b"e" * 16, message.id, False, "done", ends))
    shown = note.as_json()
    assert (shown["plan"][0]["end"], shown["spare"]["from"], shown["spare"]["end"]) == ("gone", "c", "done")
    assert (note.moved, note.headers()["x-kv-fetch-source"]) == (900, "b,c")


def test_a_request_waits_longer_for_a_holder_that_computes() -> None:
    channels = Channels()
    costs = router_costs(CostModel(), lambda: 0.0, can_fetch=channels.can_fetch)
    found = Fetching(channels, costs, RouterMetrics())
    waits = []
    for prompts in (0, 1, 1000):
        with ExitStack() as queue:
            for _ in range(prompts):
                queue.enter_context(costs.sending("b", 1000, 0, streams=True))
            fetch_from_b(found)
        message = channels.sent[-1][1]
        assert isinstance(message, agent_messages.Fetch)
        waits.append(message.wait_s)
    assert waits[0] < waits[1] < waits[2] <= waits[0] + MOST_BUSY_S


# -- hints ------------------------------------------------------------------------------------------


def exported(
    found: Fetching, target: str, fleet: tuple[Instance, ...], matches: dict[str, Match]
) -> tuple[FetchSpan, ...]:
    plan = gathering_plan(1000, target, fleet, matches, found._costs)
    return found.export(plan, TOKENS, KEY, "hint")


def test_expected_requests_go_where_least_is_going_on() -> None:
    def chosen(fleet: tuple[Instance, ...], matches: dict[str, Match]) -> str:
        return balanced(Prompt(1000), fleet, matches, fetching()._costs, PolicyOptions()).instance

    matches = {"b": Match(960)}
    assert chosen((instance("a", 3), instance("b", 5)), matches) == "a"
    assert chosen((instance("a", 3), instance("b", 4)), matches) == "b", "as busy as the other"
    assert chosen((instance("a", 3), instance("b", 3)), matches) == "b"
    assert chosen((instance("a", 4), instance("b", 3)), {}) == "b", "nothing is to be moved"
    assert chosen((instance("a", 0), instance("b", 1)), matches) == "a", "nothing is going on"


def test_a_hint_names_a_source() -> None:
    channels = Channels()
    (span,) = exported(fetching(channels), "a", FLEET, {"b": Match(960)})
    assert (span.source.endpoints, span.tokens) == (("b:7",), 960)
    assert [name for name, _ in channels.sent] == ["b"]
    assert exported(fetching(channels), "b", FLEET, {"b": Match(960)}) == ()


def test_a_note_says_in_headers_what_is_known_when_the_answer_begins() -> None:
    found = fetching()
    note = fetch_from_b(found, {"b": Match(960), "a": Match(320)})
    assert note is not None
    assert note.headers()["x-kv-fetch"] == "under-way"
    found.on_message("a", fetched(tokens=640))
    assert note.headers() == {
        "x-kv-fetch": "done",
        "x-kv-fetch-source": "b",
        "x-kv-fetched-tokens": "640",
    }
    shown = note.as_json()
    assert (shown["tokens"], shown["moved_tokens"]) == (960, 640)
    plan = [(span["from"], span["tier"], span["start"], span["stop"], span["end"]) for span in shown["plan"]]
    assert plan == [
        ("a", "hbm", 0, 320, None),
        ("b", "hbm", 320, 960, "done"),
        ("compute", None, 960, 1000, None),
    ]
    assert 0 < shown["expected_transfer_s"] < shown["expected_saving_s"]
