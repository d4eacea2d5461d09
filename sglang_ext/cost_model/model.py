"""The router's cost model: exec(x, y), alone and of a batch, transfer(y, y') and load(tier, bytes)."""

from __future__ import annotations

import functools
from typing import ClassVar, Final, Protocol

from sglang_ext.cost_model.batch import ANY, Batch, Batching
from sglang_ext.cost_model.operators import Link
from sglang_ext.cost_model.passes import Passes
from sglang_ext.cost_model.profile import Decode, Profile
from sglang_ext.tiers import Tier, tier_named


class Execution(Protocol):
    """exec, at either level."""

    def batch_s(self, batch: Batch) -> float:
        """To the first tokens of prompts that one forward pass computes."""

    @property
    def around_s(self) -> float:
        """The part of it that overlaps the next pass, if there is one."""

    def adding_s(self, batch: Batch) -> float:
        """A lower bound of the time that a prompt adds to passes with a prompt, wherever it is cut.

        Args:
            batch: the prompt alone.
        """


class DefaultExecution:
    """For models and devices without measurements: an order of magnitude, which the router corrects by the
    observed times to first token.

    10,000 tokens/s and 20 ms; each token of context adds 1/50,000 of that, so that a prompt of 50,000 tokens
    takes 1.5 times as long as its linear layers. That is about an 8B model on one mid-range GPU.
    """

    FIXED_S: ClassVar[float] = 0.02
    PER_TOKEN_S: ClassVar[float] = 1e-4
    PER_PAIR_S: ClassVar[float] = 1e-4 / 50_000

    around_s = 0.0

    def batch_s(self, batch: Batch) -> float:
        pairs = (batch.squares - batch.context_squares) / 2
        return self.FIXED_S + self.PER_TOKEN_S * batch.new + self.PER_PAIR_S * pairs

    def adding_s(self, batch: Batch) -> float:
        return self.batch_s(batch) - self.FIXED_S


DEFAULTS: Final = "defaults"
"""``CostModel.basis`` without a profile."""
REMEMBERED = 4096
"""Results of exec that are kept; one takes some 10 µs at the operator level."""
DEFAULT_KV_BYTES = 128 * 1024
"""Of a token: 32 layers, 8 KV heads of 128, 2 bytes."""
USUAL_CONTEXT = 2048
"""Tokens of a request that generates, where they are not known."""
DEFAULT_TRANSFER = Link(fixed_s=2e-3, per_byte_s=1 / 5e9)
DEFAULT_DECODE = Decode.linear(fixed_s=0.01, per_request_s=2e-4)


def default_link(tier: Tier) -> Link:
    """Loading from a tier, without measurements."""
    return Link(tier.load_latency_s, 1 / tier.load_bytes_per_s)


class CostModel:
    """Costs of one model on one device, in seconds.

    Args:
        profile: measurements; without it, defaults.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self.profile = profile
        self.execution: Execution = DefaultExecution() if profile is None else profile.level
        self.kv_bytes_per_token = DEFAULT_KV_BYTES if profile is None else profile.kv_bytes_per_token
        self._tiers = {} if profile is None else {tier_named(n): link for n, link in profile.tiers.items()}
        self._transfer = (profile and profile.transfer) or DEFAULT_TRANSFER
        self._decode = decode = (profile and profile.decode) or DEFAULT_DECODE
        self._step_s = functools.lru_cache(maxsize=REMEMBERED)(decode.seconds)
        # A router evaluates every instance, and most instances hold the same part of a prompt: none.
        self._alone_s = functools.lru_cache(maxsize=REMEMBERED)(self._alone)
        self._adding_s = functools.lru_cache(maxsize=REMEMBERED)(self._adding)

    @property
    def calibrated(self) -> bool:
        """Whether its costs come from a calibration."""
        return self.profile is not None and not self.profile.estimated

    @property
    def basis(self) -> str:
        """The origin of its costs, for people: ``calibrated``, ``estimated`` or ``defaults``."""
        if self.profile is None:
            return DEFAULTS
        return "estimated" if self.profile.estimated else "calibrated"

    def exec_s(self, new: int, context: int, batching: Batching = ANY) -> float:
        """exec(x, y): to prefill a prompt of which ``context`` leading tokens are in HBM and ``new`` are not.

        At least one token is always computed: the last one's logits are the answer's beginning.

        Args:
            batching: of the server; in one pass if it sets no limit.
        """
        return self._alone_s(max(1, new), max(0, context), batching)

    def _alone(self, new: int, context: int, batching: Batching) -> float:
        return self.passes(batching).adding(new, context).seconds

    def adding_s(self, new: int, context: int) -> float:
        """A lower bound of the time that a prompt adds to a line of prompts that wait, however passes are
        filled."""
        return self._adding_s(max(1, new), max(0, context))

    def _adding(self, new: int, context: int) -> float:
        # A margin for rounding: the difference of two sums is compared with it.
        return max(0.0, self.execution.adding_s(Batch.of(new, context)) * (1 - 1e-9))

    def passes(self, batching: Batching = ANY, running: int = 0) -> Passes:
        """The passes of a line of prompts, empty yet: exec over a batch.

        Args:
            batching: how the server fills its passes.
            running: requests that it generates for.
        """
        steps_s = self.beside_s * running if batching.mixed else 0.0
        batch_s = self.execution.batch_s
        pass_s = (lambda batch: batch_s(batch) + steps_s) if steps_s else batch_s
        return Passes(pass_s, self.execution.around_s, batching)

    @property
    def beside_s(self) -> float:
        """That each request's step adds to a pass with prompts (``Batching.mixed``)."""
        return self._decode.per_request_s + self._decode.per_token_s * USUAL_CONTEXT

    def load_s(self, tier: Tier, nbytes: float) -> float:
        """load(tier, bytes): from a tier of the instance's own to HBM."""
        return (self._tiers.get(tier) or default_link(tier)).seconds(nbytes)

    def load_tokens_s(self, tier: Tier, tokens: int) -> float:
        """The same in tokens."""
        return self.load_s(tier, float(tokens) * self.kv_bytes_per_token)

    def transfer_s(self, tokens: int) -> float:
        """transfer(y, y'): the KV of ``tokens`` = x·(y' - y) from another instance."""
        return self._transfer.seconds(float(tokens) * self.kv_bytes_per_token)

    @property
    def late(self) -> bool:
        """See ``Decode.late``."""
        return self._decode.late

    def decode_s(self, requests: int, tokens: float | None = None) -> float:
        """One step of generation.

        Args:
            requests: at least one.
            tokens: of the contexts of all requests together; ``USUAL_CONTEXT`` for each by default.
        """
        if tokens is None:
            tokens = USUAL_CONTEXT * requests
        return self._step_s(requests) + self._decode.per_token_s * tokens

    def __repr__(self) -> str:
        return f"CostModel({self.profile.identity if self.profile else 'defaults'})"
