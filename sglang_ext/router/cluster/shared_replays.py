"""Used signatures of members, shared by all routers: a signed request is taken once, by one router."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sglang_ext.clock import Clock
from sglang_ext.cluster_key import ClusterKey, Replays, signed_part
from sglang_ext.router.cluster.broadcast import RouterChannel, RouterMessage, SignatureUsed
from sglang_ext.router.http.types import Request

USED_BEFORE = "its signature was used before"


class SharedReplays:
    """Checks that a member signed a request, and that no router took it before. A ``Topic``.

    Signatures are lost when a router ends, so a router takes no request that was signed before it began.

    Args:
        clock: seconds.
    """

    def __init__(self, channel: RouterChannel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._began = clock.wall()
        self._replays = Replays()
        channel.subscribe(self, SignatureUsed)

    def problem(self, request: Request, key: ClusterKey) -> str | None:
        """Why a request is not a member's; ``None`` when it is one's, and then no second time."""
        given, now = request.headers.get("authorization", ""), self._clock.wall()
        if self._replays.knows(given):
            return USED_BEFORE
        why = key.problem(given, request.method, request.target, request.body, now, self._began)
        if why is None:
            self._replays.is_again(given, now)
            if self._channel.is_open:
                self._channel.publish(SignatureUsed(self._channel.router, signed_part(given), age_s=0.0))
        return why

    # -- other routers ----------------------------------------------------------------------------

    def on_message(self, message: SignatureUsed) -> None:
        """Another router has taken a request."""
        self._replays.learn(message.signed, self._clock.wall() - message.age_s)

    def snapshot(self) -> Iterable[RouterMessage]:
        """All that were used, for a router that begins."""
        now = self._clock.wall()
        return [
            SignatureUsed(self._channel.router, signed, age_s=max(0.0, now - at))
            for signed, at in self._replays.used()
        ]

    def on_routers(self, names: Collection[str]) -> None:
        """Nothing to do: signatures stay used when the router that took them is gone."""

    def __repr__(self) -> str:
        return f"SharedReplays({self._replays})"
