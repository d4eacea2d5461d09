"""How many instances should prefill and how many decode: a pure function (KVDirect, section 7).

Of each split it is asked what requests would have to expect over the time until the next change: the wait for
a prefill, and the time in which their tokens are generated.

    prefill   what waits now and what comes, against what the instances compute in that time, and the wait of
              a line with as much to do and random arrivals (Sakasegawa's approximation of M/M/c)
    decode    requests come as they do and go when they have generated; a step takes longer with each request
              that an instance generates for, and where there are no slots left they wait

Another split is worth a change when it saves more than the change costs: meanwhile one instance serves in
neither role. A wish has to be worth `START` of what requests expect now, and holds while it is worth `STOP`.
It is carried out when it has held for a while, and the last change is long enough ago: longer where it would
take that one back. So noise moves nothing, and a load at the border between two splits moves an instance ever
more seldom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from sglang_ext.router.policies.base import Role

START: Final = 0.2
"""Share of the expected seconds that a change has to save to be wished for,"""
STOP: Final = 0.1
"""and to be still wished for."""
LEAST_S: Final = 0.02
"""Seconds per request that it has to save in any case."""
BUSIEST: Final = 0.95
"""Share of time up to which a line is taken for one that does not grow; what is beyond grows."""
SLOTS_SHORT: Final = 0.1
"""Decode has no slots left when requests wait for them for this share of the time in which they generate."""
STEPS: Final = 20
"""In which the time until the next change is calculated."""
TOOK_BACK: Final = 8.0
"""A change that takes the last one back doubles the time until the next one that does, up to `MOST_DOUBLED`
times, unless the last one has lasted for so many times what it had to."""
MOST_DOUBLED: Final = 4


class RoleLoads(msgspec.Struct, frozen=True):
    """What prefill and decode have to do, over all instances of each role."""

    prefill: int
    """Instances, as of `decode`."""
    decode: int
    arrivals: float
    """Requests per second."""
    work: float
    """Seconds of prefill that arrive per second, for one instance."""
    backlog_s: float
    """Seconds of prefill that wait, for one instance."""
    running: float
    """Requests that are generated for."""
    stay_s: float
    """Seconds in which a request's tokens are generated, at an instance that generates for as many as now."""
    slots_s: float
    """Seconds that a request waits for slots at decode."""
    step_s: float
    """Of a step for one request alone, and"""
    step_more_s: float
    """what each further request adds to it; only their relation counts."""


def prefill_wait_s(loads: RoleLoads, prefill: int, horizon_s: float) -> float:
    """Mean seconds until a prefill begins, with so many instances."""
    if loads.arrivals <= 0.0:
        mean_s, steady = 0.0, 0.0
    else:
        mean_s, busy = loads.work / loads.arrivals, min(BUSIEST, loads.work / prefill)
        steady = mean_s * busy ** (math.sqrt(2 * (prefill + 1)) - 1) / (prefill * (1 - busy))
    growth = loads.work - prefill
    if growth >= 0.0:
        line = loads.backlog_s + growth * horizon_s / 2
    else:
        until = min(horizon_s, loads.backlog_s / -growth)
        line = (loads.backlog_s * until + growth * until * until / 2) / horizon_s
    return steady + line / prefill


def decode_s(loads: RoleLoads, decode: int, horizon_s: float) -> float:
    """Mean seconds from the KV at decode to the last token, with so many instances."""
    each = max(1.0, loads.running / loads.decode)
    now = _step(loads, each)
    slots = each * decode if loads.slots_s > SLOTS_SHORT * loads.stay_s else math.inf
    waiting = loads.running + loads.arrivals * loads.slots_s
    whole, span = 0.0, horizon_s / STEPS
    for _ in range(STEPS):
        active = min(waiting, slots)
        stay = loads.stay_s * _step(loads, max(1.0, active / decode)) / now
        stay *= max(1.0, waiting / active) if active > 0.0 else 1.0
        whole += stay * span
        if stay > 0.0:
            ends = loads.arrivals * stay
            waiting = ends + (waiting - ends) * math.exp(-span / stay)
    return whole / horizon_s


def _step(loads: RoleLoads, requests: float) -> float:
    return loads.step_s + loads.step_more_s * (requests - 1.0)


