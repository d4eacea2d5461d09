"""Prompts that are computed together: exec over a batch, and over the passes that a line of prompts takes.

A forward pass reads the weights once for all its prompts, and its matrix products see the tokens of all; what
each prompt takes by itself is its attention. So a batch takes less than its prompts one after the other, and
no less than the largest of them.

What a pass holds is the server's choice: as many prompts as fit in ``--chunked-prefill-size`` new tokens, the
last one cut and continued in the next pass; or, where prompts are not cut, as fit in
``--max-prefill-tokens``.
"""

from __future__ import annotations

from collections.abc import Callable

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


class Passes:
    """The passes that prompts take, in their order. Immutable, so that "with one more" can be asked.

    Args:
        pass_s: seconds of one pass.
        around_s: seconds in those that do not come again in a further pass, because they pass beside it.
        batching: how passes are filled.
    """

    __slots__ = ("_around_s", "_batching", "_closed_s", "_pass_s", "closed", "open")

    def __init__(
        self,
        pass_s: Callable[[Batch], float],
        around_s: float = 0.0,
        batching: Batching = ANY,
        *,
        closed: int = 0,
        closed_s: float = 0.0,
        open: Batch = NOTHING,
    ) -> None:
        self._pass_s, self._around_s, self._batching = pass_s, around_s, batching
        self._closed_s = closed_s
        self.closed = closed
        """How many passes are full."""
        self.open = open
        """The last pass, which further prompts may still join."""

    @property
    def seconds(self) -> float:
        """Of all of them."""
        count = self.closed + bool(self.open.prompts)
        last_s = self._pass_s(self.open) if self.open.prompts else 0.0
        return self._closed_s + last_s - self._around_s * max(0, count - 1)

    def adding(self, new: int, context: int) -> Passes:
        """With one prompt more."""
        chunk, most = self._batching.chunk, self._batching.most
        closed, closed_s, last = self.closed, self._closed_s, self.open
        if chunk:
            while last.new + new > chunk:
                piece = chunk - last.new
                if piece:
                    last = last.adding(piece, context)
                    new, context = new - piece, context + piece
                closed, closed_s, last = closed + 1, closed_s + self._pass_s(last), NOTHING
        elif most and last.prompts and last.new + new > most:
            closed, closed_s, last = closed + 1, closed_s + self._pass_s(last), NOTHING
        return Passes(
            self._pass_s,
            self._around_s,
            self._batching,
            closed=closed,
            closed_s=closed_s,
            open=last.adding(new, context),
        )
