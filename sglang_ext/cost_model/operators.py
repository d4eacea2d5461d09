"""The operator level of the cost model: one function per kind of operator (MemServe, section 5.3.2).

``new`` is the number of prompt tokens to compute, ``context`` those before them whose KV is there already;
in the paper's words x = new + context is the prompt and y = context / x the cached ratio. Times are seconds.

Every coefficient is non-negative, so no function falls when ``new`` or ``context`` grows.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_ext.cost_model.batch import Batch

Rows = Literal["tokens", "one"]
Split = Literal["columns", "inner", "none"]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a profile's parts: immutable, and an unknown field is an error."""


class Linear(Part, frozen=True):
    """A matrix product ``[rows, inner] x [inner, columns]`` that a forward pass runs ``count`` times."""

    inner: int
    columns: int
    count: int
    rows: Rows = "tokens"
    """How many rows there are: one per new token, or one per prompt (the last token's logits)."""
    split: Split = "columns"
    """The dimension that tensor parallelism divides: the columns, the inner one, or none."""

    def scaled(self, factor: float) -> Linear:
        """With ``factor`` times as many ranks; a fraction where fewer."""

        def divided(size: int) -> int:
            return max(1, round(size / factor))

        if self.split == "columns":
            return msgspec.structs.replace(self, columns=divided(self.columns))
        if self.split == "inner":
            return msgspec.structs.replace(self, inner=divided(self.inner))
        return self


class Waves(Part, frozen=True):
    """How fast a device runs matrix products: in waves of as many tiles as it has units.

    A product with B tiles takes ceil(B / units) waves; a wave takes as long as one tile on one unit, whose
    floating-point operations are 2 · tile_rows · tile_columns · inner.
    """

    units: int
    """Streaming multiprocessors of a GPU, cores of a CPU."""
    tile_rows: int
    tile_columns: int
    flops_per_s: float
    """Of all units together, in waves that are full."""
    fixed_s: float = 0.0
    """Of each product besides: its launch."""


class Attention(Part, frozen=True):
    """Attention of all layers over a prompt: a·x²y + b·x² + c·x + d, and e·x²y².

    The paper's four terms, a negative: cached tokens need not be computed. The fifth is for kernels that skip
    entries above the diagonal: they compute x²(1 - y²)/2 pairs of tokens, which no term linear in y can
    follow. With e = 0 it is the paper's formula.
    """

    a: float
    b: float
    c: float
    d: float
    e: float = 0.0

    def seconds(self, batch: Batch) -> float:
        """Of a pass: each prompt attends to itself alone."""
        squares = self.a * batch.crossed + self.b * batch.squares + self.e * batch.context_squares
        return squares + self.c * batch.tokens + self.d

    @classmethod
    def of_work(
        cls, pairs: float, rectangle: float, square: float, per_token: float, fixed: float
    ) -> Attention:
        """From seconds per unit of work, none negative.

        Args:
            pairs: per (token, earlier token), of kernels that skip what lies above the diagonal.
            rectangle: per new token and token of the prompt.
            square: per two tokens of the prompt, of kernels that compute cached rows again.
            per_token: per token of the prompt: reading its KV.
            fixed: of each forward pass.
        """
        return cls(a=-rectangle, b=pairs / 2 + rectangle + square, c=per_token, d=fixed, e=-pairs / 2 or 0.0)

    def scaled(self, factor: float) -> Attention:
        """With ``factor`` times as many ranks, each with its share of the heads; the fixed part stays."""
        return Attention(self.a / factor, self.b / factor, self.c / factor, self.d, self.e / factor)

    def times(self, factor: float) -> Attention:
        """On a device so many times slower."""
        return Attention(self.a * factor, self.b * factor, self.c * factor, self.d * factor, self.e * factor)


class Rest(Part, frozen=True):
    """The operators that take a share of the time that hardly changes: norms, activations, rotations."""

    fixed_s: float
    per_token_s: float
    """Per new token, in operators that every rank does in full."""
    split_per_token_s: float = 0.0
    """Per new token, in operators of which each rank does its share."""

    def seconds(self, new: int) -> float:
        return self.fixed_s + (self.per_token_s + self.split_per_token_s) * new

    def scaled(self, factor: float) -> Rest:
        """With ``factor`` times as many ranks."""
        return Rest(self.fixed_s, self.per_token_s, self.split_per_token_s / factor)

    def times(self, factor: float) -> Rest:
        """On a device so many times slower."""
        return Rest(self.fixed_s * factor, self.per_token_s * factor, self.split_per_token_s * factor)


class Outside(Part, frozen=True):
    """Time of a request outside of its forward pass: HTTP, scheduling, preparing the batch, sampling."""

    fixed_s: float
    per_new_token_s: float = 0.0
    per_prompt_token_s: float = 0.0
    overlap_s: float | None = None
    """The part of ``fixed_s`` that overlaps the next pass, if there is one; None for all of it. On a CPU, the
    scheduler's part does not: it launches a pass by computing it."""

    @property
    def around_s(self) -> float:
        """The part of it that overlaps the next pass."""
        return self.fixed_s if self.overlap_s is None else min(self.fixed_s, self.overlap_s)

    def seconds(self, batch: Batch) -> float:
        """Of prompts that are computed together."""
        return self.fixed_s + self.per_new_token_s * batch.new + self.per_prompt_token_s * batch.tokens


class Scaling(Part, frozen=True):
    """The constants of a parallelism (MemServe, section 5.3.2): how dividing a model between ranks changes
    times beyond the prediction from its shapes. A property of the device, measured by a few prefills.

    Ranks share resources of the device (memory bandwidth, caches, the cores of all other processes), and wait
    for each other; neither shapes nor a probe of the all-reduce show that.
    """

    factor: float = 1.0
    """Measured over predicted time, of the part that grows with the prompt."""
    fixed_s: float = 0.0
    """Further seconds of each prefill."""

    def seconds(self, by_shapes_s: float) -> float:
        """Seconds of a prefill whose prediction from shapes is ``by_shapes_s``."""
        return self.factor * by_shapes_s + self.fixed_s


AS_PREDICTED = Scaling()


class Link(Part, frozen=True):
    """Something that moves bytes: a fixed time, and bytes over bandwidth."""

    fixed_s: float
    per_byte_s: float

    def seconds(self, nbytes: float) -> float:
        """To move so many bytes; nothing takes no time."""
        return self.fixed_s + self.per_byte_s * nbytes if nbytes > 0 else 0.0
