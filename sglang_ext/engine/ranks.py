"""Agreement between the ranks of an instance: one vector of numbers per pass of their schedulers.

The trees of all ranks change in step, but each rank has copies, reads, and clocks of its own. So an operation
that is complete, or late, on one rank only does not count as such yet. In each pass every part proposes its
next step as numbers, without changing anything (`Part.propose`). One collective takes the smallest of the
ranks' numbers at each place, and the parts act on the agreed numbers (`Part.act`), in the same pass and
order.

The number of values that a part proposes depends only on state that all ranks share: on the operations it
has submitted, not on their results. The vector's first two numbers reveal ranks that are out of step, or that
have added their parts in different orders.

Numbers that each rank measures, such as the speed of its copies, are compared along with those of the parts
(`Ranks.measure`). They alone are no reason for a collective, unless one is asked for (`Measured.ask`).

The stages of a pipeline (``--pp-size``) make the same passes, but not at the same time: a stage that waited
for the others in each pass would compute nothing meanwhile. They agree later (`Later`): proposals of one pass
are compared in the background, and all stages act on the result the same number of passes on. Until then
nothing else is proposed. So a part must act on its own proposal, which may have ended meanwhile.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sglang_ext.errors import InternalError, OutOfStepError

Least = Callable[[Sequence[int]], Sequence[int]]
"""The smallest of the ranks' numbers at each place; 64 bits each. Every rank calls it at once."""

