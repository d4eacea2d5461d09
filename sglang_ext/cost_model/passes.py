"""Exec over the prompts that are computed together, and over the passes that a line of prompts takes.

A forward pass reads the weights once for all its prompts, and its matrix products run over the tokens of all;
only attention is computed for each prompt separately. So a batch takes less than its prompts one after the
other, and no less than the largest of them.

The server decides how to fill a pass: with as many prompts as fit in ``--chunked-prefill-size`` new tokens,
the last one cut and continued in the next pass; or, where prompts are not cut, as fit in
``--max-prefill-tokens``.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.cost_model.batch import ANY, NOTHING, Batch, Batching


class Passes:
    """The passes that prompts take, in their order. Immutable, so that "with one more" can be asked.

    Args:
        pass_s: seconds of one pass.
        around_s: the part of them that overlaps the next pass, and so counts once for several passes.
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

    def sooner(self, seconds: float) -> Passes:
        """With so many seconds less, and the same last pass."""
        return Passes(
            self._pass_s,
            self._around_s,
            self._batching,
            closed=self.closed,
            closed_s=self._closed_s - seconds,
            open=self.open,
        )

    def without(self, new: int, context: int) -> Passes:
        """With one prompt less, which is whole in the last pass."""
        return Passes(
            self._pass_s,
            self._around_s,
            self._batching,
            closed=self.closed,
            closed_s=self._closed_s,
            open=self.open.without(new, context),
        )

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
