"""The types of a policy: a pure function from (request, fleet, matches, costs) to a decision with its reason.

Policies do no I/O, keep no state and read no clock. All their input is in their arguments, so that they run
unchanged in tests and in a simulator.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import msgspec

from sglang_ext.router.policies.outlook import Numbers, Outlook
from sglang_ext.router.policies.plan import Pricing
from sglang_ext.tiers import Tier, all_tiers


class Prompt(msgspec.Struct, frozen=True):
    """The request, as far as policies see it."""

    tokens: int
    """Length of the prompt (of all prompts of a batch together), in the unit of the matches: tokens,
    or 4-byte units of text when there is no tokenizer. 0 when the length is unknown."""
    session: str | None = None
    """The client's session name (from a header, body field or cookie)."""
    priority: int = 0
    """Larger goes first."""
    request_id: str = ""
    """The request's id in the log, and the seed of random choices."""
    movable: bool = True
    """Whether instances can send each other its KV: it is one prompt of known tokens without an adapter."""


class Role(enum.StrEnum):
    """The part of a request's work that an instance does."""

    COLOCATED = "colocated"
    PREFILL = "prefill"
    DECODE = "decode"


class Instance(msgspec.Struct, frozen=True):
    """One instance that can take the request."""

    name: str
    in_flight: int
    """Requests sent to it whose answers are incomplete."""
    queued_tokens: int
    """Prompt tokens of its requests that have not returned a first byte: it computes these first."""
    cached_tokens: int
    """Tokens that it holds according to the index."""
    last_picked: int
    """Number of the last decision that chose it; 0 for never."""
    role: Role = Role.COLOCATED
    trusted: bool = True
    """Whether its index is trusted. Matches of an untrusted index do not count: load decides."""
    awaited: bool = False
    """Its snapshot has not arrived: the index trusts its events so far, and it may hold more."""
    handover: str = ""
    """Compatibility key of a prefill or decode instance; empty when unknown. Instances whose keys do not fit
    are never paired (``fleet_queries.decoders_for``)."""

    @property
    def fill(self) -> int:
        """``cached_tokens`` to four binary digits: instances with full memory differ by some blocks, which is
        no reason to choose one of them."""
        digits = max(0, self.cached_tokens.bit_length() - 4)
        return (self.cached_tokens + (1 << digits >> 1)) >> digits << digits


CACHED: Final = 4
"""Row of ``cached_tokens`` in ``WholeFleet.counts``."""
Fleet: TypeAlias = tuple[Instance, ...]
"""The instances that can take the request; never empty."""


class WholeFleet(tuple[Instance, ...]):
    """A fleet with cached answers to the questions that each request asks about all instances
    (``fleet_queries``), of which there may be a thousand. A part of it is an ordinary tuple."""

    colocated: bool
    """Every instance does all of a request."""
    trusted: bool
    """The index of every instance is trusted."""
    awaited: bool
    """The snapshot of at least one instance has not arrived."""
    least: Instance
    """The least loaded, by ``fleet_queries.load_of``."""
    most_in_flight: int
    places: dict[str, int]
    """Position of each instance, by name."""
    by_load: list[tuple[int, int, int, int, str]]
    """``fleet_queries.load_of`` of each instance, the least loaded first; holds as long as ``counts``."""
    counts: Numbers
    """``in_flight``, ``queued_tokens``, ``fill``, ``last_picked`` and ``cached_tokens`` of each instance:
    integers, shape (5, n), the first four in the order of ``fleet_queries.load_of``. They follow the
    instances, so they hold while one decision is made."""

    def __new__(
        cls,
        instances: Iterable[Instance],
        colocated: bool,
        trusted: bool,
        awaited: bool,
        least: Instance,
        most_in_flight: int,
        places: dict[str, int],
        by_load: list[tuple[int, int, int, int, str]],
        counts: Numbers,
    ) -> WholeFleet:
        self = tuple.__new__(cls, instances)
        self.colocated, self.trusted, self.awaited = colocated, trusted, awaited
        self.least, self.most_in_flight, self.places = least, most_in_flight, places
        self.by_load, self.counts = by_load, counts
        return self


class Match(msgspec.Struct, frozen=True):
    """The part of the prompt that an instance holds according to the index."""

    tokens: int
    """Leading tokens of the prompt."""
    own: bool = False
    """The match ends where a held prompt ends: the request continues or repeats an earlier one. Otherwise it
    ends in the middle of held prompts, as for a new conversation with a shared system prompt."""
    below: Mapping[Tier, int] = {}
    """How many of ``tokens`` are in each tier below HBM and in no nearer one, nearest tier first; tiers with
    no tokens may be left out."""

    @property
    def hbm(self) -> int:
        """How many of ``tokens`` are in HBM."""
        return self.tokens - sum(self.below.values())

    @property
    def in_memory(self) -> int:
        """How many of ``tokens`` are in memory, from where another instance can read them."""
        if not self.below:
            return self.tokens
        return self.tokens - sum(count for tier, count in self.below.items() if not tier.in_memory)

    def by_tier(self) -> dict[Tier, int]:
        """How many of ``tokens`` are in each existing tier, nearest first."""
        return {tier: self.below.get(tier, 0) if tier.level else self.hbm for tier in all_tiers()}


