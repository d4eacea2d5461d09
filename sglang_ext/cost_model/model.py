"""What the router and the engine ask: exec(x, y), transfer(y, y'), load(tier, bytes), and where they meet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from sglang_ext.cost_model.operators import Link
from sglang_ext.cost_model.profile import Decode, Profile
from sglang_ext.keys import Tier


class Execution(Protocol):
    """exec(x, y), at whichever level."""

    def seconds(self, new: int, context: int) -> float:
        """To the first token of a prompt of ``context + new`` tokens of which ``context`` are in HBM."""


class DefaultExecution:
    """For models and devices that nobody has measured: an order of magnitude, which the router corrects by
    the times to first token that it sees.

    10,000 tokens/s and 20 ms; each token of context adds 1/50,000 of that, so that a prompt of 50,000 tokens
    takes 1.5 times what its linear layers do. That is about an 8B model on one mid-range GPU.
    """

    FIXED_S = 0.02
    PER_TOKEN_S = 1e-4
    PER_PAIR_S = 1e-4 / 50_000

    def seconds(self, new: int, context: int) -> float:
        return self.FIXED_S + self.PER_TOKEN_S * new + self.PER_PAIR_S * new * (context + new / 2)


REMEMBERED = 4096
"""Results of exec that are kept; one takes some 10 µs at the operator level."""
DEFAULT_KV_BYTES = 128 * 1024
"""Of a token: 32 layers, 8 KV heads of 128, 2 bytes."""
DEFAULT_TIERS = {
    Tier.DRAM: Link(fixed_s=1e-3, per_byte_s=1 / 10e9),
    Tier.DISK: Link(fixed_s=2e-3, per_byte_s=1 / 2e9),
}
DEFAULT_TRANSFER = Link(fixed_s=2e-3, per_byte_s=1 / 5e9)
DEFAULT_DECODE = Decode(fixed_s=0.01, per_request_s=2e-4)


class CostModel:
    """Costs of one model on one device, in seconds.

    Args:
        profile: what was measured; without it, defaults.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self.profile = profile
        self.execution: Execution = DefaultExecution() if profile is None else profile.level
        self.kv_bytes_per_token = DEFAULT_KV_BYTES if profile is None else profile.kv_bytes_per_token
        self._tiers = dict(DEFAULT_TIERS)
        if profile is not None:
            self._tiers |= {Tier[name.upper()]: link for name, link in profile.tiers.items()}
        self._transfer = (profile and profile.transfer) or DEFAULT_TRANSFER
        self._decode = (profile and profile.decode) or DEFAULT_DECODE
        # A router asks of every instance, most of which hold the same of a prompt: nothing.
        self._seconds = functools.lru_cache(maxsize=REMEMBERED)(self.execution.seconds)

    @property
    def calibrated(self) -> bool:
        """Whether it was measured."""
        return self.profile is not None

    def exec_s(self, new: int, context: int) -> float:
        """exec(x, y): to prefill a prompt of which ``context`` leading tokens are in HBM and ``new`` are not.

        At least one token is always computed: the last one's logits are the answer's beginning.
        """
        return self._seconds(max(1, new), max(0, context))

    def load_s(self, tier: Tier, nbytes: float) -> float:
        """load(tier, bytes): from a tier of the instance's own to HBM."""
        return 0.0 if tier is Tier.HBM else self._tiers[tier].seconds(nbytes)

    def load_tokens_s(self, tier: Tier, tokens: int) -> float:
        """The same in tokens."""
        return self.load_s(tier, float(tokens) * self.kv_bytes_per_token)

    def transfer_s(self, tokens: int) -> float:
        """transfer(y, y'): the KV of ``tokens`` = x·(y' - y) from another instance."""
        return self._transfer.seconds(float(tokens) * self.kv_bytes_per_token)

    def decode_s(self, requests: int) -> float:
        """One step of generation of so many requests."""
        return self._decode.seconds(requests)

    def worth_loading(self, tier: Tier, tokens: int, new: int, context: int) -> bool:
        """Whether loading ``tokens`` behind ``context`` is no slower than computing them with the ``new``."""
        saved = self.exec_s(tokens + new, context) - self.exec_s(new, context + tokens)
        return self.load_tokens_s(tier, tokens) <= saved

    def worth_transferring(self, tokens: int, new: int, context: int) -> bool:
        """Equation 2: transfer(y, y') <= exec(x, y) - exec(x, y')."""
        saved = self.exec_s(tokens + new, context) - self.exec_s(new, context + tokens)
        return self.transfer_s(tokens) <= saved

    def least_worth_loading(self, tier: Tier, new: int, context: int, *, most: int) -> int | None:
        """Load or recompute: the fewest tokens that are worth loading; None when even ``most`` are not."""
        return break_even(lambda tokens: self.worth_loading(tier, tokens, new, context), most=most, least=1)

    def least_worth_transferring(self, new: int, context: int, *, most: int) -> int | None:
        """Fetch or recompute: the fewest tokens that are worth fetching; None when even ``most`` are not."""
        return break_even(lambda tokens: self.worth_transferring(tokens, new, context), most=most, least=1)

    def tokens_within(self, seconds: float, context: int = 0) -> int:
        """exec inverted: the most new tokens that can be computed behind ``context`` in so many seconds."""
        if self.exec_s(1, context) > seconds:
            return 0
        first_too_many = break_even(
            lambda tokens: self.exec_s(tokens, context) > seconds, most=1 << 40, least=1
        )
        return (1 << 40) if first_too_many is None else first_too_many - 1

    def __repr__(self) -> str:
        return f"CostModel({self.profile.identity if self.profile else 'defaults'})"


def break_even(holds: Callable[[int], bool], *, least: int, most: int) -> int | None:
    """The smallest number of ``least`` … ``most`` from which on ``holds`` is true; None if it is not at
    ``most``. Doubling, then halving: ``holds`` is asked about 2·log2(answer) times.

    Saved time grows at least in proportion with what is saved, apart from the steps of waves, so what is
    worth it stays worth it; within one wave the answer may be off by that wave.
    """
    if least > most:
        return None
    low, step = least - 1, 1
    high = least
    while not holds(high):
        if high == most:
            return None
        low, step = high, step * 2
        high = min(most, least + step - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
