"""What a policy is: a pure function of (request, fleet, matches, costs) to a decision with its reasons.

Policies do no I/O, keep no state and read no clock; everything they may look at is in their arguments,
so that they run unchanged in tests and in a simulator.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from sglang_ext.tiers import Tier, all_tiers


class Prompt(msgspec.Struct, frozen=True):
    """What a policy may know of the request."""

    tokens: int
    """Length of the prompt (of all prompts of a batch together), in the unit of the matches: tokens,
    or 4-byte units of text when there is no tokenizer. 0 when nothing is known."""
    session: str | None = None
    """What the client names its session by (header, body field or cookie)."""
    priority: int = 0
    """Larger goes first."""
    request_id: str = ""
    """What the request is logged under; what is drawn at random is drawn from it."""


class Role(enum.StrEnum):
    """What an instance does of a request."""

    COLOCATED = "colocated"
    PREFILL = "prefill"
    DECODE = "decode"


class Instance(msgspec.Struct, frozen=True):
    """One instance that can take the request."""

    name: str
    in_flight: int
    """Requests sent to it that are not answered to the end."""
    queued_tokens: int
    """Prompt tokens sent to it that it has to compute first: of requests without a first byte."""
    cached_tokens: int
    """Size of what the index believes it holds."""
    last_picked: int
    """Number of the decision that chose it last; 0 for never."""
    role: Role = Role.COLOCATED
    trusted: bool = True
    """Whether the index of it is believed. What is not believed does not attract: load decides."""
    awaited: bool = False
    """Its snapshot is not in yet: what it has told so far is believed, and it may hold more."""
    handover: str = ""
    """Of a prefill or decode instance: what both halves of a pair have alike; empty when it is not known. Of
    those that differ no pair is made (``questions.decoders_for``)."""


Fleet: TypeAlias = tuple[Instance, ...]
"""The instances that can take the request; never empty."""


class WholeFleet(tuple[Instance, ...]):
    """A fleet with the answers to what every request asks of all of it (``questions``), which may be a
    thousand instances. What is made of a part of it is an ordinary tuple."""

    colocated: bool
    """Every instance does all of a request."""
    trusted: bool
    """The index of every instance is believed."""
    awaited: bool
    """More is to come of what any of them holds."""
    least: Instance
    """The least loaded, by ``questions.load_of``."""
    most_in_flight: int
    places: dict[str, int]
    """Where an instance of that name is."""

    def __new__(
        cls,
        instances: Iterable[Instance],
        colocated: bool,
        trusted: bool,
        awaited: bool,
        least: Instance,
        most_in_flight: int,
        places: dict[str, int],
    ) -> WholeFleet:
        self = tuple.__new__(cls, instances)
        self.colocated, self.trusted, self.awaited = colocated, trusted, awaited
        self.least, self.most_in_flight, self.places = least, most_in_flight, places
        return self


class Match(msgspec.Struct, frozen=True):
    """What an instance is believed to hold of the prompt."""

    tokens: int
    """Its leading tokens."""
    own: bool = False
    """It ends where something held ends: the request goes on from an earlier one, or repeats it. Otherwise
    it parts from others in mid-way, as new conversations do that begin with one system prompt."""
    below: Mapping[Tier, int] = {}
    """How many of ``tokens`` are in each tier below HBM and in no nearer one, nearest first; tiers with none
    may be left out."""

    @property
    def hbm(self) -> int:
        """How many of ``tokens`` are in HBM."""
        return self.tokens - sum(self.below.values())

    @property
    def in_memory(self) -> int:
        """How many of ``tokens`` are in memory: those that another instance can be sent."""
        if not self.below:
            return self.tokens
        return self.tokens - sum(count for tier, count in self.below.items() if not tier.in_memory)

    def by_tier(self) -> dict[Tier, int]:
        """How many of ``tokens`` are in each tier that there is, nearest first."""
        return {tier: self.below.get(tier, 0) if tier.level else self.hbm for tier in all_tiers()}


NOTHING = Match(0)
"""Of an instance that holds nothing."""

Matches: TypeAlias = Mapping[str, Match]
"""By instance name; those that hold nothing may be left out."""


class Reason(enum.StrEnum):
    """Why an instance was chosen; a label of metrics and the value of ``x-kv-route-reason``."""

    PREFIX = "prefix"
    """It alone holds the longest prefix."""
    PREFIX_SHARED = "prefix-shared"
    """Several hold the longest prefix; it is the least loaded of them."""
    SPREAD = "spread"
    """The longest prefix is a common beginning, and whoever holds it caches much more than others."""
    REBALANCED = "rebalanced"
    """Whoever holds the longest prefix is too far ahead in load."""
    SHORT_PREFIX = "short-prefix"
    """What is cached is too small a part of the prompt to decide."""
    NO_PREFIX = "no-prefix"
    """Nobody holds any of it."""
    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    SESSION = "session"
    """The session's own instance."""
    NO_SESSION = "no-session"
    """The request names no session; it is the least loaded instance."""
    FETCH = "fetch"
    """Another instance holds more of it, and sending that takes less time than computing it."""
    ADVISED = "advised"
    """A hint announced the request, and its KV was brought there."""
    UNTRUSTED = "untrusted"
    """No index that is believed knows any of it, and some are not believed: load decides."""
    INDEX_AWAITED = "index-awaited"
    """Nobody is known to hold enough of it to decide, and the snapshot of an instance that may is not in yet:
    load decides."""
    POLICY_FAILED = "policy-failed"
    """The policy raised an error, or its decision made no sense; it is the least loaded instance."""


