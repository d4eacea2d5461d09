"""Limits of API keys over several routers: each router reports its use to the others at once."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from sglang_ext.clock import Clock
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.router.cluster.broadcast import LimitUsed, Word
from sglang_ext.router.cluster.membership import ROUTER_TTL_S
from sglang_ext.router.tenancy.tenants import KeyRing, Meter, Use
from sglang_ext.signals import Signal


class SharedLimits:
    """Sends the use of limits at this router to the others, and takes in theirs. A ``Speaker``.

    Args:
        keys: the keys whose limits are shared.
        router: this router's name.
        clock: seconds.
        secret: of the cluster; seals the key's digest, so that a limit's name does not reveal its API key.
    """

    def __init__(self, keys: KeyRing, router: str, clock: Clock, secret: ClusterKey | None) -> None:
        self._keys = keys
        self._router = router
        self._clock = clock
        self._secret = secret
        self._named: dict[str, Meter] = {}
        self._of: tuple[Meter, ...] = ()
        """The meters of which ``_named`` was made."""
        self._heard: dict[str, float] = {}
        """When each router sent its last word."""
        self._routers: Collection[str] = ()
        self.said: Signal[[Word]] = Signal()
        keys.used.subscribe(self._used)

    def __repr__(self) -> str:
        return f"SharedLimits({len(self._heard)} routers heard)"

    def _used(self, meter: Meter) -> None:
        if self.said:
            self.said(self._word(meter))

    def _word(self, meter: Meter) -> LimitUsed:
        use = meter.use()
        return LimitUsed(
            self._router,
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

    def hear(self, word: Word) -> None:
        """Another router has let something through."""
        if isinstance(word, LimitUsed) and word.router != self._router:
            self._heard[word.router] = self._clock.monotonic()
            if (meter := self._meter(word.limit)) is not None:
                use = (word.running, word.taken, word.charged, word.requests_left, word.tokens_left)
                meter.on_remote_use(word.router, Use(*use))

    def words(self) -> Iterable[Word]:
        """The use of every limit at this router."""
        return [self._word(meter) for meter in self._keys.meters if meter.is_limited]

    def on_routers(self, names: Collection[str]) -> None:
        """A router that is gone has no request running any more; a router that spoke before it was listed has
        ``ROUTER_TTL_S`` to be listed.
        """
        now = self._clock.monotonic()
        for router, heard in list(self._heard.items()):
            if router not in names and (router in self._routers or now - heard > ROUTER_TTL_S):
                del self._heard[router]
                for meter in self._keys.meters:
                    meter.gone(router)
        self._routers = frozenset(names)