Begin = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""The same without waiting for the other ranks. Returns the function that waits, and returns the numbers."""

NOT_YET: Final = -1
"""Proposed for a value that is not known on this rank yet; smaller than every known value."""
_SMALLEST_VECTOR: Final = 32
"""Vectors have this many numbers or a power of two more, so that ranks out of step still compare the same."""


class Part(Protocol):
    """A component that changes the tree depending on results that arrive asynchronously."""

    def propose(self) -> Sequence[int]:
        """The steps that this rank could take now. Changes no state that the ranks share."""

    def act(self, agreed: Sequence[int]) -> None:
        """Act on the agreed numbers: as many as proposed, or none where the ranks compared nothing."""


class Measured:
    """Numbers that each rank measures, the smallest of any rank at each place. Made by `Ranks.measure`."""

    def __init__(self, ranks: Ranks, name: str, read: Callable[[], Sequence[int]]) -> None:
        self._ranks = ranks
        self.name = name
        self.read = read
        self.numbers: tuple[int, ...] | None = None
        """As of the last comparison; None before the first."""
        self._compared_at = 0

    def __repr__(self) -> str:
        return f"Measured({self.name}, {self.numbers})"

    @property
    def fresh(self) -> bool:
        """Whether the ranks have compared them in this pass."""
        return self._compared_at == self._ranks.passes

    def ask(self) -> None:
        """Compare numbers in the next pass in any case. On all ranks in the same pass."""
        self._ranks.compare_next()

    def compared(self, numbers: Sequence[int]) -> None:
        """These are the smallest of any rank, as of this pass."""
        self.numbers = tuple(numbers)
        self._compared_at = self._ranks.passes


@dataclass(frozen=True)
class Later:
    """How the stages of a pipeline agree.

    Args:
        begin: begins to compare numbers.
        passes: from the pass of a proposal to the pass in which all stages act on it. As many as the pipeline
            has batches under way: by then a stage has the results of that pass anyway, so that none waits.
    """

    begin: Begin
    passes: int


@dataclass(frozen=True)
class _Round:
    """Proposals of one pass, and in which pass the ranks act on them."""

    parts: tuple[Part, ...]
    measured: tuple[Measured, ...]
    lengths: list[int]
    """Of the numbers of each."""
    result: Callable[[], Sequence[int]]
    due: int


class Ranks:
    """The ranks of one instance, as one of them sees them. In the scheduler's thread.

    Args:
        least: compares numbers; None where there is one rank, which agrees with itself.
        later: how the ranks compare the numbers of a pass, where they are stages of a pipeline.
        check: compare in each pass, also when no part has anything to decide, so that ranks that are out of
            step fail in that very pass.
    """

    def __init__(
        self, least: Least | None = None, *, later: Later | None = None, check: bool = False
    ) -> None:
        self._least = least
        self._later = later
        self._round: _Round | None = None
        self._check = check
        self._parts: tuple[Part, ...] = ()
        self._order = 0
        """Checksum of the names of parts and measured numbers, in the order in which they were added."""
        self._measured: list[Measured] = []
        self._compares_next = False
        self.passes = 0
        self.vectors = 0
        """Collectives since the start."""

    def __repr__(self) -> str:
        return f"Ranks(parts={len(self._parts)}, passes={self.passes}, vectors={self.vectors})"

    @property
    def alone(self) -> bool:
        """Whether there is one rank, which may record results at any time."""
        return self._least is None

    @property
    def pipelined(self) -> bool:
        """Whether they are stages of a pipeline, and agree later."""
        return self._later is not None

    def add(self, part: Part) -> None:
        """Ask a part in each pass from now on, after all earlier parts. On all ranks in the same order."""
        self._have((*self._parts, part))

    def measure(self, name: str, read: Callable[[], Sequence[int]]) -> Measured:
        """Compare numbers of each rank in every pass in which the ranks compare anything. On all ranks in the
        same order.

        Args:
            name: the same on all ranks.
            read: returns this rank's numbers; always as many.
        """
        measured = Measured(self, name, read)
        self._measured.append(measured)
        self._have(self._parts)
        return measured

    def compare_next(self) -> None:
        """Compare numbers in the next pass, also when no part has anything to decide."""
        self._compares_next = True

    def remove(self, part: Part) -> None:
        """Stop asking a part."""
        self._have(tuple(known for known in self._parts if known is not part))

    def _have(self, parts: tuple[Part, ...]) -> None:
        self._parts = parts
        self._order = zlib.crc32(repr(self._names).encode())

    @property
    def _names(self) -> list[str]:
        names = [type(part).__name__ for part in self._parts]
        return names + [measured.name for measured in self._measured]

    def each_pass(self) -> None:
        """Agree, and act. Once per pass of the scheduler's loop, on every rank.

        Raises:
            OutOfStepError: another rank has other parts or numbers.
        """
        self.passes += 1
        if self._least is None:
            self._act_alone()
            return
        if self._round is not None:
            if self.passes < self._round.due:
                return
            ended, self._round = self._round, None
            self._act(ended.parts, ended.measured, _cut(ended.result(), ended.lengths))
        parts, measured = self._parts, tuple(self._measured)
        said = [part.propose() for part in parts]
        compares, self._compares_next = self._compares_next or self._check or any(said), False
        if not compares:
            self._act(parts, (), said)
        else:
            said += [each.read() for each in measured]
            lengths = [len(numbers) for numbers in said]
            vector = self._vector(said)
            if self._later is None:
                self._act(parts, measured, _cut(self._agreed(self._least(vector), lengths), lengths))
            else:
                begun, due = self._later.begin(vector), self.passes + self._later.passes

                def result() -> Sequence[int]:
                    return self._agreed(begun(), lengths)

                self._round = _Round(parts, measured, lengths, result, due)

    def _act_alone(self) -> None:
        """One rank agrees with itself. Servers of one GPU do this in each pass."""
        parts = self._parts
        said = [part.propose() for part in parts]
        for each in self._measured:
            each.compared(each.read())
        for part, numbers in zip(parts, said, strict=True):
            if parts is self._parts or part in self._parts:
                part.act(numbers)

    def _act(
        self, parts: Sequence[Part], measured: Sequence[Measured], agreed: Sequence[Sequence[int]]
    ) -> None:
        """Act on the numbers of the parts, which come first, and of the measurements."""
        for each, numbers in zip(measured, agreed[len(parts) :], strict=True):
            each.compared(numbers)
        for part, numbers in zip(parts, agreed[: len(parts)], strict=True):
            if part in self._parts:
                part.act(numbers)

    def at_once(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of the ranks' numbers, now, in a collective of its own.

        For the one decision that cannot wait for the next pass: whether the KV that streamed into a forward
        pass was valid, on which its result depends.

        Raises:
            InternalError: the ranks are stages of a pipeline, and have begun their passes. The others may be
                waiting for requests of this pass, which this rank has not sent on.
        """
        if self._least is None or not numbers:
            return list(numbers)
        if self._later is not None and self.passes:
            raise InternalError("the stages of a pipeline cannot wait for each other in a pass")
        lengths = [len(numbers)]
        return list(self._agreed(self._least(self._vector([numbers])), lengths))

    def _vector(self, said: Sequence[Sequence[int]]) -> list[int]:
        step = zlib.crc32(repr((self.passes, self._order, [len(numbers) for numbers in said])).encode())
        vector = [step, -step, *itertools.chain.from_iterable(said)]
        size = max(_SMALLEST_VECTOR, 1 << (len(vector) - 1).bit_length())
        self.vectors += 1
        return vector + [0] * (size - len(vector))

    def _agreed(self, vector: Sequence[int], lengths: Sequence[int]) -> Sequence[int]:
        """The numbers of a compared vector, without the two of the step."""
        first, second, *numbers = vector
        if first != -second:
            raise OutOfStepError(
                f"the ranks of this instance are out of step: in pass {self.passes}, another rank has other "
                f"things to decide than {lengths} numbers of {len(self._parts)} parts, {self._names}"
            )
        return numbers[: sum(lengths)]


def _cut(numbers: Sequence[int], lengths: Sequence[int]) -> list[Sequence[int]]:
    """The numbers of each."""
    rest = iter(numbers)
    return [list(itertools.islice(rest, length)) for length in lengths]