NOTHING = Match(0)
"""The match of an instance that holds no token of the prompt."""

Matches: TypeAlias = Mapping[str, Match]
"""By instance name; instances without a match may be left out."""


class Reason(enum.StrEnum):
    """Why an instance was chosen; a label of metrics and the value of ``x-kv-route-reason``."""

    PREFIX = "prefix"
    """Only the chosen instance holds the longest prefix."""
    PREFIX_SHARED = "prefix-shared"
    """Several instances hold the longest prefix; the least loaded of them is chosen."""
    SPREAD = "spread"
    """The longest prefix is a common beginning, and its holders cache much more than other instances."""
    REBALANCED = "rebalanced"
    """The holders of the longest prefix are too far ahead in load."""
    SHORT_PREFIX = "short-prefix"
    """The longest prefix is too small a part of the prompt to decide."""
    NO_PREFIX = "no-prefix"
    """No instance holds any of the prompt."""
    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    SESSION = "session"
    """The session's own instance."""
    NO_SESSION = "no-session"
    """The request names no session; the least loaded instance is chosen."""
    FETCH = "fetch"
    """Another instance holds more of the prompt, and transferring its KV is faster than computing it."""
    ADVISED = "advised"
    """A hint announced the request, and its KV was prefetched to the chosen instance."""
    UNTRUSTED = "untrusted"
    """No trusted index has a match, and some indexes are untrusted: load decides."""
    INDEX_AWAITED = "index-awaited"
    """No match is long enough to decide, and the snapshot of an instance has not arrived: load decides."""
    POLICY_FAILED = "policy-failed"
    """The policy raised an error, or its decision was invalid; the least loaded instance is chosen."""


class Fetch(msgspec.Struct, frozen=True):
    """One span of a prompt whose KV is to be fetched from another instance. A span begins at the end of the
    fetch before it; the first, at the end of the chosen instance's match in memory."""

    source: str
    tokens: int
    """End of the span, in leading tokens of the prompt; ``source`` holds all of them."""


class Decision(msgspec.Struct, frozen=True):
    """The chosen instance and the reason."""

    instance: str
    """With PD disaggregation: the prefill instance."""
    reason: Reason
    """A label of metrics, so custom policies must use one of these values, too."""
    matched: int = 0
    """Tokens of the prompt that the chosen instance holds according to the index."""
    scores: Mapping[str, float] = {}
    """The compared scores, by instance; larger is better. Instances without a score may be left out."""
    decode: str | None = None
    """The decode instance, if it differs from ``instance``."""
    fetch: tuple[Fetch, ...] = ()
    """Spans that ``instance`` fetches from other instances instead of computing them (MemServe, equation
    2)."""
    pricing: Pricing | None = None
    """The price at ``instance``, if the policy has calculated it. It saves calculating it again."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Thresholds; see the policies that use them."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5
    balance_cache_factor: float = 4.0
    tie_tokens: int = 16
    queue_weight: float = 1.0
    """Weight of a second of queueing behind earlier prompts; see ``cost``."""
    exec_weight: float = 1.5
    """Weight of a second of computing; see ``cost``."""
    expected_output: int = 128
    """Expected tokens of an answer: turns a decode instance's seconds per step into seconds per request."""


class Costs(Protocol):
    """Expected durations in seconds (``router/placing/costs.py``; MemServe, section 5.3).

    Implementations guarantee that no result is negative or NaN, that infinity means "not possible", and that
    more new tokens or a longer context never take less time. A transfer takes the same time to every instance
    that can receive it, and the transfers of two sources differ by a factor.
    """

    @property
    def calibrated(self) -> bool:
        """Whether the costs come from measurements of this model and device, not from defaults."""

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        """Time to compute ``new_tokens`` of a prompt behind ``context_tokens`` whose KV is in HBM."""

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        """Time to load the KV of ``tokens`` from one of the instance's own tiers into its HBM."""

    def transfer_s(self, source: Instance, target: Instance, tokens: int) -> float:
        """Time to transfer the KV of ``tokens`` from another instance; infinite if that is impossible."""

    def queue_s(self, instance: Instance) -> float:
        """Time until the instance begins with a prompt that is sent to it now."""

    def decode_s(self, instance: Instance) -> float:
        """Time of one decode step with one request more than the instance's present batch."""

    def outlook(self, fleet: Fleet) -> Outlook:
        """The terms of these durations at every instance of a fleet, as arrays."""


Policy: TypeAlias = Callable[[Prompt, Fleet, Matches, Costs, PolicyOptions], Decision]
