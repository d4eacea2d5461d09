"""exec at two levels: as the sum of its operators, and of a piece (MemServe, section 5.3.2)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from sglang_ext.cost_model.batch import Batch
from sglang_ext.cost_model.fit import Array
from sglang_ext.cost_model.operators import (
    AS_PREDICTED,
    Attention,
    Linear,
    Link,
    Outside,
    Part,
    Rest,
    Scaling,
    Waves,
)
from sglang_ext.cost_model.sums import adding_products_s, products_s
from sglang_ext.errors import ConfigError

REDUCTIONS_PER_LAYER = 2
"""All-reduces of a layer under tensor parallelism: behind attention and behind the MLP."""
REDUCTIONS_BESIDES = 1
"""And behind the embedding, whose vocabulary is divided too."""
SMALL_EXCHANGES = 4
"""Further exchanges of ranks around one prefill, a few bytes each: the new requests (size, then content), the
logits, the next token."""


def communication_s(link: Link, layers: int, nbytes: float) -> float:
    """Seconds that ranks exchange until the first token: activations of ``nbytes`` in the prefill; and one
    token's, a few bytes, in the step of generation that SGLang's overlapping scheduler starts before it hands
    the first token out."""
    reductions = REDUCTIONS_PER_LAYER * layers + REDUCTIONS_BESIDES
    return reductions * link.seconds(nbytes) + (reductions + SMALL_EXCHANGES) * link.fixed_s


class OperatorLevel(Part, frozen=True):
    """exec(x, y): the sum of a forward pass's operators on one rank, plus the time around the pass.

    The numbers are for ``tp`` and ``pp`` ranks. ``scaled`` derives another parallelism: divided operators are
    divided by the number of ranks, replicated ones keep their time, and all-reduces are added.
    """

    layers: int
    hidden: int
    activation_bytes: int
    """Of one number that ranks exchange."""
    linears: tuple[Linear, ...]
    waves: Waves
    attention: Attention
    rest: Rest
    outside: Outside
    tp: int = 1
    pp: int = 1
    reductions: Mapping[str, Link] = {}
    """All-reduce between so many ranks (as text: JSON has no other keys)."""
    stage_link: Link | None = None
    """From one pipeline stage to the next."""
    scalings: Mapping[str, Scaling] = {}
    """The constants of other parallelisms, by ranks (as text); without them, shapes alone decide."""
    scaling: Scaling = AS_PREDICTED
    """The constants of this parallelism."""

    def seconds(self, new: int, context: int) -> float:
        """To the first token of a prompt of ``context + new`` tokens of which ``context`` are in HBM."""
        return self.batch_s(Batch.of(new, context))

    def batch_s(self, batch: Batch) -> float:
        """To the first tokens of prompts that one forward pass computes."""
        new = batch.new
        seconds = products_s(self.linears, self.waves, new, batch.prompts) + self.attention.seconds(batch)
        seconds += self.rest.seconds(new) + self.outside.seconds(batch)
        if self.tp > 1 or self.pp > 1:
            seconds += self._communication(new)
        return seconds if self.scaling == AS_PREDICTED else self.scaling.seconds(seconds)

    @property
    def around_s(self) -> float:
        """The part of it that overlaps the next pass, if there is one: HTTP, preparing the batch."""
        return self.scaling.factor * self.outside.around_s

    def parts(self, batch: Batch) -> dict[str, float]:
        """``batch_s``, by kind of operator."""
        new, prompts = batch.new, batch.prompts
        parts = {
            "linear": products_s(self.linears, self.waves, new, prompts),
            "attention": self.attention.seconds(batch),
            "rest": self.rest.seconds(new),
            "communication": self._communication(new),
            "outside": self.outside.seconds(batch),
        }
        if self.scaling != AS_PREDICTED:
            parts = {name: self.scaling.factor * seconds for name, seconds in parts.items()}
            parts["scaling"] = self.scaling.fixed_s
        return parts

    def adding_s(self, batch: Batch) -> float:
        """A lower bound of the time that a prompt adds to passes with a prompt, wherever it is cut."""
        least = _however_cut(batch)
        seconds = adding_products_s(self.linears, self.waves, batch.new)
        seconds += self.attention.seconds(least) - self.attention.d
        seconds += self.rest.seconds(batch.new) - self.rest.fixed_s
        seconds += self._communication(batch.new) - self._communication(1)
        seconds += self.outside.seconds(batch) - self.outside.fixed_s
        return self.scaling.factor * seconds

    def _communication(self, new: int) -> float:
        if self.tp == self.pp == 1:
            return 0.0
        nbytes = new * self.hidden * self.activation_bytes
        seconds = 0.0
        if self.tp > 1:
            seconds += communication_s(self.reductions[str(self.tp)], self.layers, nbytes)
        if self.pp > 1 and self.stage_link is not None:
            seconds += (self.pp - 1) * self.stage_link.seconds(nbytes)
        return seconds

    def scaled(self, tp: int, pp: int = 1) -> OperatorLevel:
        """The same model on the same device with another parallelism.

        One prompt passes the stages of a pipeline one after the other, so ``pp`` adds the transfers between
        stages and takes nothing away; a pipeline gains throughput.

        Raises:
            ConfigError: the all-reduce between so many ranks was not measured.
        """
        if tp < 1 or pp < 1:
            raise ConfigError(f"a parallelism of {tp} x {pp} cannot be", field="--tp-size")
        if tp > 1 and str(tp) not in self.reductions:
            raise ConfigError(
                f"the cost profile knows nothing of all-reduces between {tp} ranks",
                field="--cost-profile",
                hint=f"Measure them: sglang-ext calibrate --scale-to-tp {tp}, or calibrate a server with "
                f"--tp-size {tp}",
            )
        factor = tp / self.tp
        return OperatorLevel(
            layers=self.layers,
            hidden=self.hidden,
            activation_bytes=self.activation_bytes,
            linears=tuple(one.scaled(factor) for one in self.linears),
            waves=self.waves,
            attention=self.attention.scaled(factor),
            rest=self.rest.scaled(factor),
            outside=self.outside,
            tp=tp,
            pp=pp,
            reductions=self.reductions,
            stage_link=self.stage_link,
            scalings=self.scalings,
            scaling=self.scaling if tp == self.tp else self.scalings.get(str(tp), AS_PREDICTED),
        )


class ArchLevel(Part, frozen=True):
    """exec(x, y) fitted to times to first token alone, without looking inside.

    The coefficients belong to ``features``; none is negative, so that it never falls with more to compute.
    """

    coefficients: tuple[float, ...]
    reductions: Mapping[str, Link] = {}
    """As in the operator level; the only input for other parallelisms at this level."""
    layers: int = 0
    hidden: int = 0
    activation_bytes: int = 0
    tp: int = 1
    divided_by: float = 1.0
    """Divisor of the fit: the ranks it is scaled to, over the ranks it was fitted at."""
    scalings: Mapping[str, Scaling] = {}
    """As in the operator level."""
    scaling: Scaling = AS_PREDICTED

    def seconds(self, new: int, context: int) -> float:
        """As ``OperatorLevel.seconds``."""
        return self.batch_s(Batch.of(new, context))

    @property
    def around_s(self) -> float:
        """Not known at this level."""
        return 0.0

    def batch_s(self, batch: Batch) -> float:
        """As ``OperatorLevel.batch_s``."""
        fitted = float(np.dot(features(batch), np.asarray(self.coefficients)))
        seconds = fitted / self.divided_by
        if self.divided_by != 1.0 and self.tp > 1:
            nbytes = batch.new * self.hidden * self.activation_bytes
            seconds += communication_s(self.reductions[str(self.tp)], self.layers, nbytes)
        return self.scaling.seconds(seconds)

    def adding_s(self, batch: Batch) -> float:
        """As ``OperatorLevel.adding_s``."""
        fixed_s = self.coefficients[0] / self.divided_by
        if self.divided_by != 1.0 and self.tp > 1:
            fixed_s += communication_s(
                self.reductions[str(self.tp)], self.layers, self.hidden * self.activation_bytes
            )
        return self.batch_s(_however_cut(batch)) - self.scaling.seconds(fixed_s)

    def scaled(self, tp: int) -> ArchLevel:
        """Divided by the ratio of ranks, plus communication. This level cannot separate parallel from
        replicated work (the paper measures how much that loses)."""
        if tp > 1 and str(tp) not in self.reductions:
            raise ConfigError(
                f"the cost profile knows nothing of all-reduces between {tp} ranks",
                field="--cost-profile",
                hint=f"Measure them: sglang-ext calibrate --scale-to-tp {tp}",
            )
        return ArchLevel(
            self.coefficients,
            self.reductions,
            self.layers,
            self.hidden,
            self.activation_bytes,
            tp,
            self.divided_by * tp / self.tp,
            self.scalings,
            self.scaling if tp == self.tp else self.scalings.get(str(tp), AS_PREDICTED),
        )


def _however_cut(batch: Batch) -> Batch:
    """A prompt with the least ``squares - crossed`` that its pieces can have: a kernel that computes whole
    rectangles computes less of a prompt that is cut."""
    pairs = (batch.squares - batch.context_squares) // 2
    return msgspec.structs.replace(batch, crossed=batch.squares - pairs)


FEATURES = 6


def features(batch: Batch) -> Array:
    """The terms of the arch level, shape (6,): a constant, x, new tokens, and the three kinds of work of
    attention (``Attention.of_work``): new · (context + new / 2), new · x and x²."""
    pairs, rectangle = (batch.squares - batch.context_squares) / 2, batch.squares - batch.crossed
    return np.array([1.0, batch.tokens, batch.new, pairs, rectangle, batch.squares])
