"""What the ranks of an instance decide together: one vector of numbers per pass of their schedulers.

The trees of all ranks change in step, but each rank has copies, reads, and clocks of its own. So what is
complete, or late, on one rank only has not happened yet. In each pass every part says what it could do now
(`Part.propose`: numbers, without changing anything), the smallest of the ranks' numbers is taken at each
place in one collective, and the parts do what was agreed (`Part.act`), in the same pass and order.

How many numbers a part says follows from what all ranks have alike: what it has submitted, not what has come
of it. Ranks that are out of step all the same find out by the vector's first two numbers.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sglang_ext.errors import InternalError

Least = Callable[[Sequence[int]], Sequence[int]]
"""The smallest of the ranks' numbers at each place; 64 bits each. Every rank calls it at once."""

NOT_YET: Final = -1
"""Said of what is not known on this rank yet; less than all that may be known."""
_SMALLEST_VECTOR: Final = 32
"""Vectors have this many numbers or a power of two more, so that ranks out of step still compare the same."""


class Part(Protocol):
    """Something that changes the tree by what only becomes known in time."""

    def propose(self) -> Sequence[int]:
        """What this rank could do now. Changes nothing that the ranks have in common."""

    def act(self, agreed: Sequence[int]) -> None:
        """Do what was agreed: as many numbers as proposed, or none where nothing was compared."""


class Ranks:
    """The ranks of one instance, as one of them sees them. In the scheduler's thread.

    Args:
        least: compares numbers; None where there is one rank, which agrees with itself.
        check: compare in each pass, also when no part has anything to decide, so that ranks that are out of
            step fail in that very pass.
    """

    def __init__(self, least: Least | None = None, *, check: bool = False) -> None:
        self._least = least
        self._check = check
        self._parts: tuple[Part, ...] = ()
        self._riders: list[Part] = []
        self.passes = 0
        self.vectors = 0
        """Collectives since the start."""

    def __repr__(self) -> str:
        return f"Ranks(parts={len(self._parts)}, passes={self.passes}, vectors={self.vectors})"

    @property
    def alone(self) -> bool:
        """Whether there is one rank, which may take note of anything at any time."""
        return self._least is None

    def add(self, part: Part, *, rides: bool = False) -> None:
        """Ask it in each pass from now on, after those that came before. On all ranks in the same order.

        rides: its numbers go along where others have something to agree on, and are no reason to compare.
        """
        self._parts += (part,)
        if rides:
            self._riders.append(part)

    def remove(self, part: Part) -> None:
        """Ask it nothing more."""
        self._parts = tuple(known for known in self._parts if known is not part)

    def each_pass(self) -> None:
        """Agree, and act. Once per pass of the scheduler's loop, on every rank.

        Raises:
            InternalError: the ranks are out of step, and would answer wrongly from here on.
        """
        self.passes += 1
        parts = self._parts
        said = [part.propose() for part in parts]
        if self._least is not None:
            reasons = (numbers for part, numbers in zip(parts, said, strict=True) if part not in self._riders)
            if self._check or any(reasons):
                said = self._compare(said)
            else:
                said = [()] * len(parts)
        for part, numbers in zip(parts, said, strict=True):
            part.act(numbers)

    def at_once(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of the ranks' numbers, now, in a collective of its own.

        For the one question that cannot wait for the next pass: whether what streamed into a forward pass
        was good, which decides over its result. And where no pass is under way: when the cache is emptied.
        """
        return list(numbers) if self._least is None or not numbers else list(self._compare([numbers])[0])

    def _compare(self, said: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        assert self._least is not None
        lengths = [len(numbers) for numbers in said]
        step = zlib.crc32(repr((self.passes, lengths)).encode())
        vector = [step, -step, *itertools.chain.from_iterable(said)]
        size = max(_SMALLEST_VECTOR, 1 << (len(vector) - 1).bit_length())
        vector += [0] * (size - len(vector))
        self.vectors += 1
        agreed = iter(self._least(vector))
        if next(agreed) != -next(agreed):
            raise InternalError(
                f"the ranks of this instance are out of step: in pass {self.passes}, another rank has other "
                f"things to decide than {lengths} numbers of {len(self._parts)} parts"
            )
        return [list(itertools.islice(agreed, length)) for length in lengths]