class Fetch(msgspec.Struct, frozen=True):
    """KV that another instance holds, worth moving: one span of a prompt. It begins where the fetch before it
    ends; the first, where what the chosen instance has in memory ends."""

    source: str
    tokens: int
    """Where it ends: leading tokens of the prompt, all of which ``source`` holds."""


class Decision(msgspec.Struct, frozen=True):
    """An instance and why."""

    instance: str
    """With prefill and decode apart: the one that prefills."""
    reason: Reason
    """A policy of one's own has only these words to choose from: they are a label of metrics."""
    matched: int = 0
    """Tokens of the prompt the chosen instance is believed to hold."""
    scores: Mapping[str, float] = {}
    """What was compared, by instance; larger is better. Who has nothing of it may be left out."""
    decode: str | None = None
    """The instance that decodes, where it is another one."""
    fetch: tuple[Fetch, ...] = ()
    """What ``instance`` should have others send instead of computing it, span by span (MemServe, equation
    2)."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Thresholds; see the policies that use them."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5
    balance_cache_factor: float = 4.0
    tie_tokens: int = 16
    queue_weight: float = 1.0
    """What a second of waiting for the prompts before it counts; see ``cost``."""
    exec_weight: float = 1.5
    """What a second of computing counts; see ``cost``."""
    expected_output: int = 128
    """Tokens of an answer, for what a decode instance's load means to it."""


class Costs(Protocol):
    """What things are expected to take, in seconds (``router/dispatch/costs.py``; MemServe, section 5.3).

    Whoever implements it guarantees that no answer is negative or NaN, that an infinite one means "not
    possible", and that computing more tokens, or after a longer context, never takes less time.
    """

    @property
    def calibrated(self) -> bool:
        """Whether they come from measurements of this model and device, not from defaults."""

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        """To compute ``new_tokens`` of a prompt behind ``context_tokens`` whose KV is in HBM."""

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        """To bring the KV of ``tokens`` from a tier of the instance's own to its HBM."""

    def transfer_s(self, source: Instance, target: Instance, tokens: int) -> float:
        """To bring the KV of ``tokens`` from another instance; infinite where that cannot be done."""

    def queue_s(self, instance: Instance) -> float:
        """Until the instance begins with a prompt that is sent to it now."""

    def decode_s(self, instance: Instance) -> float:
        """One step of generation with one request more than the instance generates for now."""


Policy: TypeAlias = Callable[[Prompt, Fleet, Matches, Costs, PolicyOptions], Decision]
