"""Pauses between turns: forecasts from past pauses, and the memory that these take."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.clients.pauses import LONGEST_S, USER, Pauses, Quantiles, Turned

BASH = Turned("tenant", "claude-cli", "one", "Bash")


def taught(turned: Turned, *seconds: float) -> Pauses:
    pauses = Pauses()
    for each in seconds:
        pauses.learn(turned, each)
    return pauses


def test_nothing_is_forecast_from_a_few_pauses() -> None:
    assert taught(BASH, 1, 2, 3).forecast(BASH) is None


def test_a_sessions_own_pauses_come_before_those_of_its_client() -> None:
    pauses = taught(BASH, *[10.0] * 8)
    other = replace(BASH, session="two")
    for _ in range(8):
        pauses.learn(other, 2.0)
    found = pauses.forecast(other)
    assert found is not None
    assert (found.basis, found.earliest_s, found.latest_s) == ("session", 2.0, 2.0)
    third = pauses.forecast(replace(BASH, session="three"))
    assert third is not None
    assert (third.basis, third.earliest_s, third.latest_s, third.pauses) == ("tool", 2.0, 10.0, 16)


def test_a_tool_that_was_not_seen_is_forecast_from_the_clients_other_tools() -> None:
    pauses = taught(BASH, *[3.0] * 8)
    found = pauses.forecast(replace(BASH, session="two", tool="WebFetch"))
    assert found is not None
    assert found.basis == "client"
    assert pauses.forecast(replace(BASH, tool=USER)) is None, "a user is no tool"
    assert pauses.forecast(replace(BASH, client="codex", session="two")) is None


def test_tenants_learn_nothing_from_each_other() -> None:
    assert taught(BASH, *[3.0] * 8).forecast(replace(BASH, tenant="other")) is None


def test_one_very_long_pause_moves_no_forecast() -> None:
    found = taught(BASH, *[3.0] * 30, 50_000.0).forecast(BASH)
    assert found is not None
    assert (found.earliest_s, found.latest_s) == (3.0, 3.0)


def test_new_pauses_take_the_place_of_old_ones() -> None:
    found = taught(BASH, *[3.0] * 64, *[9.0] * 64).forecast(BASH)
    assert found is not None
    assert (found.earliest_s, found.pauses) == (9.0, 64)


def test_kv_leaves_hbm_for_pauses_that_are_known_well_only() -> None:
    known, vague = taught(BASH, *[10.0] * 8).forecast(BASH), taught(BASH, *[1.0, 20.0] * 8).forecast(BASH)
    assert known is not None
    assert vague is not None
    assert known.away_s(1.0) == 10.0
    assert known.away_s(10.0) == 0.0, "it takes as long to bring it back"
    assert vague.away_s(0.1) == 0.0


@given(
    st.lists(st.floats(-1, 2 * LONGEST_S, width=32), min_size=6, max_size=100),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_forecast_lies_within_the_newest_pauses(seconds: list[float], one: float, two: float) -> None:
    low, high = sorted((one, two))
    pauses = Pauses(quantiles=Quantiles(low, high))
    for each in seconds:
        pauses.learn(BASH, each)
    found = pauses.forecast(BASH)
    assert found is not None
    newest = [min(max(0.0, each), LONGEST_S) for each in seconds[-64:]]
    assert min(newest) <= found.earliest_s <= found.latest_s <= max(newest)


@given(st.lists(st.tuples(st.text(max_size=200), st.text(max_size=200), st.text(max_size=200))))
def test_memory_is_bounded_whatever_names_clients_send(names: list[tuple[str, str, str]]) -> None:
    pauses = Pauses(max_bytes=8192)
    for client, session, tool in names:
        pauses.learn(Turned("tenant", client, session, tool), 1.0)
        assert pauses.size_bytes <= 8192
