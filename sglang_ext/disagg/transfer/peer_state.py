"""State of each request of a connection, and the connection's counters."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from sglang_ext.disagg.errors import StaleReadError, TransferError
from sglang_ext.disagg.transfer.verify import Check, Expect
from sglang_ext.disagg.transports import CancelToken


@dataclass(slots=True)
class PeerStats:
    """Counts since the connection was made; `runs` are before, `transactions` after coalescing."""

    bytes: int = 0
    runs: int = 0
    transactions: int = 0
    completed: int = 0
    stale: int = 0
    failed: int = 0

    def count(self, error: TransferError | None) -> None:
        """One request has ended."""
        if error is None:
            self.completed += 1
        elif isinstance(error, StaleReadError):
            self.stale += 1
        else:
            self.failed += 1

    def add(self, other: PeerStats) -> None:
        """Add another's counts to these."""
        for name in ("bytes", "runs", "transactions", "completed", "stale", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Phase(enum.Enum):
    """Where a request is, from the event loop's point of view."""

    MOVING = "moving"
    VERIFYING = "verifying"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Request:
    """One request of a connection, from its first transfer until `landed` has returned or raised."""

    landed: asyncio.Future[None]
    expects: list[Expect] = field(default_factory=list)
    grants: set[int] = field(default_factory=set)
    """Under which it writes."""
    checks: list[Check] | None = None
    """How to read the counters of `expects`; None until it is prepared."""
    stale: int | None = None
    """The comparison's result, when the counters came along with the last of the data."""
    phase: Phase = Phase.MOVING
    error: TransferError | None = None
    token: CancelToken = field(default_factory=CancelToken)
    """Stops the verification."""
