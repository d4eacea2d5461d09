"""Links that flows share: max-min fair rates, and the times at which flows end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.errors import InternalError
from sglang_ext.simulator.links import Flow, Network, SharedLink, fair_rates
from sglang_ext.simulator.virtual_time import VirtualClock, VirtualLoop


def rates_of(capacities: list[int], crossings: list[frozenset[int]]) -> tuple[list[SharedLink], list[Flow]]:
    links = [SharedLink(str(number), float(capacity)) for number, capacity in enumerate(capacities)]
    flows = [Flow(1.0, [links[at] for at in sorted(crossing)], lambda: None) for crossing in crossings]
    for flow in flows:
        for link in flow.links:
            link.flows[flow] = None
    for flow, rate in fair_rates(dict.fromkeys(flows)).items():
        flow.rate = rate
    return links, flows


def is_fair(links: list[SharedLink], flows: list[Flow]) -> bool:
    """Max-min fairness by its definition: no link is overfull, and each flow crosses a full link on which no
    other flow is faster."""
    used = {link: sum(flow.rate for flow in link.flows) for link in links}
    if any(used[link] > link.bytes_per_s * (1 + 1e-9) for link in links):
        return False
    return all(
        any(
            used[link] >= link.bytes_per_s * (1 - 1e-9)
            and all(other.rate <= flow.rate * (1 + 1e-9) for other in link.flows)
            for link in flow.links
        )
        for flow in flows
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rates_are_max_min_fair(data: st.DataObject) -> None:
    capacities = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    crossing = st.frozensets(st.integers(0, len(capacities) - 1), min_size=1, max_size=3)
    links, flows = rates_of(capacities, data.draw(st.lists(crossing, min_size=1, max_size=8)))
    assert is_fair(links, flows)
    flows[0].rate *= 1.01
    assert not is_fair(links, flows), "the check sees a rate that is not"


def test_flows_slow_each_other_down_and_go_faster_when_one_has_ended() -> None:
    loop = VirtualLoop()
    network = Network(loop)
    out, there, other = (SharedLink(name, 100.0) for name in ("out", "there", "other"))
    ended: list[tuple[str, float]] = []

    def note(name: str):
        return lambda: ended.append((name, round(loop.time(), 6)))

    network.start(100, [out, there], note("short"))
    network.start(200, [out, other], note("long"))
    stopped = network.start(1e9, [other], note("never"))
    loop.call_later(1.0, network.stop, stopped)
    loop.call_later(10.0, loop.stop)
    loop.run_forever()
    loop.close()
    # Until 2 s both have 50 bytes/s of `out`, and the long one the half of `other` until 1 s, the same.
    assert ended == [("short", 2.0), ("long", 3.0)]
    assert out.moved == pytest.approx(300)
    assert not out.flows


def test_a_loop_without_a_timer_says_that_it_would_wait_forever() -> None:
    loop = VirtualLoop()
    with pytest.raises(InternalError, match="no timer"):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_a_wait_that_rounding_would_end_at_once_brings_its_end_nearer() -> None:
    """A caller that waits until a moment would wait for the last part of it again and again."""
    loop = VirtualLoop()
    clock = VirtualClock(loop)

    async def wait() -> float:
        await clock.sleep(1e6)
        before = clock.monotonic()
        await clock.sleep(1e-15)
        return clock.monotonic() - before

    try:
        assert 0.0 < loop.run_until_complete(wait()) < 1e-9
    finally:
        loop.close()
