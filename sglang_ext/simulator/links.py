"""Links that flows share: each flow crosses some links, and rates are max-min fair.

A flow's rate is the largest at which no other flow with a smaller or equal rate gets less (progressive
filling). Rates change when a flow begins or ends, and only of flows that share a link with it, directly or
through others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence


class SharedLink:
    """One link.

    Args:
        bytes_per_s: its capacity.
    """

    __slots__ = ("bytes_per_s", "flows", "moved", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name, self.bytes_per_s = name, bytes_per_s
        self.flows: dict[Flow, None] = {}
        self.moved = 0.0
        """Bytes that have crossed it."""

    def __repr__(self) -> str:
        return f"SharedLink({self.name}, {len(self.flows)} flows)"


class Flow:
    """Bytes on their way over some links. Made by `Network.start`."""

    __slots__ = ("_timer", "done", "left", "links", "rate", "since")

    def __init__(self, nbytes: float, links: Sequence[SharedLink], done: Callable[[], None]) -> None:
        self.left = nbytes
        self.links = tuple(links)
        self.done = done
        self.rate = 0.0
        self.since = 0.0
        self._timer: asyncio.TimerHandle | None = None


class Network:
    """All flows.

    Args:
        loop: of virtual time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        """Seconds of virtual time."""
        return self._loop.time()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Call a function after so many seconds."""
        self._loop.call_later(seconds, what)

    def start(self, nbytes: float, links: Sequence[SharedLink], done: Callable[[], None]) -> Flow:
        """Begin a flow; ``done`` is called when all of it has crossed its links."""
        flow = Flow(max(1.0, nbytes), links, done)
        flow.since = self._loop.time()
        for link in flow.links:
            link.flows[flow] = None
        self._share(_connected(flow))
        return flow

    def stop(self, flow: Flow) -> None:
        """Give a flow up, or end it. Repeating it is harmless."""
        around = _connected(flow)
        self._settle(flow)
        if flow._timer is not None:
            flow._timer.cancel()
            flow._timer = None
        for link in flow.links:
            link.flows.pop(flow, None)
        around.pop(flow, None)
        if around:
            self._share(around)

    def _ended(self, flow: Flow) -> None:
        flow._timer = None
        self.stop(flow)
        flow.done()

    def _settle(self, flow: Flow) -> None:
        """Take note of the bytes that have crossed since the last change of its rate."""
        now = self._loop.time()
        crossed = min(flow.left, flow.rate * (now - flow.since))
        flow.since = now
        flow.left -= crossed
        for link in flow.links:
            link.moved += crossed

    def _share(self, flows: dict[Flow, None]) -> None:
        """Give each of these flows its fair rate, and have it end at the right time."""
        for flow in flows:
            self._settle(flow)
        rates = fair_rates(flows)
        for flow, rate in rates.items():
            if rate == flow.rate and flow._timer is not None:
                continue
            flow.rate = rate
            if flow._timer is not None:
                flow._timer.cancel()
            flow._timer = self._loop.call_later(flow.left / rate, self._ended, flow)


def fair_rates(flows: dict[Flow, None]) -> dict[Flow, float]:
    """The max-min fair rate of each flow. Flows that share a link with one of them have to be among them."""
    rates: dict[Flow, float] = {}
    links = dict.fromkeys(link for flow in flows for link in flow.links)
    left = {link: link.bytes_per_s for link in links}
    waiting = {link: len(link.flows) for link in links}
    while len(rates) < len(flows):
        crossed = [link for link in links if waiting[link]]
        narrowest = min(crossed, key=lambda link: left[link] / waiting[link])
        rate = left[narrowest] / waiting[narrowest]
        for flow in narrowest.flows:
            if flow in rates:
                continue
            rates[flow] = rate
            for link in flow.links:
                left[link] = max(0.0, left[link] - rate)
                waiting[link] -= 1
    return rates


def _connected(flow: Flow) -> dict[Flow, None]:
    """The flows that share a link with a flow, directly or through others, and itself."""
    found: dict[Flow, None] = {flow: None}
    seen: set[SharedLink] = set()
    stack = [flow]
    for current in stack:
        for link in current.links:
            if link in seen:
                continue
            seen.add(link)
            for other in link.flows:
                if other not in found:
                    found[other] = None
                    stack.append(other)
    return found
