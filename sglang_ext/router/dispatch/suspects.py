"""Requests during which instances died: after two deaths a request is refused for a while.

A request may end the server that works on it. It is sent to a second instance, because the first may have
died of something else. With the second death it is refused, and so is every request with the same body, until
``REFUSED_S`` have passed since the last death: a client that repeats the request would end the next two.

Every request that the death of an instance interrupts counts, as the cause cannot be seen from outside. A
request that another instance answers is cleared. Routers share their observations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import TypeAlias

from sglang_ext.clock import Clock
from sglang_ext.router.cluster.broadcast import RequestLost, RouterChannel, RouterMessage
from sglang_ext.router.http.types import RequestRefused

REFUSED_S = 300.0
"""How long a request is refused, and how long a death counts."""
ONE_DEATH_S = 10.0
"""Losses at one instance within this time are one death: equal requests may run there, and no server starts
again that fast."""
MOST_DEATHS = 2
MAX_SUSPECTS = 4096
"""The oldest are dropped."""


def digest_of_request(scope: str, target: str, body: bytes) -> str:
    """The key by which a repeated request is recognised.

    Args:
        scope: the tenant's (``Caller.scope``), so that one tenant's requests never refuse another's.
        target: path and query.
        body: as the client sent it.
    """
    of = blake2b(f"{scope}\n{target}".encode(), digest_size=32).digest()
    return blake2b(body, digest_size=16, key=of).hexdigest()


Loss: TypeAlias = tuple[str, float]
"""(instance, when): an instance went away while it worked on a request."""


def with_loss(losses: Sequence[Loss], loss: Loss, now: float) -> list[Loss]:
    """The losses of one request that still count, with one more; one of the same death adds nothing."""
    kept = [(instance, at) for instance, at in losses if now - at < REFUSED_S]
    if all(instance != loss[0] or abs(at - loss[1]) >= ONE_DEATH_S for instance, at in kept):
        kept.append(loss)
    return kept


def ends_servers(losses: Sequence[Loss], now: float) -> bool:
    """Whether a request with these losses is refused."""
    return sum(now - at < REFUSED_S for _, at in losses) >= MOST_DEATHS


class Suspects:
    """Requests that instances' deaths interrupted. A ``broadcast.Topic``.

    Args:
        clock: seconds.
    """

    def __init__(self, channel: RouterChannel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._losses: OrderedDict[str, list[Loss]] = OrderedDict()
        channel.subscribe(self, RequestLost)

    def __len__(self) -> int:
        return len(self._losses)

    def __repr__(self) -> str:
        return f"Suspects({len(self._losses)})"

    def lost(self, digest: str, instance: str) -> None:
        """An instance went away while it worked on a request."""
        self._add(digest, (instance, self._clock.monotonic()))
        if self._channel.is_open:
            self._channel.publish(RequestLost(self._channel.router, digest, instance, age_s=0.0))

    def answered(self, digest: str) -> None:
        """An instance has answered a request: it is no cause of deaths."""
        self._losses.pop(digest, None)

    def check(self, digest: str) -> None:
        """Refuse a request that was at too many deaths.

        Raises:
            RequestRefused: 500, with code ``request_ends_servers``.
        """
        losses = self._losses.get(digest)
        if losses is not None and ends_servers(losses, self._clock.monotonic()):
            raise RequestRefused(
                f"{MOST_DEATHS} servers ended while they worked on this request. It is not sent to another "
                f"one, and refused for {REFUSED_S:g} s; the last lines of the servers' logs have the cause",
                status=500,
                kind="server_error",
                code="request_ends_servers",
            )

    def _add(self, digest: str, loss: Loss) -> None:
        losses = self._losses.get(digest, [])
        self._losses[digest] = with_loss(losses, loss, self._clock.monotonic())
        self._losses.move_to_end(digest)
        while len(self._losses) > MAX_SUSPECTS:
            self._losses.popitem(last=False)

    # -- other routers ----------------------------------------------------------------------------

    def on_message(self, message: RequestLost) -> None:
        """Another router has lost a request."""
        self._add(message.digest, (message.instance, self._clock.monotonic() - message.age_s))

    def snapshot(self) -> Iterable[RouterMessage]:
        """All losses that count, for a router that begins."""
        now = self._clock.monotonic()
        return [
            RequestLost(self._channel.router, digest, instance, age_s=now - at)
            for digest, losses in self._losses.items()
            for instance, at in losses
            if now - at < REFUSED_S
        ]

    def on_routers(self, names: Collection[str]) -> None:
        """Losses that another router saw count on when that router is gone."""
