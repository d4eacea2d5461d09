"""Budgets of shared resources by tenant: bytes of request bodies, and time of the tokenizer's threads.

Every tenant has a budget, whatever limits its keys have. Without tenants each address of clients has one.
"""

from __future__ import annotations

from sglang_ext.clock import Clock
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tenancy.bounded import Bounded, size_of
from sglang_ext.router.tenancy.rate import TokenBucket
from sglang_ext.router.tenancy.tenants import Caller, too_many

MINUTE_S = 60.0
COUNTED_BYTES = 1 << 16
"""Bytes of small bodies that are charged together."""
MOST_BUDGETS = 4096
MAX_BYTES = 4 << 20
"""Budgets kept at a time, and their memory; the least recently used goes first."""


class Budget:
    """The use of one tenant, or of one client address.

    Args:
        owner: the tenant or address.
        clock: seconds.
        bytes_per_minute: of bodies; 0 for no limit.
        tokenizing_s: seconds of tokenizing per minute; 0 for no limit.
    """

    __slots__ = ("_bytes", "_clock", "_seconds", "_uncounted", "owner")

    def __init__(self, owner: str, clock: Clock, bytes_per_minute: int, tokenizing_s: float) -> None:
        self.owner = owner
        self._clock = clock
        self._uncounted = 0
        """Bytes not charged to the bucket yet: charging small bodies one by one would cost every request."""
        now = clock.monotonic()
        self._bytes = (
            TokenBucket(bytes_per_minute / MINUTE_S, bytes_per_minute, now) if bytes_per_minute else None
        )
        self._seconds = TokenBucket(tokenizing_s / MINUTE_S, tokenizing_s, now) if tokenizing_s else None

    def take_body(self, size: int) -> None:
        """A body of so many bytes has come.

        Raises:
            RequestRefused: 429, with the seconds after which it may be sent again.
        """
        self._uncounted += size
        if self._uncounted < COUNTED_BYTES or self._bytes is None:
            return
        if wait := self._bytes.take(self._clock.monotonic(), self._uncounted):
            self._uncounted -= size
            limit = (
                f"one client may send {int(self._bytes.burst)} bytes a minute "
                "(--tenant-limits bytes-per-minute)"
            )
            raise too_many(limit, wait, "bytes")
        self._uncounted = 0

    def body_refusal(self) -> RequestRefused | None:
        """Why a body would be refused before it has come."""
        if self._bytes is None or not (wait := self._bytes.wait(self._clock.monotonic(), 0.0)):
            return None
        return too_many("more bytes came of one client than --tenant-limits bytes-per-minute", wait, "bytes")

    def check_tokenizing(self) -> None:
        """Refuse a text while the budget of tokenizing is overdrawn.

        Raises:
            RequestRefused: 429, with the seconds after which it may be sent again.
        """
        if self._seconds is not None and (wait := self._seconds.wait(self._clock.monotonic(), 0.0)):
            limit = (
                f"the texts of one client may take {self._seconds.burst:g} s of tokenizing a minute "
                "(--tenant-limits tokenizing-share)"
            )
            raise too_many(limit, wait, "tokenizing")

    def tokenized(self, seconds: float) -> None:
        """Charge seconds of a tokenizer thread. An overdraft delays later texts."""
        if self._seconds is not None:
            self._seconds.charge(self._clock.monotonic(), seconds)

    def __repr__(self) -> str:
        return f"Budget({self.owner}, bytes={self._bytes}, tokenizing={self._seconds})"


class Budgets:
    """All budgets of a router.

    Args:
        clock: seconds.
        bytes_per_minute, tokenizing_s: see ``Budget``.
    """

    def __init__(self, clock: Clock, *, bytes_per_minute: int, tokenizing_s: float) -> None:
        self._clock = clock
        self._bytes_per_minute = bytes_per_minute
        self._tokenizing_s = tokenizing_s
        self._budgets: Bounded[str, Budget] = Bounded(
            MAX_BYTES, lambda owner, budget: size_of(owner), max_entries=MOST_BUDGETS
        )

    def of(self, caller: Caller, address: str) -> Budget:
        """The budget that a request is charged to.

        Args:
            address: that it came from.
        """
        owner = address if caller.tenant is None else "tenant " + caller.tenant
        budget = self._budgets.use(owner)
        if budget is None:
            budget = Budget(owner, self._clock, self._bytes_per_minute, self._tokenizing_s)
            self._budgets.put(owner, budget)
        return budget

    def __len__(self) -> int:
        return len(self._budgets)

    def __repr__(self) -> str:
        return f"Budgets({len(self)})"
