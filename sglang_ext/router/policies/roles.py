"""How many instances should prefill and how many decode: a pure function (KVDirect, section 7).

Each split is scored by the expected seconds of a request until the next change: the wait for its prefill, and
the time to generate its tokens.

    prefill   the backlog and the arriving work, against the work that the instances complete in that time,
              plus the steady wait with random arrivals (Sakasegawa's approximation of M/M/c)
    decode    requests arrive at the present rate and leave when their answers are complete; a step takes
              longer with each request in an instance's batch, and requests wait when no slots are left

Another split is worth a change when it saves more than the change costs: during the change one instance
serves in neither role. A wish must save `START` of the present expected seconds to begin, and `STOP` to
continue. It is carried out when it has held for a while and the last change is long enough ago; a wish that
reverses the last change waits longer. So noise moves no instance, and a load at the border between two splits
moves one ever more seldom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from sglang_ext.router.policies.base import Role

START: Final = 0.2
"""Share of the expected seconds that a change must save for a wish to begin."""
STOP: Final = 0.1
"""Share of the expected seconds that a change must save for a wish to continue."""
LEAST_S: Final = 0.02
"""Seconds per request that a change must save in any case."""
BUSIEST: Final = 0.95
"""Utilization up to which a queue counts as steady. Load beyond it makes the queue grow."""
SLOTS_SHORT: Final = 0.1
"""Decode has no slots left when requests wait for slots for this share of their generation time."""
STEPS: Final = 20
"""Steps of the calculation over the time until the next change."""
TOOK_BACK: Final = 8.0
"""A change that reverses the last one doubles the least time until the next reversal, up to `MOST_DOUBLED`
times, unless the last change has lasted for this many times its least time."""
MOST_DOUBLED: Final = 4


class RoleLoads(msgspec.Struct, frozen=True):
    """The load of prefill and decode, over all instances of each role."""

    prefill: int
    """Number of instances, like `decode`."""
    decode: int
    arrivals: float
    """Requests per second."""
    work: float
    """Prefill work that arrives per second, in seconds of one instance."""
    backlog_s: float
    """Prefill work that is queued, in seconds of one instance."""
    running: float
    """Requests in decode."""
    stay_s: float
    """Seconds to generate a request's tokens at the present batch size."""
    slots_s: float
    """Seconds that a request waits for slots at decode."""
    step_s: float
    """Seconds of a decode step with one request. Only its ratio to `step_more_s` counts."""
    step_more_s: float
    """Seconds that each further request adds to a step."""


def prefill_wait_s(loads: RoleLoads, prefill: int, horizon_s: float) -> float:
    """Mean seconds until a prefill begins, with ``prefill`` instances."""
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
    """Mean seconds from the arrival of the KV at decode to the last token, with ``decode`` instances."""
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
    """Expected seconds of a request besides its own prefill and transfer, with so many instances of each."""
    return prefill_wait_s(loads, prefill, horizon_s) + decode_s(loads, decode, horizon_s)


class Wish(msgspec.Struct, frozen=True):
    """The better split, if there is one, and its gain."""

    role: Role | None = None
    """The role that should have one instance more; None to keep the present split."""
    gain_s: float = 0.0
    """Expected seconds saved per request over the time until the next change, less the cost of this one."""
    expected: Mapping[str, float] = {}
    """Expected seconds of a request by split, such as ``1P2D``; the first is the present one."""
    since: float = 0.0
    """When the wish began."""
    why: str = ""
    """The reason in words, also for no wish."""


class History(msgspec.Struct, frozen=True):
    """The last wish and the last changes."""

    wish: Wish = Wish()
    changed: float = -math.inf
    """When an instance last changed its role, or failed to."""
    gained: Role | None = None
    """The role that gained an instance by the last change."""
    taken_back: int = 0
    """Changes in a row that each reversed the one before."""

    def after(self, role: Role, now: float, dwell_s: float) -> History:
        """The history after an instance has changed to ``role``."""
        is_recent = now - self.changed < TOOK_BACK * dwell_s * 2.0**self.taken_back
        is_back = self.gained not in (None, role) and is_recent
        count = min(MOST_DOUBLED, self.taken_back + 1) if is_back else 0
        return History(changed=now, gained=role, taken_back=count)

    def failed(self, now: float) -> History:
        """The history after a wish that could not be carried out. The next change waits as after a change."""
        return msgspec.structs.replace(self, wish=Wish(), changed=now)


def split_name(prefill: int, decode: int) -> str:
    """The usual short form of a split: ``1P2D``."""
    return f"{prefill}P{decode}D"


def wish(loads: RoleLoads, history: History, now: float, *, dwell_s: float, takes_s: float) -> Wish:
    """The wish for a better split than the present one, if there is one.

    Args:
        dwell_s: the least time between two changes, which is also the horizon of the calculation.
        takes_s: the duration of a change.
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
    """Seconds until a wish is carried out if it continues; 0 when it is due now.

    Args:
        holds_s: the least age of a wish.
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
    """The candidate with the fewest requests to finish, then the least cached KV; None without candidates."""
    found = min(
        candidates, key=lambda each: (each.in_flight, each.cached_tokens, each.instance), default=None
    )
    return None if found is None else found.instance
