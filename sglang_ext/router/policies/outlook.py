"""The terms of equation 1 at every instance of a fleet, as arrays, for fleets of a thousand instances.

``Costs`` answers for one instance at a time. A policy that asked it for each instance of a large fleet would
spend the time of a prefill on asking. The seconds of a prompt at one instance are a sum of a few products,
and of these only the factors differ between instances:

    queue + transfer + disk factor · load from disk + factor · exec

So the arrays hold queues and factors, and the methods return the other terms, which are the same for all
instances of one kind.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from sglang_ext.tiers import Tier

Numbers: TypeAlias = npt.NDArray[Any]
"""One number for each instance, in the order of a fleet."""


class Outlook(Protocol):
    """The terms at the instances of one fleet, at one moment. Seconds."""

    queue_s: Numbers
    """``Costs.queue_s`` of each instance."""
    factor: Numbers
    """Correction of computing times."""
    steps_s: Numbers | None
    """Time that an instance's running requests add to each pass of a prompt, uncorrected; None if none do."""
    waiting: Numbers | None
    """Whether other prompts wait at an instance, so that its exec depends on them; None if nowhere."""
    kind: Numbers
    """Number of each instance's kind: instances of one kind fill their passes alike and can fetch from the
    same others."""
    kinds: list[int]
    """The kinds that occur."""
    even: float | None = None
    """``factor`` where all instances have the same; None if they differ, or that is not known."""
    even_disks: bool = False
    """Whether ``disk_factor`` is known to be 1 everywhere."""
    even_fetches: bool = False
    """Whether ``fetch_factor`` is known to be the same everywhere."""

    @property
    def disk_factor(self) -> Numbers:
        """Correction of loads from the instance's own disk."""

    @property
    def fetch_factor(self) -> Numbers:
        """Relative time of transfers from an instance; infinite where none is possible."""

    def computing(self, kind: int, new: int, context: int) -> tuple[float, int]:
        """Seconds to compute a prompt at an idle instance of a kind, uncorrected, and its passes."""

    def adding_s(self, new: int, context: int) -> float:
        """A lower bound of the time that a prompt adds to prompts that wait, uncorrected."""

    def loading_s(self, tier: Tier, tokens: int) -> float:
        """Time to load from one of an instance's own tiers, uncorrected."""

    def moving_s(self, tokens: int) -> float:
        """Time of a transfer between instances, uncorrected: to compare sources."""

    def can_fetch(self, kind: int, sources: Numbers) -> Numbers:
        """Whether instances of a kind can fetch from each of the sources.

        Args:
            sources: positions in the fleet.
        """

    def reachable(self, kind: int, sources: Numbers) -> Numbers:
        """The sources that instances of a kind can fetch from."""
        found: Numbers = sources[self.can_fetch(kind, sources)]
        return found
