"""The measured speed of copies."""

from __future__ import annotations

from typing import Final

_SMOOTHING: Final = 0.3
"""Weight of the newest measurement of a bandwidth."""
HOPE: Final = 1.1
"""The factor by which an estimate grows each time the tier was too slow to be used."""


class Bandwidth:
    """Bytes per second of one tier: a running average over loads."""

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None

    def observe(self, nbytes: int, seconds: float) -> None:
        """Add a load that has ended."""
        if nbytes <= 0 or seconds <= 0:
            return
        now = nbytes / seconds
        before = self.bytes_per_second
        self.bytes_per_second = now if before is None else before + _SMOOTHING * (now - before)

    def hope(self) -> None:
        """Raise the estimate of a tier that was too slow to be used, so that it is tried again."""
        if self.bytes_per_second is not None:
            self.bytes_per_second *= HOPE

    def seconds(self, nbytes: int) -> float | None:
        """To load so many bytes; None when unknown."""
        return None if self.bytes_per_second is None else nbytes / self.bytes_per_second
