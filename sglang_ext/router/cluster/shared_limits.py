"""Limits of API keys over several routers: each router reports its use to the others at once."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from sglang_ext.clock import Clock
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.router.cluster.broadcast import LimitUsed, RouterChannel, RouterMessage
from sglang_ext.router.cluster.membership import ROUTER_TTL_S
from sglang_ext.router.tenancy.tenants import KeyRing, Meter, Use


class SharedLimits:
    """Sends the use of limits at this router to the others, and takes in theirs. A ``Topic``.

    Args:
        keys: the keys whose limits are shared.
        clock: seconds.
        secret: of the cluster; seals the key's digest, so that a limit's name does not reveal its API key.
    """

    def __init__(
        self, channel: RouterChannel, keys: KeyRing, clock: Clock, secret: ClusterKey | None
    ) -> None:
        self._channel = channel
        self._keys = keys
        self._clock = clock
        self._secret = secret
        self._named: dict[str, Meter] = {}
        self._of: tuple[Meter, ...] = ()
        """The meters of which ``_named`` was made."""
        self._last_message: dict[str, float] = {}
        """When each router sent its last message."""
        self._routers: Collection[str] = ()
        channel.subscribe(self, LimitUsed)
        keys.used.subscribe(self._publish)

    def __repr__(self) -> str:
        return f"SharedLimits({len(self._last_message)} routers)"

    def _publish(self, meter: Meter) -> None:
        if self._channel.is_open:
            self._channel.publish(self._message(meter))

    def _message(self, meter: Meter) -> LimitUsed:
        use = meter.use()
        return LimitUsed(
            self._channel.router,
            self._name(meter),
            use.running,
            use.taken,
            use.charged,
            use.requests_left,
            use.tokens_left,
        )

    def _name(self, meter: Meter) -> str:
        if self._secret is not None:
            return self._secret.seal("limit", meter.digest)[:32]
        return hashlib.blake2b(meter.digest, digest_size=16, person=b"limit").hexdigest()

    def _meter(self, name: str) -> Meter | None:
        if (meters := self._keys.meters) is not self._of:
            self._of, self._named = meters, {self._name(meter): meter for meter in meters}
        return self._named.get(name)

    def on_message(self, message: LimitUsed) -> None:
        """Another router reports its use of a limit."""
        self._last_message[message.router] = self._clock.monotonic()
        if (meter := self._meter(message.limit)) is not None:
            left = message.requests_left, message.tokens_left
            use = Use(message.running, message.taken, message.charged, *left)
            meter.on_remote_use(message.router, use)

    def snapshot(self) -> Iterable[RouterMessage]:
        """The use of every limit at this router."""
        return [self._message(meter) for meter in self._keys.meters if meter.is_limited]

    def on_routers(self, names: Collection[str]) -> None:
        """A router that is gone has no request running any more; a router that spoke before it was listed has
        ``ROUTER_TTL_S`` to be listed.
        """
        now = self._clock.monotonic()
        for router, sent in list(self._last_message.items()):
            if router not in names and (router in self._routers or now - sent > ROUTER_TTL_S):
                del self._last_message[router]
                for meter in self._keys.meters:
                    meter.gone(router)
        self._routers = frozenset(names)
