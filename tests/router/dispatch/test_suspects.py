"""Requests that are refused because instances died while they worked on them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.cluster.broadcast import RouterChannel, RouterMessage, decode_message, encode_message
from sglang_ext.router.dispatch.suspects import (
    MAX_SUSPECTS,
    MOST_DEATHS,
    ONE_DEATH_S,
    REFUSED_S,
    Suspects,
    digest_of_request,
    ends_servers,
    with_loss,
)
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.testing.fakes import FakeClock

TARGET = "/generate"


def refused(suspects: Suspects, digest: str) -> bool:
    try:
        suspects.check(digest)
    except RequestRefused as error:
        return (error.status, error.code) == (500, "request_ends_servers")
    return False


def test_two_deaths_with_one_request_in_common_refuse_it_and_no_other() -> None:
    suspects = Suspects(RouterChannel("a router"), FakeClock())
    for instance, digests in (("one", ("x", "y")), ("two", ("x", "z"))):
        for digest in digests:
            assert not refused(suspects, digest)
            suspects.lost(digest, instance)
    assert [refused(suspects, digest) for digest in "xyz"] == [True, False, False]


def test_the_same_request_many_times_at_one_death_has_one() -> None:
    suspects = Suspects(RouterChannel("a router"), FakeClock())
    for _ in range(5):
        suspects.lost("x", "one")
    assert not refused(suspects, "x")


def test_an_instance_that_was_started_again_dies_a_second_death() -> None:
    clock = FakeClock()
    suspects = Suspects(RouterChannel("a router"), clock)
    suspects.lost("x", "one")
    clock.advance(ONE_DEATH_S + 1)
    suspects.lost("x", "one")
    assert refused(suspects, "x")


def test_a_request_is_refused_for_a_while() -> None:
    clock = FakeClock()
    suspects = Suspects(RouterChannel("a router"), clock)
    suspects.lost("x", "one")
    suspects.lost("x", "two")
    clock.advance(REFUSED_S - 1)
    assert refused(suspects, "x")
    clock.advance(1)
    assert not refused(suspects, "x")
    suspects.lost("x", "three")
    assert not refused(suspects, "x"), "earlier deaths are forgotten"


def test_an_answer_clears_a_request() -> None:
    suspects = Suspects(RouterChannel("a router"), FakeClock())
    suspects.lost("x", "one")
    suspects.answered("x")
    suspects.lost("x", "two")
    assert not refused(suspects, "x")


def test_the_oldest_of_too_many_are_dropped() -> None:
    suspects = Suspects(RouterChannel("a router"), FakeClock())
    for number in range(MAX_SUSPECTS + 5):
        suspects.lost(str(number), "one")
    assert len(suspects) == MAX_SUSPECTS


def test_routers_share_what_they_saw_and_repeating_it_changes_nothing() -> None:
    clock = FakeClock()
    channels = [RouterChannel(name) for name in ("here", "there", "later")]
    here, there, later = (Suspects(channel, clock) for channel in channels)

    def deliver(message: RouterMessage) -> None:
        for _ in range(2):
            channels[1].receive(decode_message(encode_message(message)))

    channels[0].outgoing.subscribe(deliver)
    here.lost("x", "one")
    assert not refused(there, "x")
    clock.advance(ONE_DEATH_S * 2)
    for message in there.snapshot():  # a router that was cut off is sent everything again
        channels[1].receive(message)
        channels[0].receive(message)
    assert not refused(here, "x")
    assert not refused(there, "x")
    here.lost("x", "two")
    assert refused(there, "x")
    for message in there.snapshot():
        channels[2].receive(message)
    assert refused(later, "x")


def test_requests_are_distinguished_by_tenant_path_and_body() -> None:
    requests = ((TARGET, b"1"), (TARGET, b"2"), ("/v1/completions", b"1"))
    digests = {digest_of_request("", *each) for each in requests}
    digests |= {digest_of_request("a-", *each) for each in requests}
    assert len(digests) == 6
    assert digest_of_request("", TARGET, b"1") in digests


LOSSES = st.tuples(st.sampled_from(["one", "two", "three"]), st.floats(0, 3 * REFUSED_S))


@given(losses=st.lists(LOSSES, max_size=12))
def test_as_many_deaths_as_a_plain_count(losses: list[tuple[str, float]]) -> None:
    """Against the definition: a death is a loss at an instance, and all losses there soon after it."""
    now = 0.0
    kept: list[tuple[str, float]] = []
    for instance, at in sorted(losses, key=lambda loss: loss[1]):
        now = at
        kept = with_loss(kept, (instance, at), now)
    expected = 0
    for name in ("one", "two", "three"):
        last = None
        for instance, at in sorted(losses, key=lambda loss: loss[1]):
            if instance == name and (last is None or at - last >= ONE_DEATH_S):
                last = at
                expected += now - at < REFUSED_S
    assert ends_servers(kept, now) == (expected >= MOST_DEATHS)


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_an_empty_body_has_a_digest(body: bytes) -> None:
    assert digest_of_request("", "/" * 500, body)
