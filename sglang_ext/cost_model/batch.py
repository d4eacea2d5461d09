"""Prompts that are computed together, in one forward pass, and how a server fills its passes."""

from __future__ import annotations

import msgspec


class Batch(msgspec.Struct, frozen=True):
    """The prompts of one forward pass, by all that their times depend on: sums over the prompts.

    Of a prompt, ``new`` tokens are computed behind ``context`` that have their KV; x = new + context.
    Attention is linear in these sums at every level, so a batch of any size costs one evaluation.
    """

    prompts: int = 0
    new: int = 0
    tokens: int = 0
    """Sum of x."""
    squares: int = 0
    """Sum of x²."""
    crossed: int = 0
    """Sum of x·context: the paper's x²y."""
    context_squares: int = 0
    """Sum of context²: x²y²."""

    @classmethod
    def of(cls, new: int, context: int) -> Batch:
        """One prompt alone."""
        return NOTHING.adding(new, context)

    def adding(self, new: int, context: int) -> Batch:
        """With one prompt more."""
        x = new + context
        return Batch(
            self.prompts + 1,
            self.new + new,
            self.tokens + x,
            self.squares + x * x,
            self.crossed + x * context,
            self.context_squares + context * context,
        )

    def without(self, new: int, context: int) -> Batch:
        """With one of its prompts less."""
        x = new + context
        return Batch(
            self.prompts - 1,
            self.new - new,
            self.tokens - x,
            self.squares - x * x,
            self.crossed - x * context,
            self.context_squares - context * context,
        )


NOTHING = Batch()


class Batching(msgspec.Struct, frozen=True):
    """How a server fills its forward passes; as SGLang's flags say."""

    chunk: int = 0
    """``--chunked-prefill-size``: new tokens of a pass, for which a prompt is cut. 0: none is cut."""
    most: int = 0
    """``--max-prefill-tokens``: where none is cut, new tokens of a pass of several prompts. 0: any."""
    mixed: bool = False
    """``--enable-mixed-chunk``: a pass takes a step of the running batch along. Otherwise that stands still
    until the prompts are computed."""


ANY = Batching()