def expected_s(loads: RoleLoads, prefill: int, decode: int, horizon_s: float) -> float:
    """What a request has to expect besides its own prefill and transfer, with so many instances of each."""
    return prefill_wait_s(loads, prefill, horizon_s) + decode_s(loads, decode, horizon_s)


class Wish(msgspec.Struct, frozen=True):
    """What would be better, and how much."""

    role: Role | None = None
    """Which should have one instance more; None when all is well as it is."""
    gain_s: float = 0.0
    """What a request is expected to be answered sooner by, over the time until the next change, with the cost
    of this one deducted."""
    expected: Mapping[str, float] = {}
    """Expected seconds of a request by split, such as ``1P2D``; the first is the present one."""
    since: float = 0.0
    """When it came up."""
    why: str = ""
    """In words, also why nothing is wished."""


class History(msgspec.Struct, frozen=True):
    """What was wished and done before."""

    wish: Wish = Wish()
    changed: float = -math.inf
    """When an instance last changed, or failed to."""
    gained: Role | None = None
    """The role that had one instance more by it."""
    taken_back: int = 0
    """How often in a row a change took back the one before."""

    def after(self, role: Role, now: float, dwell_s: float) -> History:
        """An instance has changed to ``role``."""
        is_recent = now - self.changed < TOOK_BACK * dwell_s * 2.0**self.taken_back
        is_back = self.gained not in (None, role) and is_recent
        count = min(MOST_DOUBLED, self.taken_back + 1) if is_back else 0
        return History(changed=now, gained=role, taken_back=count)

    def failed(self, now: float) -> History:
        """The wish could not be carried out; it is wished anew after the same time as after a change."""
        return msgspec.structs.replace(self, wish=Wish(), changed=now)


def split_name(prefill: int, decode: int) -> str:
    """As people write it: ``1P2D``."""
    return f"{prefill}P{decode}D"


def wish(loads: RoleLoads, history: History, now: float, *, dwell_s: float, takes_s: float) -> Wish:
    """What would be better than the present split, if anything is.

    Args:
        dwell_s: the least time between two changes; as far ahead is looked.
        takes_s: what a change takes.
    """
    there = expected_s(loads, loads.prefill, loads.decode, dwell_s)
    expected = {split_name(loads.prefill, loads.decode): there}
    best: tuple[float, Role] | None = None
    meanwhile = min(1.0, takes_s / dwell_s)
    for role, prefill, decode in (
        (Role.PREFILL, loads.prefill + 1, loads.decode - 1),
        (Role.DECODE, loads.prefill - 1, loads.decode + 1),
    ):
        if min(prefill, decode) < 1:
            continue
        after = expected_s(loads, prefill, decode, dwell_s)
        expected[split_name(prefill, decode)] = after
        during = expected_s(loads, min(prefill, loads.prefill), min(decode, loads.decode), dwell_s)
        gain = there - (meanwhile * during + (1 - meanwhile) * after)
        share = STOP if history.wish.role is role else START
        if gain >= max(LEAST_S, share * there) and (best is None or gain > best[0]):
            best = gain, role
    if best is None:
        return Wish(None, 0.0, expected, now, "no other split saves enough")
    gain, role = best
    wait, stay = prefill_wait_s(loads, loads.prefill, dwell_s), decode_s(loads, loads.decode, dwell_s)
    why = (
        f"a request is expected to wait {wait:.2f} s for its prefill and to generate for {stay:.2f} s; one "
        f"{role} instance more saves {gain:.2f} s of that"
    )
    since = history.wish.since if history.wish.role is role else now
    return Wish(role, gain, expected, since, why)


def due_in_s(wished: Wish, history: History, now: float, *, dwell_s: float, holds_s: float) -> float:
    """Seconds until a wish is carried out if it holds; 0 when that is now.

    Args:
        holds_s: how long it has to have been wished.
    """
    dwell = dwell_s
    if history.gained not in (None, wished.role):
        dwell *= 2.0**history.taken_back
    return max(0.0, wished.since + holds_s - now, history.changed + dwell - now)


class Candidate(msgspec.Struct, frozen=True):
    """An instance that could change its role."""

    instance: str
    in_flight: int
    cached_tokens: int


def who_changes(candidates: Iterable[Candidate]) -> str | None:
    """Who has least to finish, and least that others come for; None when there is nobody."""
    found = min(
        candidates, key=lambda each: (each.in_flight, each.cached_tokens, each.instance), default=None
    )
    return None if found is None else found.instance
