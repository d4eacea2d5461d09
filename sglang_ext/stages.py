"""How long a request spent in each stage (KVDirect, sections 2 and 5.2.3), on one instance or over several.

Every number is a duration by one process's clock; times of two hosts are never compared. The durations
that an instance measured travel with the KV (`engine/pd/messages.Ready`) or with the state of a request that
moves (`protocol/agent.Resume`), and the next instance adds its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e7)]

DETAIL_PREFIX: Final = "stage_"
"""Of the names under which an answer's ``cached_tokens_details`` tell stages, in whole microseconds."""


class StageTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds in each stage. One after the other, so that their sum is the time at the instances."""

    prefill_queue: Seconds = 0.0
    """From the request to its first forward pass; with push, decode's wait for slots is in it."""
    prefill: Seconds = 0.0
    transfer: Seconds = 0.0
    """From the end of prefill until decode has the KV: both sides' messages, and the bytes. Where KV is sent
    while it is computed, only the time after the end of prefill."""
    decode_queue: Seconds = 0.0
    """Decode's wait for slots (pull), and from the KV to decode's first forward pass."""
    decode: Seconds = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[float, ...]:
        return (self.prefill_queue, self.prefill, self.transfer, self.decode_queue, self.decode)

    def items(self) -> tuple[tuple[str, float], ...]:
        """(stage, seconds), in the order in which a request passes them."""
        return tuple(zip(STAGES, self.values(), strict=True))

    @property
    def total(self) -> float:
        return sum(self.values())

    def details(self) -> dict[str, int | str]:
        """As entries of ``cached_tokens_details``, which may have whole numbers and texts."""
        return {f"{DETAIL_PREFIX}{stage}_us": round(seconds * 1e6) for stage, seconds in self.items()}

    @classmethod
    def of_details(cls, details: Mapping[str, Any]) -> StageTimes | None:
        """The stages in an answer's details; None where there are none. ``details`` may be any JSON
        object.
        """
        found = [details.get(f"{DETAIL_PREFIX}{stage}_us") for stage in STAGES]
        if not all(type(value) is int and 0 <= value < 1e13 for value in found):
            return None
        return cls(*(value / 1e6 for value in found))  # type: ignore[operator]


STAGES: Final = StageTimes.__struct_fields__
NO_STAGES: Final = StageTimes()


@dataclass(slots=True)
class Handed:
    """Times, at decode, of a request whose KV came from another instance. came: when, by the scheduler's
    clock.

    before: the stages that the other side reported. waited: for slots, after the KV could be read. read:
    seconds that reading took; 0 where the other side wrote.
    """

    came: float
    before: StageTimes = NO_STAGES
    waited: float = 0.0
    read: float = 0.0


@dataclass(frozen=True, slots=True)
class Moments:
    """When a request was where, by its scheduler's clock; 0 where it has not been.

    received: by the scheduler. forwarded: its first forward pass began. prefilled: its prompt was computed.
    """

    received: float
    forwarded: float = 0.0
    prefilled: float = 0.0


def computed(at: Moments, now: float, *, hands_over: bool) -> StageTimes:
    """The stages of an instance that computed the prompt itself.

    Args:
        now: when the request ended, by the same clock.
        hands_over: the transfer to another instance follows, instead of decoding.
    """
    forwarded = at.forwarded or now
    prefilled = max(forwarded, at.prefilled or now)
    queue, prefill, rest = forwarded - at.received, prefilled - forwarded, now - prefilled
    return _times(queue, prefill, rest, 0.0, 0.0) if hands_over else _times(queue, prefill, 0.0, 0.0, rest)


def received(at: Moments, now: float, handed: Handed | None) -> StageTimes:
    """The stages of an instance that got the KV from another, without those that the other one reported.

    The other instance may have begun before or after the request arrived here, so its stages may overlap the
    wait here by an unknown part; the rest of the wait counts as transfer.

    Args:
        now: when the request ended, by the same clock.
        handed: None when the KV has not come.
    """
    if handed is None:
        return _times(0.0, 0.0, now - at.received, 0.0, 0.0)
    wait = handed.came - at.received - handed.waited - handed.before.total
    forwarded = max(handed.came, at.forwarded or now)
    queue = handed.waited + forwarded - handed.came
    return _times(0.0, 0.0, max(handed.read, wait), queue, now - forwarded)


def _times(*seconds: float) -> StageTimes:
    return StageTimes(*(max(0.0, each) for each in seconds))
