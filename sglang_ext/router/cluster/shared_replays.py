"""Used signatures of members, shared by all routers: a signed request is taken once, by one router."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sglang_ext.clock import Clock
from sglang_ext.cluster_key import ClusterKey, Replays, signed_part
from sglang_ext.router.cluster.broadcast import SignatureUsed, Word
from sglang_ext.router.http.types import Request
from sglang_ext.signals import Signal

USED_BEFORE = "its signature was used before"


class SharedReplays:
    """Checks that a member signed a request, and that no router took it before. A ``Speaker`` among routers.

    Signatures are lost when a router ends, so a router takes no request that was signed before it began.

    Args:
        router: the name of this router.
        clock: seconds.
    """

    def __init__(self, router: str, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._began = clock.wall()
        self._replays = Replays()
        self.said: Signal[[Word]] = Signal()

    def problem(self, request: Request, key: ClusterKey) -> str | None:
        """Why a request is not a member's; ``None`` when it is one's, and then no second time."""
        given, now = request.headers.get("authorization", ""), self._clock.wall()
        if self._replays.knows(given):
            return USED_BEFORE
        why = key.problem(given, request.method, request.target, request.body, now, self._began)
        if why is None:
            self._replays.is_again(given, now)
            if self.said:
                self.said(SignatureUsed(self._router, signed_part(given), age_s=0.0))
        return why

    # -- other routers ----------------------------------------------------------------------------

    def hear(self, word: Word) -> None:
        """Another router has taken a request."""
        if isinstance(word, SignatureUsed) and word.router != self._router:
            self._replays.learn(word.signed, self._clock.wall() - word.age_s)

    def words(self) -> Iterable[Word]:
        """All that were used, for a router that begins."""
        now = self._clock.wall()
        return [
            SignatureUsed(self._router, signed, age_s=max(0.0, now - at))
            for signed, at in self._replays.used()
        ]

    def on_routers(self, names: Collection[str]) -> None:
        """Nothing to do: signatures stay used when the router that took them is gone."""

    def __repr__(self) -> str:
        return f"SharedReplays({self._replays})"
