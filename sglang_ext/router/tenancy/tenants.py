"""Access to the router: API keys, their tenants, and the limits of each key.

A key file names every key with its tenant. Keys are kept as keyed digests only, under a secret drawn at the
start, so that neither a dump of the router's memory nor the time a comparison takes reveals a key. A tenant's
salt is put into every request of the tenant by the router, and requests that bring one of their own are
refused: equal prompts of two tenants then never share KV, on no instance and in no tier.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_ext.clock import Clock
from sglang_ext.errors import ConfigError, InternalError
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.router.tenancy.rate import TokenBucket
from sglang_ext.signals import Signal

SALT_PREFIX = "kv-tenant-"
"""How every salt begins that the router sets. It is derived from the tenant's name, so that KV on disk is
found again after a restart, and by every router of a cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEntry:
    """One key of the file."""

    tenant: str
    digest: bytes
    """SHA-256 of the key."""
    priority: int = 0
    """Larger goes first; the key's priority caps a request's own."""
    admin: bool = False
    """May flush, abort, profile and see every tenant's requests."""
    isolated: bool = True
    """Its KV is its tenant's alone. Otherwise it shares KV with every key that is not isolated."""
    requests_per_second: float | None = None
    burst: int | None = None
    """Requests at once after a pause; one second's worth, at least 1, when absent."""
    concurrent: int | None = None
    tokens_per_minute: int | None = None
    """Prompt tokens, and generated ones; the latter are charged when an answer has ended."""

    @property
    def salt(self) -> str | None:
        """The salt that keeps the tenant's KV apart; None for a shared one."""
        if not self.isolated:
            return None
        return SALT_PREFIX + hashlib.sha256(self.tenant.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Use:
    """One router's use of a key's limits. Requests and tokens are counted from its start."""

    running: int
    taken: int
    charged: int
    requests_left: float | None = None
    tokens_left: float | None = None
    """The fill of the buckets as that router has it; None without such a limit."""


class Meter:
    """The use of one key's limits: at this router, and at others as soon as they report it.

    Several routers together can exceed a limit by the requests that come before their reports have arrived; a
    bucket makes good for it later.

    Args:
        entry: the key, with its limits.
        clock: seconds.
        used: called when something was used of a limit.
    """

    def __init__(
        self, entry: KeyEntry, clock: Clock, used: Callable[[Meter], object] = lambda meter: None
    ) -> None:
        now = clock.monotonic()
        self._clock = clock
        self.entry = entry
        self._used = used
        self._others: dict[str, Use] = {}
        """The last reported use of each other router."""
        self._taken = self._charged = 0
        rate, tokens = entry.requests_per_second, entry.tokens_per_minute
        self._requests = TokenBucket(rate, max(1.0, entry.burst or rate), now) if rate else None
        self._tokens = TokenBucket(tokens / 60, tokens, now) if tokens else None
        self.running = 0
        """Here; ``elsewhere`` counts those of other routers."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return self.entry.digest

    @property
    def elsewhere(self) -> int:
        """Requests of this key that run at other routers."""
        return sum(use.running for use in self._others.values())

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request that is work while the block runs.

        Raises:
            RequestRefused: 429, with the seconds after which it may be tried again.
        """
        if (refused := self._too_much()) is not None:
            raise refused
        self._take()
        with self.carrying():
            yield

    def count(self) -> None:
        """Count one request by its rate alone.

        Raises:
            RequestRefused: as ``request``.
        """
        self._take()
        self._notify()

    def _take(self) -> None:
        if self._requests is not None and (wait := self._requests.take(self._clock.monotonic())):
            raise self._too_fast(wait)
        self._taken += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request that was counted by its rate as running while the block runs.

        Raises:
            RequestRefused: as many run as the key may have.
        """
        if (refused := self._too_many()) is not None:
            raise refused
        with self.carrying():
            yield

    def refusal(self, *, work: bool) -> RequestRefused | None:
        """Why one more request would be refused now; it is not counted.

        Args:
            work: it would be counted by ``request``, not by ``count``.
        """
        if work and (refused := self._too_much()) is not None:
            return refused
        wait = 0.0 if self._requests is None else self._requests.wait(self._clock.monotonic())
        return self._too_fast(wait) if wait > 1e-6 else None

    def _too_much(self) -> RequestRefused | None:
        refused = self._too_many()
        if (
            refused is None
            and self._tokens is not None
            and (wait := self._tokens.wait(self._clock.monotonic()))
        ):
            limit = f"this key may use {self.entry.tokens_per_minute} tokens a minute"
            return too_many(limit, wait, "tokens")
        return refused

    def _too_many(self) -> RequestRefused | None:
        most, running = self.entry.concurrent, self.running + self.elsewhere
        if most is None or running < most:
            return None
        return too_many(f"{running} requests of this key are running, its limit", 1.0, "concurrency")

    def _too_fast(self, wait: float) -> RequestRefused:
        limit = f"this key may send {self.entry.requests_per_second:g} requests a second"
        return too_many(limit, wait, "requests")

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Count one request as running while the block runs, without asking whether it may."""
        self.running += 1
        self._notify()
        try:
            yield
        finally:
            self.running -= 1
            self._notify()

    def charge(self, tokens: int) -> None:
        """Tokens were used; use beyond the limit delays later requests."""
        if self._tokens is not None and tokens > 0:
            self._tokens.charge(self._clock.monotonic(), tokens)
            self._charged += tokens
            self._notify()

    @property
    def is_limited(self) -> bool:
        """Whether the key has any limit."""
        limits = (self._requests, self._tokens, self.entry.concurrent)
        return any(limit is not None for limit in limits)

    def _notify(self) -> None:
        if self.is_limited:
            self._used(self)

    def use(self) -> Use:
        """The use at this router."""
        now = self._clock.monotonic()
        left = (None if bucket is None else bucket.level(now) for bucket in (self._requests, self._tokens))
        return Use(self.running, self._taken, self._charged, *left)

    def on_remote_use(self, router: str, use: Use) -> None:
        """Take in the use that another router has reported."""
        now = self._clock.monotonic()
        before = self._others.get(router)
        self._others[router] = use
        if before is None or use.taken < before.taken or use.charged < before.charged:
            # Its first report, or the first since its limits changed: only its remaining budget counts.
            for bucket, left in ((self._requests, use.requests_left), (self._tokens, use.tokens_left)):
                if bucket is not None and left is not None:
                    bucket.lower(now, left)
            return
        if self._requests is not None:
            self._requests.charge(now, use.taken - before.taken)
        if self._tokens is not None:
            self._tokens.charge(now, use.charged - before.charged)

    def gone(self, router: str) -> None:
        """Another router is gone, and its requests with it."""
        self._others.pop(router, None)

    def check(self) -> None:
        """Verify the count.

        Raises:
            InternalError: it is impossible.
        """
        if self.running < 0:
            raise InternalError(f"{self.running} requests of {self.entry.tenant} are running")


def too_many(why: str, wait_s: float, limit: str) -> RequestRefused:
    """The answer to a request beyond a limit."""
    return RequestRefused(
        f"{why}; try again in {max(1, round(wait_s + 0.5))} s",
        status=429,
        kind="rate_limit_error",
        code=f"{limit}_limit_exceeded",
        headers={"retry-after": str(max(1, round(wait_s + 0.5)))},
    )


@dataclass(frozen=True)
class Caller:
    """The sender of a request, as its key identifies it."""

    tenant: str | None = None
    """``None`` where the router has no key file."""
    priority: int | None = None
    """The most a request may ask for; ``None`` for no bound."""
    admin: bool = True
    salt: str | None = None
    meter: Meter | None = None
    trusted: frozenset[str] = frozenset()
    """Fields of requests for which the operator vouches; see ``request_fields``."""

    @cached_property
    def scope(self) -> str:
        """The prefix, at the workers, of names that clients choose (``rid``, ``session_id``), so that one
        tenant cannot name another's.
        """
        return "" if self.tenant is None else hashlib.sha256(self.tenant.encode()).hexdigest()[:12] + "-"


ANYBODY = Caller()
"""Where no key is asked for, and who has the router's own key."""


class KeyRing:
    """All keys. Replaced as a whole when the file is read again; the use of limits stays.

    Args:
        clock: seconds, for limits.
        api_key: a key of the operator's own, beside those of the file (``--api-key``).
        trusted: fields that clients without a tenant may set.
    """

    def __init__(
        self, clock: Clock, *, api_key: str | None = None, trusted: frozenset[str] = frozenset()
    ) -> None:
        self._clock = clock
        self._anybody = Caller(trusted=trusted)
        self._secret = secrets.token_bytes(32)
        self._operator = None if api_key is None else self._conceal(_digest(api_key))
        self._callers: dict[bytes, Caller] = {}
        self._meters: dict[bytes, tuple[KeyEntry, Meter]] = {}
        self.asks = self._operator is not None
        """Whether a key is needed at all."""
        self.meters: tuple[Meter, ...] = ()
        """The meter of each key; another tuple after each ``replace``."""
        self.used: Signal[[Meter]] = Signal()
        """Something was used of a key's limits."""

    @property
    def tenants(self) -> tuple[str, ...]:
        """The names of all tenants."""
        return tuple(sorted({caller.tenant for caller in self._callers.values() if caller.tenant}))

    def replace(self, entries: tuple[KeyEntry, ...]) -> None:
        """Take these keys, and no others, from now on."""
        callers: dict[bytes, Caller] = {}
        meters: dict[bytes, tuple[KeyEntry, Meter]] = {}
        for entry in entries:
            concealed = self._conceal(entry.digest)
            known = self._meters.get(concealed)
            meter = (
                known[1] if known is not None and known[0] == entry else Meter(entry, self._clock, self.used)
            )
            meters[concealed] = (entry, meter)
            callers[concealed] = Caller(entry.tenant, entry.priority, entry.admin, entry.salt, meter)
        self._callers, self._meters, self.asks = callers, meters, True
        self.meters = tuple(meter for _, meter in meters.values())

    def caller(self, key: str | None) -> Caller | None:
        """The caller with this key; ``None`` for an unknown key."""
        if not self.asks:
            return self._anybody
        if not key:
            return None
        concealed = self._conceal(_digest(key))
        # Both always run, and compare digests under a secret: the time reveals nothing about keys.
        is_operator = hmac.compare_digest(concealed, self._operator or b"\0" * 32)
        found = self._callers.get(concealed)
        return self._anybody if is_operator else found

    def _conceal(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()

    def __repr__(self) -> str:
        return f"KeyRing({len(self._callers)} keys of {len(self.tenants)} tenants)"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# -- the key file ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    kind: type | tuple[type, ...]
    what: str
    least: float | None = None


_FIELDS: Mapping[str, _Field] = {
    "key": _Field(str, "a string"),
    "key_sha256": _Field(str, "a string of 64 hex digits"),
    "tenant": _Field(str, "a string"),
    "priority": _Field(int, "an integer"),
    "admin": _Field(bool, "true or false"),
    "isolated": _Field(bool, "true or false"),
    "requests_per_second": _Field((int, float), "a number above 0", 0),
    "burst": _Field(int, "an integer above 0", 0),
    "concurrent": _Field(int, "an integer above 0", 0),
    "tokens_per_minute": _Field(int, "an integer above 0", 0),
}
_FLAG = "--api-keys-file"
MIN_KEY_CHARS = 8


def parse_keys(document: Any) -> tuple[KeyEntry, ...]:
    """The keys of a file that has been read as JSON or TOML.

    Raises:
        ConfigError: names the entry and the field, never the key.
    """
    if not isinstance(document, dict) or set(document) != {"keys"} or not isinstance(document["keys"], list):
        raise ConfigError("the file must have one table, 'keys', with an entry per key", field=_FLAG)
    entries = tuple(_parse_entry(item, f"keys[{index}]") for index, item in enumerate(document["keys"]))
    digests = [entry.digest for entry in entries]
    for index, digest in enumerate(digests):
        if digest in digests[:index]:
            raise ConfigError(f"keys[{index}] has the same key as keys[{digests.index(digest)}]", field=_FLAG)
    shared: dict[str, bool] = {}
    for index, entry in enumerate(entries):
        if shared.setdefault(entry.tenant, entry.isolated) != entry.isolated:
            raise ConfigError(
                f"keys[{index}]: tenant {entry.tenant!r} is isolated with one key and not with another",
                field=_FLAG,
            )
    return entries


def _parse_entry(item: Any, where: str) -> KeyEntry:
    if not isinstance(item, dict):
        raise ConfigError(f"{where} must be a table", field=_FLAG)
    for name, value in item.items():
        known = _FIELDS.get(name)
        if known is None:
            raise ConfigError(
                f"{where} has an unknown field {str(name)[:40]!r}",
                field=_FLAG,
                hint=f"Fields are {', '.join(_FIELDS)}",
            )
        fits = isinstance(value, known.kind) and (known.kind is bool or not isinstance(value, bool))
        if not fits or (known.least is not None and not value > known.least):
            raise ConfigError(f"{where}.{name} must be {known.what}", field=_FLAG)
    values = dict(item)
    if not values.get("tenant"):
        raise ConfigError(f"{where} names no tenant", field=_FLAG)
    digest = _entry_digest(values.pop("key", None), values.pop("key_sha256", None), where)
    return KeyEntry(digest=digest, **values)


def _entry_digest(key: str | None, sha256: str | None, where: str) -> bytes:
    if (key is None) == (sha256 is None):
        raise ConfigError(f"{where} must have either 'key' or 'key_sha256'", field=_FLAG)
    if key is not None:
        if len(key) < MIN_KEY_CHARS or key != key.strip():
            raise ConfigError(
                f"{where}.key must have at least {MIN_KEY_CHARS} characters, no space around", field=_FLAG
            )
        return _digest(key)
    try:
        digest = bytes.fromhex(sha256 or "")
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{where}.key_sha256 must be 64 hex digits", field=_FLAG)
    return digest
